"""Things kept as they should be at the API server: looked at whenever anything may have changed."""

import math
import random
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import structlog

from metagpu.core.errors import ClusterError

PAUSE: Final = (0.2, 60.0)
"""First and longest pause, in seconds, after a failure."""
LEAST: Final = 0.1
"""Seconds between two looks: what changes meanwhile is seen by one."""

log = structlog.get_logger()


class Pauses:
    """How long to wait after each failure: longer each time, and not all nodes at once."""

    def __init__(self) -> None:
        self._next = PAUSE[0]

    def next(self, at_least: float = 0.0) -> float:
        """Give the pause after one more failure, in seconds."""
        pause, self._next = self._next, min(self._next * 2, PAUSE[1])
        spread = random.uniform(0.5, 1.0)  # noqa: S311 - it spreads load, it guards nothing
        return max(pause * spread, at_least)

    def reset(self) -> None:
        """Begin anew: it went well."""
        self._next = PAUSE[0]


class Chore:
    """One thing that is kept so. `work` compares and mends; it may be called at any time.

    It may give the seconds after which to look again though nothing stirs.

    Attributes:
        problem: why the last try failed, empty when it did not.
    """

    def __init__(
        self, name: str, work: Callable[[], Awaitable[float | None]], least: float = LEAST
    ) -> None:
        self.name = name
        self.problem = ""
        self._work = work
        self._least = least
        self._stirred = anyio.Event()

    def stir(self) -> None:
        """Have it looked at soon."""
        self._stirred.set()

    async def run(self) -> None:
        """Work whenever stirred, until cancelled; a failure is told once and tried again."""
        pauses = Pauses()
        again: float | None = None

        while True:
            with anyio.move_on_after(math.inf if again is None else again):
                await self._stirred.wait()
            self._stirred = anyio.Event()
            again = None
            try:
                again = await self._work()
            except ClusterError as error:
                self._trouble(str(error))
                await anyio.sleep(pauses.next(error.retry_after))
                self.stir()
            else:
                pauses.reset()
                self._well()
                await anyio.sleep(self._least)

    def _trouble(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            log.warning("not done at the API server; trying again", use=self.name, error=problem)

    def _well(self) -> None:
        if self.problem:
            log.info("done at the API server at last", use=self.name)
        self.problem = ""
