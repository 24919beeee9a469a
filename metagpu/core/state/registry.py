"""The one mutable cell: facts enter at `apply`, readers take snapshots or events.

The event bus has each event once and in order; a publisher never waits.
"""

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import anyio
from msgspec.structs import replace

from metagpu.core.model.pods import PodIndex
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.events import Event
from metagpu.core.state.facts import Fact
from metagpu.core.state.reduce import reduce

EventT = TypeVar("EventT")
ViewT = TypeVar("ViewT")


class Subscription(Generic[EventT]):
    """The unread events of one subscriber. Iterate over it.

    Attributes:
        lost: events that were dropped, oldest first, because the subscriber was too slow.
    """

    def __init__(self, kinds: tuple[type, ...], depth: int) -> None:
        self._kinds = kinds
        self._waiting: deque[EventT] = deque(maxlen=depth)
        self._arrived = anyio.Event()
        self.lost = 0

    def _offer(self, event: EventT) -> bool:
        """Add an event of a subscribed kind; return whether the oldest event was dropped."""
        if self._kinds and not isinstance(event, self._kinds):
            return False
        full = len(self._waiting) == self._waiting.maxlen
        self.lost += full
        self._waiting.append(event)
        self._arrived.set()
        return full

    async def __aiter__(self) -> AsyncIterator[EventT]:
        while True:
            while self._waiting:
                yield self._waiting.popleft()

            self._arrived = anyio.Event()
            await self._arrived.wait()


class EventBus(Generic[EventT]):
    """A typed fan-out inside one event loop.

    Attributes:
        lost: events that all subscribers have lost so far, former ones included.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._subscriptions: list[Subscription[EventT]] = []

    def publish(self, event: EventT) -> None:
        """Add an event to every subscription; a full one drops its oldest event."""
        for subscription in self._subscriptions:
            self.lost += subscription._offer(event)  # noqa: SLF001 - the two classes are one mechanism

    @contextmanager
    def subscribe(self, *kinds: type, depth: int = 1024) -> Iterator[Subscription[EventT]]:
        """Subscribe to these kinds of events, or to all, until the block ends.

        A subscription holds at most `depth` unread events.
        """
        subscription: Subscription[EventT] = Subscription(kinds, depth)
        self._subscriptions.append(subscription)

        try:
            yield subscription
        finally:
            self._subscriptions.remove(subscription)


class _Watcher(Generic[ViewT]):
    """One reader of `Registry.watch`: its last view, and the event it waits for."""

    def __init__(self, view: Callable[[Snapshot], ViewT]) -> None:
        self.view = view
        self.shown: ViewT | None = None
        self.changed: anyio.Event | None = None

    def notify(self, snapshot: Snapshot) -> None:
        """Wake the reader if it waits and its view has changed."""
        if self.changed is not None and self.view(snapshot) != self.shown:
            self.changed.set()


class Registry:
    """The current snapshot and its watchers. Use it from one event loop only.

    Attributes:
        snapshot: everything known now; replaced, never edited.
        events: the bus with every fact that changed the snapshot, and other events.
    """

    def __init__(self) -> None:
        self.snapshot = Snapshot()
        self.events = EventBus[Event]()
        self._watchers: list[_Watcher[Any]] = []
        self._replaced = anyio.Event()

    def await_pods(self) -> None:
        """Note at the start that an API server will report the pods."""
        self.snapshot = replace(self.snapshot, pods=PodIndex(awaited=True))

    def apply(self, fact: Fact) -> bool:
        """Apply a fact; return whether it changed the snapshot. No change wakes no reader."""
        following, events = reduce(self.snapshot, fact)
        if following is self.snapshot:
            return False

        self.snapshot = following
        self._replaced.set()
        for watcher in self._watchers:
            watcher.notify(following)
        for event in events:
            self.events.publish(event)
        return True

    async def changed_since(self, seen: Snapshot) -> Snapshot:
        """Wait for another snapshot than `seen`, and return it. Safe to cancel."""
        while self.snapshot is seen:
            self._replaced = anyio.Event() if self._replaced.is_set() else self._replaced
            await self._replaced.wait()
        return self.snapshot

    async def watch(self, view: Callable[[Snapshot], ViewT]) -> AsyncGenerator[ViewT, None]:
        """Yield a view of the snapshot: the present one, then each that differs.

        Conflating: a slow reader misses views in between, never the latest.
        """
        watcher = _Watcher(view)
        self._watchers.append(watcher)

        try:
            watcher.shown = view(self.snapshot)
            yield watcher.shown

            while True:
                # The event exists before the view is read: a change in between sets it.
                watcher.changed = changed = anyio.Event()
                seen = view(self.snapshot)
                if seen == watcher.shown:
                    await changed.wait()
                else:
                    watcher.shown, watcher.changed = seen, None
                    yield seen
        finally:
            self._watchers.remove(watcher)
