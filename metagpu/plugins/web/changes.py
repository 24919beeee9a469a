"""Changes of a view, for browsers that follow it; views that have to be polled."""

import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

import anyio
import msgspec

from metagpu.core.model.quantities import iso_time

PERIOD: Final = 0.5
"""Seconds from one reported change to the next: those between become one."""
SILENCE: Final = 15.0
"""Seconds without a change after which a browser is sent a comment."""

ChangeSource = Callable[[], AsyncGenerator[object, None]]
"""Yields whenever the view may have changed. It may conflate changes while it is not asked."""


class ChangeFeed:
    """One source of changes for all streams; without a stream nothing is followed.

    Args:
        source: the changes.
        on_change: called at each reported change, before a stream has it.
    """

    def __init__(
        self,
        source: ChangeSource,
        on_change: Callable[[], None],
        *,
        period: float = PERIOD,
        silence: float = SILENCE,
    ) -> None:
        self._source = source
        self._on_change = on_change
        self._period = period
        self._silence = silence
        self._streams = 0
        self._count = 0
        self._changed = anyio.Event()
        self._opened = anyio.Event()
        self._following: anyio.CancelScope | None = None

    async def run(self) -> None:
        """Follow the source while there are streams, until cancelled."""
        while True:
            await self._opened.wait()
            with anyio.CancelScope() as self._following:
                if self._streams:
                    await self._follow()

    async def _follow(self) -> None:
        async with aclosing(self._source()) as changes:
            async for _ in changes:
                self._on_change()
                self._count += 1
                self._changed.set()
                self._changed = anyio.Event()
                await anyio.sleep(self._period)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events: one at once, one for each change, and comments."""
        self._streams += 1
        self._opened.set()
        try:
            seen = self._count
            yield _event()
            while True:
                if seen == self._count:
                    with anyio.move_on_after(self._silence):
                        await self._changed.wait()
                changed, seen = self._count != seen, self._count
                yield _event() if changed else b": nothing new\n\n"
        finally:
            self._streams -= 1
            if not self._streams:
                self._opened = anyio.Event()
                if self._following is not None:
                    self._following.cancel()


def _event() -> bytes:
    return b"event: change\ndata: " + msgspec.json.encode({"at": iso_time(time.time())}) + b"\n\n"


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
