"""Tasks of a program: the main group, restarts, and works done together."""

import asyncio
import signal
from functools import partial

import anyio
import pytest

from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.errors import MetagpuError
from metagpu.core.runtime import tasks
from metagpu.core.runtime.tasks import (
    MainTasks,
    RestartTiming,
    run_with_restart,
    serve,
    start_together,
)
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import skip


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


async def test_a_signal_withdraws_first_and_a_second_one_ends_at_once() -> None:
    """Tasks go on while the daemon withdraws; a second signal waits for nothing."""
    withdrawing, task = anyio.Event(), Task()

    async def withdraw() -> None:
        withdrawing.set()
        await anyio.sleep_forever()

    async def steer() -> None:
        await task.started.wait()
        signal.raise_signal(signal.SIGTERM)
        await withdrawing.wait()
        assert not task.ended
        signal.raise_signal(signal.SIGINT)

    with anyio.fail_after(30):
        await serve(task.run, steer, reload=no_reload, withdraw=withdraw)
    assert task.ended


async def test_the_end_may_have_another_reason() -> None:
    """A daemon that is over ends without a signal."""
    over, task = anyio.Event(), Task()

    async def end() -> None:
        await task.started.wait()
        over.set()

    with anyio.fail_after(30):
        await serve(task.run, end, reload=no_reload, over=over)
    assert task.ended


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


WRONG = ConfigReason.INVALID_VALUE


class OptionalTask:
    """A task that fails, returns, and then runs."""

    def __init__(self) -> None:
        self.starts = 0
        self.runs = anyio.Event()

    async def run(self) -> None:
        """Fail at the first start, return at the second, run from the third on."""
        self.starts += 1
        if self.starts == 1:
            raise ZeroDivisionError
        if self.starts == 2:
            return
        self.runs.set()
        await anyio.sleep_forever()


async def test_an_ended_task_starts_again_and_is_logged() -> None:
    """A main task that fails, and one that merely returns, is logged and started again."""
    kept, task = MainTasks(RestartTiming(first_delay=0.001)), OptionalTask()

    with capture_module_logs(tasks) as entries:
        async with anyio.create_task_group() as group:
            group.start_soon(kept.keep("leases", task.run))
            await task.runs.wait()
            group.cancel_scope.cancel()

    ends = [
        (mapping["task"], mapping["reason"])
        for mapping in entries
        if mapping["event"] == "main task ended"
    ]
    assert ends == [
        ("leases", "ZeroDivisionError: ZeroDivisionError"),
        ("leases", "it returned"),
    ]


async def test_a_problem_stays_until_the_task_is_steady() -> None:
    """An ended task is a problem while it waits, and until it has run for a while again."""
    kept, ended, seen = MainTasks(RestartTiming(first_delay=1000)), False, anyio.Event()

    async def ends_once() -> None:
        nonlocal ended
        if not ended:
            ended = True
            return
        seen.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        assert kept.problems == {}
        group.start_soon(kept.keep("offers", ends_once))
        await anyio.wait_all_tasks_blocked()
        assert kept.problems == {"offers": "it returned"}
        skip(1000)
        await seen.wait()
        assert kept.problems == {"offers": "it returned"}
        skip(RestartTiming().steady)
        assert kept.problems == {}
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    "error", [ConfigError("no", WRONG), ExceptionGroup("", [ConfigError("no", WRONG)])]
)
async def test_an_error_of_ours_ends_the_daemon(error: Exception) -> None:
    """An error that metagpu raises on purpose passes: it is no fault that a restart mends."""

    async def decides() -> None:
        raise error

    with pytest.raises(type(error)):
        await MainTasks().keep("offers", decides)()


async def test_a_failed_task_starts_again() -> None:
    """A fault of a task is logged by name and the task starts again; a normal end is final."""
    tries = 0

    async def work() -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise KeyError("a fault of ours")

    with capture_module_logs(tasks) as entries, anyio.fail_after(30):
        await run_with_restart(work, "the weather", delay=0.01)

    assert tries == 3
    assert [(mapping["event"], mapping["task"]) for mapping in entries] == [
        ("task failed", "the weather")
    ] * 2


async def test_all_begin_and_all_are_waited_for() -> None:
    """Works that end are at work together, and all are done at the return."""
    at_work, most, done = 0, 0, 0

    async def work() -> None:
        nonlocal at_work, most, done
        at_work += 1
        most = max(most, at_work)
        await anyio.wait_all_tasks_blocked()
        at_work, done = at_work - 1, done + 1

    async with anyio.create_task_group() as group:
        await start_together(group, [work] * 5, max_wait=60)
        assert (most, done) == (5, 5)


async def test_one_that_hangs_delays_no_other_for_long() -> None:
    """A work that does not end is left behind, and goes on."""
    may_end, done = anyio.Event(), list[int]()

    async def work(number: int) -> None:
        if number == 0:
            await may_end.wait()
        done.append(number)

    async with anyio.create_task_group() as group:
        await start_together(group, [partial(work, number) for number in range(3)], max_wait=0.01)
        assert done == [1, 2]
        may_end.set()
    assert done == [1, 2, 0]
