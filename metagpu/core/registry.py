"""The one mutable cell: facts enter at `apply`, everyone else reads snapshots and hears news."""

from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import anyio

from metagpu.core.bus import Bus
from metagpu.core.facts import Fact, reduce
from metagpu.core.model import Snapshot

ViewT = TypeVar("ViewT")


class Registry:
    """Holds the current snapshot. Use it from one event loop only.

    Attributes:
        snapshot: everything known now; replaced, never edited.
        news: the bus on which every fact that changed something is heard.
    """

    def __init__(self) -> None:
        self.snapshot = Snapshot()
        self.news: Bus[Fact] = Bus()
        self._changed = anyio.Event()

    def apply(self, fact: Fact) -> bool:
        """Take a fact in; tell whether it changed anything. A fact of nothing new wakes nobody."""
        following, news = reduce(self.snapshot, fact)
        if following is self.snapshot:
            return False

        self.snapshot = following
        self._changed.set()
        self._changed = anyio.Event()

        for event in news:
            self.news.publish(event)
        return True

    async def watch(self, view: Callable[[Snapshot], ViewT]) -> AsyncIterator[ViewT]:
        """Yield a view of the snapshot, first as it is now, then each time the view differs.

        Conflating: a reader that is slow misses what was in between, never the latest.
        """
        shown: ViewT | None = None
        first = True

        while True:
            changed = self._changed
            seen = view(self.snapshot)

            if first or seen != shown:
                first, shown = False, seen
                yield seen
            else:
                await changed.wait()
