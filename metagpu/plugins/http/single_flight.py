"""Single flight: one computation for all requests of about the same time."""

import math
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

import anyio
import structlog

ValueT = TypeVar("ValueT")
_NOTHING: Final = -1

log = structlog.get_logger()


class SingleFlight(Generic[ValueT]):
    """Computes a value on request, in a task of its own, one computation at a time.

    A caller may go away meanwhile: the computation goes on for the others. Frequent callers share
    a value, so that the work does not grow with their number.

    Args:
        name: the name of the value in log messages.
        compute: computes the value; a failure is logged, and clears the value.
        age: seconds during which callers share a value.
    """

    def __init__(self, name: str, compute: Callable[[], Awaitable[ValueT]], age: float) -> None:
        self._name = name
        self._compute = compute
        self._age = age
        self._value: ValueT | None = None
        self._at = -math.inf
        self._version = 0
        self._computing = self._done = _NOTHING
        self._requested = anyio.Event()
        self._computed = anyio.Event()

    async def run(self) -> None:
        """Compute values on request, until cancelled."""
        while True:
            await self._requested.wait()
            self._requested, version = anyio.Event(), self._version
            self._computing = version
            try:
                self._value = await self._compute()
            except Exception:
                log.exception("computation failed", value=self._name)
                self._value = None
            finally:
                self._computing = _NOTHING
            self._done, self._at = version, anyio.current_time()
            self._computed.set()
            self._computed = anyio.Event()

    def invalidate(self) -> None:
        """Make callers from now on wait for a value that is computed from now on."""
        self._version += 1

    async def get(self, max_wait: float = math.inf) -> ValueT | None:
        """Return a fresh value, or after `max_wait` seconds an older one, or `None`."""
        wanted = self._version
        if anyio.current_time() - self._at >= self._age or self._done < wanted:
            with anyio.move_on_after(max_wait):
                await self._next(wanted)
        return self._value

    async def _next(self, version: int) -> None:
        """Wait for the next value of a version, or of a later one."""
        while True:
            if self._computing < version:
                self._requested.set()
            await self._computed.wait()
            if self._done >= version:
                return
