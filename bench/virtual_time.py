"""An event loop whose clock goes on only while nothing is to be done.

Sockets and threads are real: what the kernel has, and what a thread works on, comes first. Hours of
a program that mostly waits take the time of its work.
"""

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import anyio
from anyio import to_thread

_Result = TypeVar("_Result")

_LOOPBACK_S: Final = 0.00002
"""Real seconds in which the kernel has carried what one socket of this process sent another."""


class _Selector(selectors.EpollSelector):
    """Waits for sockets, and in place of waiting for a deadline moves the clock to it.

    Attributes:
        now: the time of the loop, in seconds.
    """

    now = 1000.0
    _limiter: anyio.CapacityLimiter | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; without anything, let the time pass until the next deadline."""
        found = super().select(0)
        if found or timeout == 0:
            return found
        time.sleep(_LOOPBACK_S)  # `epoll` rounds up to a millisecond
        found = super().select(0)
        while not found and self._threads():
            found = super().select(0.01)
        if not found and timeout is None:
            return super().select(None)
        if not found and timeout:
            self.now += timeout
        return found

    def watch_threads(self) -> None:
        """Wait for the threads of the running loop from now on."""
        self._limiter = to_thread.current_default_thread_limiter()

    def _threads(self) -> int:
        return self._limiter.borrowed_tokens if self._limiter else 0


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        """Return the time that has passed for the programs of this loop."""
        return self.clock.now


def run(work: Callable[..., Awaitable[_Result]], *arguments: Any) -> _Result:  # noqa: ANN401
    """Run a coroutine function with a clock of its own."""

    async def begin() -> _Result:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, _Loop)
        loop.clock.watch_threads()
        return await work(*arguments)

    return anyio.run(begin, backend_options={"loop_factory": _Loop})
