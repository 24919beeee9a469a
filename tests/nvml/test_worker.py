"""The thread that short works share."""

import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import anyio
import pytest

from metagpu.nvml.worker import NvmlWorker, SharedThread
from tests.nvml.rig import DEADLINE
from tests.rigs.waiting import becomes

LONG = 60.0
SHORT = 0.005


class Held:
    """A work that goes on until it may end."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> int:
        """Begin, and wait for the end."""
        self.begun.set()
        assert self.may_end.wait(DEADLINE)
        return threading.get_ident()


async def test_works_that_come_together_share_one_thread_in_their_order() -> None:
    """None of them begins before all that the loop has at hand are there."""
    thread, order = SharedThread(LONG), list[int]()

    def work(number: int) -> int:
        order.append(number)
        return threading.get_ident()

    jobs = [thread.submit(partial(work, number)) for number in range(50)]
    assert not order
    threads = {await job.future for job in jobs}
    assert order == [*range(50)]
    assert len(threads) == 1
    assert await thread.submit(threading.get_ident).future != threading.get_ident()


async def test_another_thread_goes_on_without_one_that_takes_long() -> None:
    """Results before it and behind it come while it goes on; its own comes at its end."""
    thread, long = SharedThread(SHORT), Held()
    works: list[Callable[[], int]] = [threading.get_ident, long, *[threading.get_ident] * 20]
    before, held, *behind = [thread.submit(work) for work in works]
    assert all([await job.future for job in (before, *behind)])
    await becomes(long.begun.is_set)  # its thread may have taken it only
    assert not held.future.done()
    long.may_end.set()
    assert await held.future


async def test_many_that_hang_delay_no_other_for_long() -> None:
    """Each keeps a thread of its own, and what comes later is done by another."""
    thread, longs = SharedThread(SHORT), [Held() for _ in range(16)]
    held = [thread.submit(long) for long in longs]
    for _ in range(3):
        assert await thread.submit(threading.get_ident).future
    for long in longs:
        long.may_end.set()
    assert len({await job.future for job in held}) == 16


async def test_a_work_that_waits_can_be_taken_back() -> None:
    """One that has begun cannot, and nobody misses its result."""
    thread, long, done = SharedThread(LONG), Held(), list[int]()
    held, waits = thread.submit(long), thread.submit(partial(done.append, 1))
    last = thread.submit(partial(done.append, 2))
    await becomes(long.begun.is_set)
    assert thread.drop(waits)
    assert not thread.drop(held)
    held.future.cancel()
    long.may_end.set()
    await last.future
    assert done == [2]
    assert not waits.future.done()


async def test_a_failure_is_the_callers() -> None:
    """The thread goes on with what waits."""

    def fail() -> int:
        raise ValueError("no")

    thread = SharedThread(LONG)
    failed, fine = thread.submit(fail), thread.submit(threading.get_ident)
    with pytest.raises(ValueError, match="no"):
        await failed.future
    assert await fine.future


async def test_a_result_is_not_kept_back_by_a_later_work_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A work that ends just when its thread is to be replaced is delivered then."""
    thread, late, long = SharedThread(SHORT), Held(), Held()

    def end_late() -> float:
        """End the first work as the loop looks at the time, and wait for the next."""
        if threading.current_thread() is threading.main_thread():
            late.may_end.set()
            until = time.monotonic() + DEADLINE
            while not long.begun.is_set() and time.monotonic() < until:
                pass
        return time.monotonic()

    clock = SimpleNamespace(monotonic=end_late)
    monkeypatch.setattr("metagpu.nvml.worker.time", clock)
    first, last = thread.submit(late), thread.submit(long)
    with anyio.fail_after(DEADLINE):
        assert await first.future
    assert not last.future.done()
    long.may_end.set()
    assert await last.future


async def test_a_system_without_a_thread_fails_what_waits_and_nothing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers are idle then, and calls work once there are threads."""
    thread = SharedThread(LONG)
    worker = NvmlWorker("first", shared=thread)

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="new thread"):
                await worker.call(threading.get_ident, DEADLINE, short=True)
            assert worker.is_idle
    assert await worker.call(threading.get_ident, DEADLINE, short=True)


async def test_a_call_that_is_cancelled_before_it_begins_leaves_its_worker_idle() -> None:
    """One that has begun keeps its worker, until NVML comes back."""
    thread, long = SharedThread(LONG), Held()
    first, second = (NvmlWorker(name, shared=thread) for name in ("first", "second"))

    async def call(worker: NvmlWorker, work: Callable[[], int]) -> None:
        await worker.call(work, DEADLINE, short=True)

    async with anyio.create_task_group() as group:
        group.start_soon(call, first, long)
        await becomes(long.begun.is_set)
        group.start_soon(call, second, threading.get_ident)
        await anyio.wait_all_tasks_blocked()
        assert not second.is_idle
        group.cancel_scope.cancel()
    assert (first.is_idle, second.is_idle) == (False, True)
    long.may_end.set()
    await becomes(lambda: first.is_idle)
