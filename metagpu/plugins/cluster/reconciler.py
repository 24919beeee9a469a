"""Reconcilers: each keeps one thing at the API server in its wanted state."""

import math
from collections.abc import Awaitable, Callable

import anyio
import structlog

from metagpu.core.errors import ClusterError
from metagpu.core.runtime.rate_limit import Backoff, LogOnce
from metagpu.plugins.cluster.settings import ClusterTiming

log = structlog.get_logger()


class Reconciler:
    """One reconcile loop: runs `work` after each trigger and each failure.

    `work` compares and fixes, and may run at any time. It may return the seconds after which it
    runs again without a trigger.

    Attributes:
        problem: the error of the last run, empty after a success.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Awaitable[float | None]],
        timing: ClusterTiming,
        interval: float | None = None,
    ) -> None:
        self.name = name
        self.problem = ""
        self._work = work
        self._interval = timing.reconcile_interval if interval is None else interval
        self._backoff = backoff_of(timing)
        self._logged = LogOnce()
        self._triggered = anyio.Event()

    def trigger(self) -> None:
        """Request a run soon."""
        self._triggered.set()

    async def run(self) -> None:
        """Run `work` after each trigger, until cancelled; log a failure once."""
        due = math.inf

        while True:
            with anyio.CancelScope(deadline=due):
                await self._triggered.wait()
            self._triggered = anyio.Event()
            due = math.inf
            try:
                if (again := await self._work()) is not None:
                    due = anyio.current_time() + again
            except ClusterError as error:
                self.problem = str(error)
                if self._logged.is_new(self.name, self.problem):
                    log.warning("reconciliation failed", feature=self.name, error=self.problem)
                await anyio.sleep(self._backoff.next(error.retry_after))
                self.trigger()
            else:
                self._backoff.reset()
                self.problem = ""
                if self._logged.clear(self.name):
                    log.info("reconciliation recovered", feature=self.name)
                await anyio.sleep(self._interval)


def backoff_of(timing: ClusterTiming) -> Backoff:
    """Return the back-off of requests, with jitter: many nodes must not retry at once."""
    return Backoff(first=timing.backoff_first, longest=timing.backoff_longest, jitter=True)
