"""News that is counted."""

import anyio
import pytest
from anyio.lowlevel import checkpoint

from metagpu.core.bus import Bus
from metagpu.core.facts import GpuCordoned, GpuFaulted, GpuRecovered, InstanceFaulted
from metagpu.core.model import Fault, Holder
from metagpu.core.news import (
    Event,
    MemoryErrorHeard,
    MemoryExceeded,
    ProcessSignalled,
    StrangerFound,
    XidHeard,
)
from metagpu.plugins.metrics.counts import Counts
from tests.build import gpu

A, B = gpu(0).id, gpu(1).id
ALICE = Holder("team", "alice", "main")


@pytest.mark.parametrize(
    ("event", "counted"),
    [
        (GpuFaulted(A, "XID 79", 1, Fault.XID), ("faults", (A, Fault.XID))),
        (GpuRecovered(A, "well", 1), ("recoveries", A)),
        (XidHeard(A, 31, 1), ("xids", (A, 31))),
        (XidHeard(None, 79, 1), ("xids", (None, 79))),
        (MemoryErrorHeard(B, corrected=True, at=1), ("memory_errors", (B, True))),
        (
            MemoryExceeded(A, ALICE, None, used=3, share=1, limit=2, will_end=False, at=1),
            ("warnings", A),
        ),
        (
            ProcessSignalled(B, ALICE, None, 7, "SIGKILL", 1, used=3, share=1, limit=2, at=1),
            ("signals", (B, "SIGKILL")),
        ),
        (InstanceFaulted(A, "MIG-x", "XID 94", at=1), ("instance_faults", A)),
        (StrangerFound(A, None, "abc", "uid", 7, None, at=1), ("strangers", A)),
    ],
)
def test_each_kind_of_news_has_its_count(event: Event, counted: tuple[str, object]) -> None:
    """One more of its own, and of no other."""
    counts = Counts()
    counts.note(event)
    counts.note(event)

    name, key = counted
    assert {it: dict(getattr(counts, it)) for it in Counts.__slots__ if getattr(counts, it)} == {
        name: {key: 2}
    }


async def test_news_is_heard_on_the_bus() -> None:
    """From the moment it listens; what is not counted is not even waited for."""
    bus, counts = Bus[Event](), Counts()

    async with anyio.create_task_group() as group:
        group.start_soon(counts.listen, bus)
        await anyio.wait_all_tasks_blocked()
        [subscription] = bus._subscriptions
        for _ in range(2000):
            bus.publish(GpuCordoned(A, "why", 1))
        bus.publish(XidHeard(A, 31, 1))
        while not counts.xids:
            await checkpoint()
        group.cancel_scope.cancel()

    assert counts.xids == {(A, 31): 1}
    assert subscription.lost == bus.lost == 0
