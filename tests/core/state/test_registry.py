"""The registry: its watchers and its events."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from metagpu.core.model.shares import Holder
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import (
    Fact,
    GpuFaulted,
    GpuRecovered,
    GpusFound,
    LeasesObserved,
    SharesClaimed,
    SharesReleased,
)
from metagpu.core.state.registry import Registry
from tests.rigs.build import gpu, offer, share

A, B = gpu(0), gpu(1)
FOUND = GpusFound((A, B), at=0)
SHARES = (share(A, 0), share(A, 1))


def health(snapshot: Snapshot) -> tuple[bool, ...]:
    """View the GPUs' health and nothing else."""
    return tuple(state.verdict.healthy for state in snapshot.gpus.values())


def size(snapshot: Snapshot) -> int:
    """View how many GPUs there are."""
    return len(snapshot.gpus)


@dataclass
class Reader:
    """A reader of `watch` that a test lets go on, one read at a time."""

    seen: list[object] = field(default_factory=list)
    turns: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(0))

    async def read(self) -> None:
        """Read everything that is ready, once."""
        self.turns.release()
        await run_ready_tasks()


async def run_ready_tasks() -> None:
    """Run every task that is ready."""
    for _ in range(5):
        await checkpoint()


@asynccontextmanager
async def reading(registry: Registry, *, slow: bool = False) -> AsyncIterator[Reader]:
    """Read the GPUs' health while the block lasts; a slow reader waits for its turns."""
    reader = Reader()

    async def read() -> None:
        async for view in registry.watch(health):
            reader.seen.append(view)
            if slow:
                await reader.turns.acquire()

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await run_ready_tasks()
        yield reader
        group.cancel_scope.cancel()


# --- apply ----------------------------------------------------------------------------------------


def test_apply_returns_whether_anything_changed() -> None:
    """A fact with a change returns True and gives a new snapshot; another does neither."""
    registry = Registry()

    assert registry.apply(FOUND) is True
    known = registry.snapshot
    assert registry.apply(FOUND) is False
    assert registry.snapshot is known


def test_snapshots_are_replaced_never_edited() -> None:
    """A snapshot never changes."""
    registry = Registry()
    registry.apply(FOUND)
    before = registry.snapshot
    registry.apply(GpuFaulted(A.id, "XID 79", at=1))

    assert health(before) == (True, True)
    assert health(registry.snapshot) == (False, True)


async def test_events_come_in_the_order_of_facts() -> None:
    """Subscribers receive events of changes in order, and of nothing else."""
    registry = Registry()
    holder = Holder("team", "alice", "main")
    facts: list[Fact] = [
        FOUND,
        FOUND,
        offer(*SHARES),
        SharesClaimed(SHARES[:1], at=1),
        LeasesObserved({SHARES[0].id: holder}, at=2),
        LeasesObserved({SHARES[1].id: holder}, at=3),
    ]

    with registry.events.subscribe() as subscription:
        for fact in facts:
            registry.apply(fact)
        events = subscription.__aiter__()
        received = [await anext(events) for _ in range(5)]

    assert received == [
        FOUND,
        offer(*SHARES),
        SharesClaimed(SHARES[:1], at=1),
        SharesReleased(SHARES[:1], at=3),
        SharesClaimed(SHARES[1:], at=3),
    ]


async def test_a_subscriber_sees_the_snapshot_with_the_change() -> None:
    """The snapshot has a change before its event is published."""
    registry = Registry()

    with registry.events.subscribe() as subscription:
        registry.apply(FOUND)
        assert await anext(subscription.__aiter__()) == FOUND
        assert size(registry.snapshot) == 2


# --- watch ----------------------------------------------------------------------------------------


async def test_watch_yields_at_once_what_is_known() -> None:
    """The first view comes without any fact, even of an empty snapshot."""
    with anyio.fail_after(30):
        assert await anext(Registry().watch(health)) == ()


async def test_watch_yields_a_first_view_of_none() -> None:
    """A view may be `None`: it is yielded like any other."""

    def view(_: Snapshot) -> object:
        return None

    with anyio.fail_after(30):
        assert await anext(Registry().watch(view)) is None


async def test_watch_sleeps_while_its_view_is_the_same() -> None:
    """A reader is not shown a view twice, however often the rest of the snapshot changes."""
    registry = Registry()
    registry.apply(FOUND)

    async with reading(registry) as reader:
        registry.apply(offer(*SHARES))
        await run_ready_tasks()
        registry.apply(SharesClaimed(SHARES, at=1))
        await run_ready_tasks()
        assert reader.seen == [(True, True)]

        registry.apply(GpuFaulted(B.id, "XID 79", at=1))
        await run_ready_tasks()
        assert reader.seen == [(True, True), (True, False)]


async def test_watch_shows_a_slow_reader_the_latest_alone() -> None:
    """A slow reader misses views in between, never the latest."""
    registry = Registry()
    registry.apply(FOUND)

    async with reading(registry, slow=True) as reader:
        registry.apply(GpuFaulted(A.id, "XID 79", at=1))
        registry.apply(GpuFaulted(B.id, "XID 79", at=2))
        await reader.read()

        assert reader.seen == [(True, True), (False, False)]


async def test_watch_does_not_show_what_came_and_went() -> None:
    """A view that changed and changed back while the reader was busy is no change."""
    registry = Registry()
    registry.apply(FOUND)

    async with reading(registry, slow=True) as reader:
        registry.apply(GpuFaulted(A.id, "XID 79", at=1))
        registry.apply(GpuRecovered(A.id, "quiet", at=2))
        await reader.read()

        assert reader.seen == [(True, True)]


async def test_watch_notices_a_fact_during_its_view() -> None:
    """A fact applied while the view is being taken is not lost."""
    registry = Registry()
    registry.apply(FOUND)
    view_calls = 0

    def view(snapshot: Snapshot) -> bool:
        nonlocal view_calls
        view_calls += 1
        seen = health(snapshot)[0]
        if view_calls == 2:
            registry.apply(GpuFaulted(A.id, "XID 79", at=1))
        return seen

    views = registry.watch(view)
    with anyio.fail_after(30):
        assert await anext(views) is True
        assert await anext(views) is False


async def test_every_reader_is_woken() -> None:
    """Several readers follow the same registry, each with its own view."""
    registry = Registry()

    async with reading(registry) as first, reading(registry) as second:
        registry.apply(FOUND)
        await run_ready_tasks()
        assert first.seen == second.seen == [(), (True, True)]


STEPS = st.lists(
    st.sampled_from(["fault A", "fault B", "recover A", "recover B", "rest", "slow read"]),
    max_size=20,
)


@given(STEPS)
def test_no_interleaving_loses_the_latest(steps: list[str]) -> None:
    """Whenever the loop comes to rest, an eager reader has seen the present view as its last.

    A slow reader has after its next read.
    """

    async def story() -> None:
        registry = Registry()
        registry.apply(FOUND)
        gpus = {"A": A.id, "B": B.id}

        async with reading(registry) as eager, reading(registry, slow=True) as slow:
            for at, step in enumerate(steps):
                kind, _, which = step.partition(" ")
                if kind == "fault":
                    registry.apply(GpuFaulted(gpus[which], "XID 79", at=at))
                elif kind == "recover":
                    registry.apply(GpuRecovered(gpus[which], "quiet", at=at))
                elif kind == "rest":
                    await run_ready_tasks()
                    assert eager.seen[-1] == health(registry.snapshot)
                else:
                    await slow.read()

            for _ in steps:
                await slow.read()
            assert eager.seen[-1] == slow.seen[-1] == health(registry.snapshot)
            for seen in (eager.seen, slow.seen):
                assert all(now != then for then, now in pairwise(seen))

    anyio.run(story)


@pytest.mark.parametrize("count", [1, 3])
async def test_a_reader_that_leaves_wakes_nobody(count: int) -> None:
    """After its readers are gone a registry goes on taking facts."""
    registry = Registry()

    for _ in range(count):
        async with reading(registry):
            pass
    assert registry.apply(FOUND) is True
