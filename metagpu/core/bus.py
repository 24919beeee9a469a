"""News for whoever listens: every event once, in order, and never a publisher that waits."""

from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import anyio

EventT = TypeVar("EventT")


class Subscription(Generic[EventT]):
    """What one listener has not read yet. Iterate over it.

    Attributes:
        lost: events dropped, oldest first, because the listener was too slow.
    """

    def __init__(self, kinds: tuple[type, ...], depth: int) -> None:
        self._kinds = kinds
        self._waiting: deque[EventT] = deque(maxlen=depth)
        self._arrived = anyio.Event()
        self.lost = 0

    def _offer(self, event: EventT) -> bool:
        """Take an event in, if it is of a kind; tell whether another was lost by that."""
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


class Bus(Generic[EventT]):
    """A typed fan-out inside one event loop.

    Attributes:
        lost: events that any listener has lost so far, also those that listen no more.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._subscriptions: list[Subscription[EventT]] = []

    def publish(self, event: EventT) -> None:
        """Give an event to every subscription; a full one loses its oldest and counts it."""
        for subscription in self._subscriptions:
            self.lost += subscription._offer(event)  # noqa: SLF001 - the two classes are one mechanism

    @contextmanager
    def subscribe(self, *kinds: type, depth: int = 1024) -> Iterator[Subscription[EventT]]:
        """Listen while the block lasts, to these kinds of events or to all.

        `depth` events may wait to be read.
        """
        subscription: Subscription[EventT] = Subscription(kinds, depth)
        self._subscriptions.append(subscription)

        try:
            yield subscription
        finally:
            self._subscriptions.remove(subscription)
