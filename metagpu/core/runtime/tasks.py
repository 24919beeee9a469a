"""Tasks of a program: the main group, restarts, and works done together."""

import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import structlog
from anyio.abc import TaskGroup

from metagpu.core.errors import InternalError, MetagpuError, describe_error
from metagpu.core.runtime.rate_limit import Backoff

log = structlog.get_logger()


async def serve(
    *tasks: Callable[[], Coroutine[Any, Any, None]],
    reload: Callable[[], Awaitable[None]],
    withdraw: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint,
    over: anyio.Event | None = None,
) -> None:
    """Run all tasks until SIGTERM or SIGINT, or until it is over; SIGHUP reloads.

    Signals that come during a reload are heard: a reload that waits delays no end, and is followed
    by one more for all SIGHUPs that came meanwhile.

    At a signal `withdraw` runs first, beside the tasks; a second signal ends it.

    At the end all tasks are cancelled together; each leaves its blocks in order, so the kubelet
    sees its streams end before the process ends. A task that fails ends the others, and its error
    is raised.

    Raises:
        InternalError: all tasks were cancelled, neither by a signal nor because it is over.
    """
    wanted, stopping, over = anyio.Event(), anyio.Event(), over or anyio.Event()

    async def reload_when_wanted() -> None:
        nonlocal wanted
        while True:
            await wanted.wait()
            wanted = anyio.Event()
            await reload()

    async def withdraw_when_stopped() -> None:
        await stopping.wait()
        await withdraw()
        over.set()

    async def listen(signals: AsyncIterator[signal.Signals]) -> None:
        async for received in signals:
            if received is signal.SIGHUP:
                wanted.set()
                continue
            log.info("stopping", signal=received.name, at_once=stopping.is_set())
            if stopping.is_set():
                over.set()
            stopping.set()

    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async with anyio.create_task_group() as listening:
            listening.start_soon(listen, signals)
            async with anyio.create_task_group() as group:
                for task in (reload_when_wanted, withdraw_when_stopped, *tasks):
                    group.start_soon(task)
                await over.wait()
                group.cancel_scope.cancel()
            listening.cancel_scope.cancel()
    if not over.is_set():
        raise InternalError("all tasks of metagpu ended without a signal: a fault of metagpu's own")


Work = Callable[[], Coroutine[Any, Any, None]]


class RestartTiming(msgspec.Struct, frozen=True):
    """The times of restarts of one task, in seconds.

    Attributes:
        first_delay: from the end of the task to its next start; it doubles with each end in a row.
        longest_delay: the longest such delay.
        steady: the time that the task runs again until its earlier ends are forgotten.
    """

    first_delay: float = 1.0
    longest_delay: float = 30.0
    steady: float = 10.0


class MainTasks:
    """The main tasks, and those that ended though the daemon runs.

    A return is a fault like an error: a task group that loses its cancellation ends without one.
    """

    def __init__(self, timing: RestartTiming = RestartTiming()) -> None:  # noqa: B008 - frozen
        self._timing = timing
        self._ends: dict[str, str] = {}
        self._restarted: dict[str, float] = {}

    @property
    def problems(self) -> Mapping[str, str]:
        """Reasons of ended tasks, each until its task has run for `steady` seconds."""
        now = anyio.current_time()
        return {
            name: reason
            for name, reason in self._ends.items()
            if now - self._restarted.get(name, now) < self._timing.steady
        }

    def keep(self, name: str, work: Work) -> Work:
        """Return a task that runs `work`, and starts it again whenever it ends.

        Raises:
            MetagpuError: `work` raised it: an error of ours is a decision to end the daemon.
        """

        async def run() -> None:
            backoff = Backoff(self._timing.first_delay, self._timing.longest_delay)
            while True:
                began = anyio.current_time()
                self._ends[name] = await _run_once(name, work)
                self._restarted.pop(name, None)
                if anyio.current_time() - began >= self._timing.steady:
                    backoff.reset()
                delay = backoff.next()
                log.error(
                    "main task ended",
                    task=name,
                    reason=self._ends[name],
                    restart_after=f"{delay:g}s",
                )
                await anyio.sleep(delay)
                self._restarted[name] = anyio.current_time()

        return run


async def _run_once(name: str, work: Work) -> str:
    """Run a main task; return why it ended."""
    try:
        await work()
    except Exception as error:
        ours = isinstance(error, ExceptionGroup) and error.subgroup(MetagpuError)
        if isinstance(error, MetagpuError) or ours:
            raise
        log.exception("main task failed", task=name)
        return f"{type(error).__name__}: {describe_error(error)}"
    return "it returned"


async def run_with_restart(
    work: Callable[[], Coroutine[Any, Any, None]], name: str, *, delay: float = 30.0
) -> None:
    """Run an optional task; log a fault in it, and start it again after a delay.

    Args:
        work: the task; its normal end is final.
        name: its name in the log.
        delay: seconds from a fault to the next start.
    """
    while True:
        try:
            await work()
        except Exception:
            log.exception("task failed", task=name, restart_after=f"{delay:g}s")
        else:
            return
        await anyio.sleep(delay)


async def start_together(
    group: TaskGroup, works: Iterable[Callable[[], Awaitable[None]]], max_wait: float
) -> None:
    """Start all works, and wait for each, in their order, at most `max_wait` seconds.

    For works that are done in turn, as the calls of GPUs in one thread: as long as each takes its
    moment, all are waited for. One that hangs delays the caller for that moment only, and goes on
    in the group.
    """
    ends = []
    for work in works:
        ends.append(anyio.Event())
        group.start_soon(_run, work, ends[-1])
    for end in ends:
        if not end.is_set():
            with anyio.move_on_after(max_wait):
                await end.wait()


async def _run(work: Callable[[], Awaitable[None]], ended: anyio.Event) -> None:
    await work()
    ended.set()
