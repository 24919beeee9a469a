"""Something that takes work to make, made once for all who ask at about the same time."""

import math
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio
import structlog

ValueT = TypeVar("ValueT")

log = structlog.get_logger()


class Shared(Generic[ValueT]):
    """Makes a value when asked for one, in a task of its own, one at a time.

    Who asks may go away meanwhile: the value is finished for the others. Who asks often gets the
    same value, so that the work does not grow with the number of those who ask.

    Args:
        name: what is made, for messages.
        make: makes a value; if it fails, that is told, and there is none until the next try.
        age: seconds for which a value is good enough for whoever asks.
    """

    def __init__(self, name: str, make: Callable[[], Awaitable[ValueT]], age: float) -> None:
        self._name = name
        self._make = make
        self._age = age
        self._value: ValueT | None = None
        self._at = -math.inf
        self._busy = False
        self._asked = anyio.Event()
        self._made = anyio.Event()

    async def run(self) -> None:
        """Make values until cancelled."""
        while True:
            await self._asked.wait()
            self._asked, self._busy = anyio.Event(), True
            try:
                self._value = await self._make()
            except Exception:
                log.exception("what monitoring asks for could not be made", what=self._name)
                self._value = None
            finally:
                self._busy = False
            self._at = anyio.current_time()
            self._made.set()
            self._made = anyio.Event()

    async def get(self, patience: float = math.inf) -> ValueT | None:
        """Give a value of late, or after so many seconds an older one, `None` if there is none."""
        if anyio.current_time() - self._at >= self._age:
            if not self._busy:
                self._asked.set()
            with anyio.move_on_after(patience):
                await self._made.wait()
        return self._value
