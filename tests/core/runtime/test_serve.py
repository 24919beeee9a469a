"""`serve` until a signal: tasks, reloads and errors."""

import asyncio
import signal

import anyio
import pytest

from metagpu.core.errors import MetagpuError
from metagpu.core.runtime.serve import serve


class Task:
    """A task that records its start and end."""

    def __init__(self) -> None:
        self.started = anyio.Event()
        self.ended = False

    async def run(self) -> None:
        """Run until cancelled."""
        self.started.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.ended = True


async def no_reload() -> None:
    """Accept no reload."""
    raise AssertionError


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_every_task(number: signal.Signals) -> None:
    """SIGTERM and SIGINT end all tasks together, and the call returns."""
    tasks = [Task(), Task()]

    async def stop() -> None:
        for task in tasks:
            await task.started.wait()
        signal.raise_signal(number)
        await anyio.sleep_forever()

    with anyio.fail_after(30):
        await serve(*[task.run for task in tasks], stop, reload=no_reload)
    assert [task.ended for task in tasks] == [True, True]


@pytest.mark.parametrize("late", [False, True])
async def test_a_signal_while_all_ends_is_heard(*, late: bool) -> None:
    """A signal that comes when another reason has begun the end is returned, and not lost."""
    over = anyio.Event()

    async def task() -> None:
        over.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                if late:
                    signal.raise_signal(signal.SIGTERM)
                await anyio.wait_all_tasks_blocked()

    with anyio.fail_after(30):
        assert await serve(task, reload=no_reload, over=over) is late


async def test_a_hangup_reloads_and_goes_on() -> None:
    """SIGHUP reloads each time; tasks go on."""
    reloads = anyio.Semaphore(0)
    task = Task()

    async def reload() -> None:
        reloads.release()

    async def steer() -> None:
        await task.started.wait()
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
            await reloads.acquire()
            assert not task.ended
        signal.raise_signal(signal.SIGTERM)

    with anyio.fail_after(30):
        await serve(task.run, steer, reload=reload)
    assert task.ended


async def test_a_reload_that_hangs_delays_no_end() -> None:
    """SIGTERM ends all tasks while a reload waits, for a GPU that hangs for instance."""
    reloading = anyio.Event()

    async def reload() -> None:
        reloading.set()
        await anyio.sleep_forever()

    async def steer() -> None:
        signal.raise_signal(signal.SIGHUP)
        await reloading.wait()
        signal.raise_signal(signal.SIGTERM)

    with anyio.fail_after(30):
        await serve(steer, reload=reload)


async def test_a_hangup_during_a_reload_reloads_again() -> None:
    """The files of the last SIGHUP are read, however many came during a reload."""
    began, proceed = anyio.Semaphore(0), anyio.Semaphore(0)

    async def reload() -> None:
        began.release()
        await proceed.acquire()

    async def steer() -> None:
        signal.raise_signal(signal.SIGHUP)
        await began.acquire()
        signal.raise_signal(signal.SIGHUP)
        await anyio.wait_all_tasks_blocked()
        proceed.release()
        await began.acquire()
        signal.raise_signal(signal.SIGTERM)

    with anyio.fail_after(30):
        await serve(steer, reload=reload)


async def test_a_failing_task_ends_the_others_and_raises() -> None:
    """The first failure of a task ends the process."""
    task = Task()

    async def fail() -> None:
        await task.started.wait()
        raise RuntimeError("broken")

    with anyio.fail_after(30), pytest.raises(ExceptionGroup) as caught:
        await serve(task.run, fail, reload=no_reload)
    assert caught.group_contains(RuntimeError, match="broken")
    assert task.ended


async def test_a_stray_cancellation_is_no_orderly_end() -> None:
    """A task that cancels itself ends the process with an error, not in silence."""

    async def cancel_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await anyio.sleep_forever()

    with anyio.fail_after(30), pytest.raises(MetagpuError, match="without a signal"):
        await serve(Task().run, cancel_itself, reload=no_reload)


async def test_what_is_over_ends_every_task() -> None:
    """The event that all is over ends all tasks, and the call returns, as after a signal."""
    task, over = Task(), anyio.Event()

    async def end() -> None:
        await task.started.wait()
        over.set()

    with anyio.fail_after(30):
        await serve(task.run, end, reload=no_reload, over=over)

    assert task.ended
