"""A view that is looked at again and again, where nothing reports its changes."""

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import anyio
import msgspec

Object = Mapping[str, Any]
Look = Callable[[], Awaitable[tuple[Object, bytes]]]
"""Makes a view, and a digest of all in it that is no time of a look."""


class PolledView:
    """A view for all requests: a request reads it, and so does a follower in turn.

    Args:
        look: makes the view.
        interval: seconds for which a view serves all requests, and between two looks.
    """

    def __init__(self, look: Look, interval: float = 2.0) -> None:
        self._look = look
        self._interval = interval
        self._view: Object | None = None
        self._digest = b""
        self._at = 0.0
        self._reading = anyio.Lock()

    async def read(self) -> Object:
        """Return the view: where it is older than the interval, a new one."""
        async with self._reading:
            if self._view is None or anyio.current_time() - self._at >= self._interval:
                self._view, self._digest = await self._look()
                self._at = anyio.current_time()
            return self._view

    async def changes(self) -> AsyncGenerator[object, None]:
        """Look again and again, and yield after each look that found a difference.

        A look that takes long is followed by as long a pause.
        """
        seen = self._digest
        while True:
            began = anyio.current_time()
            await self.read()
            took = anyio.current_time() - began
            if self._digest != seen:
                seen = self._digest
                yield seen
            await anyio.sleep(max(self._interval, took))


def digest_of(parts: object) -> bytes:
    """Return a digest of plain data."""
    return hashlib.blake2b(msgspec.json.encode(parts)).digest()
