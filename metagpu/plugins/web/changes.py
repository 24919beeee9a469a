"""Changes of the view, for the browsers that follow it."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

import anyio
import msgspec

from metagpu.core.model.reasons import iso_time

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
