"""A typed event bus: each event once and in order; a publisher never waits."""

from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import anyio

EventT = TypeVar("EventT")


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
