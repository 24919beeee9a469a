"""The event bus: every event once, in order, and no publisher waits."""

from contextlib import suppress

import anyio
import pytest
from anyio.lowlevel import checkpoint

from metagpu.core.state.registry import EventBus, Subscription


async def take(subscription: Subscription[int], count: int) -> list[int]:
    """Read some events."""
    events = subscription.__aiter__()
    return [await anext(events) for _ in range(count)]


async def test_every_subscriber_receives_every_event_in_order() -> None:
    """Each subscription has its own copy of the events."""
    bus: EventBus[int] = EventBus()

    with bus.subscribe() as first, bus.subscribe() as second:
        for number in range(5):
            bus.publish(number)
        assert await take(first, 5) == [0, 1, 2, 3, 4]
        assert await take(second, 5) == [0, 1, 2, 3, 4]


async def test_a_slow_subscriber_loses_its_oldest() -> None:
    """A full subscription drops its oldest events, counts them, and delays no one."""
    bus: EventBus[int] = EventBus()

    with bus.subscribe(depth=3) as slow, bus.subscribe(depth=10) as quick:
        for number in range(8):
            bus.publish(number)
        assert await take(slow, 3) == [5, 6, 7]
        assert await take(quick, 8) == list(range(8))
        assert (slow.lost, quick.lost) == (5, 0)


async def test_a_full_subscription_has_lost_nothing_yet() -> None:
    """Exactly as many events as the depth are all kept, and again after they were read."""
    bus: EventBus[int] = EventBus()

    with bus.subscribe(depth=2) as listener:
        for start in (0, 2):
            bus.publish(start)
            bus.publish(start + 1)
            assert await take(listener, 2) == [start, start + 1]
        assert listener.lost == 0


async def test_a_subscriber_receives_nothing_from_before() -> None:
    """A subscription begins with its block."""
    bus: EventBus[int] = EventBus()
    bus.publish(1)

    with bus.subscribe() as late:
        bus.publish(2)
        assert await take(late, 1) == [2]


@pytest.mark.parametrize("failing", [False, True])
def test_the_end_of_the_block_unsubscribes(*, failing: bool) -> None:
    """A subscription ends with its block, also by an error."""
    bus: EventBus[int] = EventBus()

    with bus.subscribe() as stays:
        with suppress(ZeroDivisionError), bus.subscribe(depth=1) as gone:
            assert 1 // (not failing) == 1
        bus.publish(1)
        bus.publish(2)

        assert bus._subscriptions == [stays]
        assert gone.lost == 0
    assert bus._subscriptions == []


async def test_a_waiting_subscriber_is_woken() -> None:
    """A subscriber that has read all sleeps until the next event."""
    bus: EventBus[int] = EventBus()
    received: list[int] = []

    async def subscribe(subscription: Subscription[int]) -> None:
        async for event in subscription:
            received.append(event)  # noqa: PERF401 - it never ends

    async with anyio.create_task_group() as group:
        with bus.subscribe() as subscription:
            group.start_soon(subscribe, subscription)
            for number in range(3):
                await checkpoint()
                bus.publish(number)
            for _ in range(5):
                await checkpoint()
            assert received == [0, 1, 2]
            group.cancel_scope.cancel()


async def test_a_subscription_to_kinds_receives_no_others() -> None:
    """A subscriber to some kinds of events is not woken by other events."""
    bus: EventBus[object] = EventBus()

    with bus.subscribe(int, depth=2) as numbers:
        for event in ("a", 1, "b", "c", "d", 2):
            bus.publish(event)

        assert numbers.lost == 0

        received = [await anext(listening) for listening in [aiter(numbers)] for _ in range(2)]

    assert received == [1, 2]


def test_lost_events_are_counted() -> None:
    """Lost events are counted over all subscribers, also those that are gone."""
    bus: EventBus[int] = EventBus()

    with bus.subscribe(depth=1), bus.subscribe(depth=2), bus.subscribe(str, depth=1):
        for number in range(4):
            bus.publish(number)
    with bus.subscribe(depth=1):
        bus.publish(4)
        bus.publish(5)

    assert bus.lost == 3 + 2 + 1
