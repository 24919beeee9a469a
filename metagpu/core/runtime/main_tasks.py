"""The main tasks of the daemon: none of them ends before the daemon does."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import anyio
import msgspec
import structlog

from metagpu.core.errors import MetagpuError, describe_error
from metagpu.core.runtime.backoff import Backoff

log = structlog.get_logger()

Work = Callable[[], Coroutine[Any, Any, None]]


class MainTaskTiming(msgspec.Struct, frozen=True):
    """Seconds.

    Attributes:
        first_delay: from the end of a main task to its next start; it doubles with each more.
        longest_delay: the longest such delay.
        steady: the time that a task runs again until its end is forgotten.
    """

    first_delay: float = 1.0
    longest_delay: float = 30.0
    steady: float = 10.0


class MainTasks:
    """The main tasks, and those that ended though the daemon runs.

    A return is a fault like an error: a task group that loses its cancellation ends without one.
    """

    def __init__(self, timing: MainTaskTiming = MainTaskTiming()) -> None:  # noqa: B008 - frozen
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
