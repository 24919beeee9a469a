"""Counters of events."""

import anyio
import pytest
from anyio.lowlevel import checkpoint

from metagpu.core.model.shares import Fault, Holder
from metagpu.core.state.events import (
    Event,
    MemoryErrorReported,
    MemoryExceeded,
    ProcessSignalled,
    UnauthorizedUseFound,
    XidReported,
)
from metagpu.core.state.facts import GpuCordoned, GpuFaulted, GpuRecovered, InstanceFaulted
from metagpu.core.state.registry import EventBus
from metagpu.plugins.metrics.daemon import EventCounters
from tests.rigs.build import gpu

A, B = gpu(0).id, gpu(1).id
ALICE = Holder("team", "alice", "main")


@pytest.mark.parametrize(
    ("event", "counted"),
    [
        (GpuFaulted(A, "XID 79", 1, Fault.XID), ("faults", (A, Fault.XID))),
        (GpuRecovered(A, "well", 1), ("recoveries", A)),
        (XidReported(A, 31, 1), ("xids", (A, 31))),
        (XidReported(None, 79, 1), ("xids", (None, 79))),
        (MemoryErrorReported(B, corrected=True, at=1), ("memory_errors", (B, True))),
        (
            MemoryExceeded(A, ALICE, None, used=3, share=1, limit=2, will_end=False, at=1),
            ("warnings", A),
        ),
        (
            ProcessSignalled(B, ALICE, None, 7, "SIGKILL", 1, used=3, share=1, limit=2, at=1),
            ("signals", (B, "SIGKILL")),
        ),
        (InstanceFaulted(A, "MIG-x", "XID 94", at=1), ("mig_device_faults", A)),
        (
            UnauthorizedUseFound(A, None, "abc", "uid", 7, None, at=1),
            ("unauthorized_containers", A),
        ),
    ],
)
def test_each_kind_of_event_has_its_count(event: Event, counted: tuple[str, object]) -> None:
    """Each kind of event raises its own counter by one, and no other."""
    counts = EventCounters()
    counts.count(event)
    counts.count(event)

    name, key = counted
    last = {"last_xids": {event.gpu: event}} if isinstance(event, XidReported) else {}
    assert {
        text: dict(getattr(counts, text))
        for text in EventCounters.__slots__
        if getattr(counts, text)
    } == {name: {key: 2}} | last


async def test_events_of_the_bus_are_counted() -> None:
    """Events count from the subscription on; other kinds are not subscribed to."""
    bus, counts = EventBus[Event](), EventCounters()

    async with anyio.create_task_group() as group:
        group.start_soon(counts.run, bus)
        await anyio.wait_all_tasks_blocked()
        [subscription] = bus._subscriptions
        for _ in range(2000):
            bus.publish(GpuCordoned(A, "why", 1))
        bus.publish(XidReported(A, 31, 1))
        while not counts.xids:
            await checkpoint()
        group.cancel_scope.cancel()

    assert counts.xids == {(A, 31): 1}
    assert subscription.lost == bus.lost == 0
