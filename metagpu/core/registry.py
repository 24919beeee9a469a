"""The one mutable cell: facts enter at `apply`, everyone else reads snapshots and hears news."""

from collections.abc import AsyncGenerator, Callable
from typing import Any, Generic, TypeVar

import anyio

from metagpu.core.bus import Bus
from metagpu.core.facts import Fact
from metagpu.core.news import Event
from metagpu.core.reduce import reduce
from metagpu.core.snapshot import Snapshot

ViewT = TypeVar("ViewT")


class _Watcher(Generic[ViewT]):
    """One reader of `Registry.watch`: what it was shown, and whether it is waiting for more."""

    def __init__(self, view: Callable[[Snapshot], ViewT]) -> None:
        self.view = view
        self.shown: ViewT | None = None
        self.changed: anyio.Event | None = None

    def look(self, snapshot: Snapshot) -> None:
        """Wake the reader if it waits and its view has changed."""
        if self.changed is not None and self.view(snapshot) != self.shown:
            self.changed.set()


class Registry:
    """Holds the current snapshot. Use it from one event loop only.

    Attributes:
        snapshot: everything known now; replaced, never edited.
        news: the bus on which every fact that changed something is heard, and other news.
    """

    def __init__(self) -> None:
        self.snapshot = Snapshot()
        self.news = Bus[Event]()
        self._watchers: list[_Watcher[Any]] = []

    def apply(self, fact: Fact) -> bool:
        """Take a fact in; tell whether it changed anything. A fact of nothing new wakes nobody."""
        following, news = reduce(self.snapshot, fact)
        if following is self.snapshot:
            return False

        self.snapshot = following
        for watcher in self._watchers:
            watcher.look(following)
        for event in news:
            self.news.publish(event)
        return True

    async def watch(self, view: Callable[[Snapshot], ViewT]) -> AsyncGenerator[ViewT, None]:
        """Yield a view of the snapshot, first as it is now, then each time the view differs.

        Conflating: a reader that is slow misses what was in between, never the latest.
        """
        watcher = _Watcher(view)
        self._watchers.append(watcher)

        try:
            watcher.shown = view(self.snapshot)
            yield watcher.shown

            while True:
                # Waiting begins before looking: what comes in between is heard.
                watcher.changed = changed = anyio.Event()
                seen = view(self.snapshot)
                if seen == watcher.shown:
                    await changed.wait()
                else:
                    watcher.shown, watcher.changed = seen, None
                    yield seen
        finally:
            self._watchers.remove(watcher)
