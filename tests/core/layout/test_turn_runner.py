"""The turns of idle GPUs in the registry: what is listed Healthy, and what stays granted."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from metagpu.core.availability.reasons import availability_of
from metagpu.core.layout.offer_turns import TurnTiming
from metagpu.core.layout.turn_runner import TurnRunner
from metagpu.core.model.shares import OfferTurn, Share
from metagpu.core.model.snapshot import GpuState
from metagpu.core.state.facts import (
    GpuCordoned,
    GpusFound,
    SharesClaimed,
    SharesReleased,
    TurnsChanged,
)
from metagpu.core.state.registry import Registry
from tests.rigs.build import config, gpu, layout_of, withdrawn
from tests.rigs.waiting import becomes, skip

MIXED = """
version: metagpu/v1
pools:
  - name: all{more}
    backends:
      - {{backend: fraction, sharesPerGpu: 4}}
      - {{backend: timeslice, resource: nvidia.com/gpu.shared, replicas: 2}}
"""
TIMING = TurnTiming()


class Pool:
    """A registry with GPUs of one pool, and the runner of its turns."""

    def __init__(self, count: int, more: str = "") -> None:
        gpus, text = [gpu(index) for index in range(count)], MIXED.format(more=more)
        self.registry = Registry()
        self.registry.apply(GpusFound(tuple(gpus), at=0))
        layout, read = layout_of(*gpus, text=text), config(text)
        self.registry.apply(layout.offer_fact)
        self.runner = TurnRunner(self.registry, lambda: layout.gpus_in_turns(read))

    @property
    def states(self) -> list[GpuState]:
        """The GPUs, by index."""
        return list(self.registry.snapshot.gpus.values())

    def offered(self, index: int = 0) -> set[str]:
        """Return the backends with a free share of a GPU that is listed Healthy."""
        return {it.backend for it in self.healthy(index)}

    def healthy(self, index: int = 0) -> list[Share]:
        """Return the shares of a GPU that are listed Healthy."""
        state = self.states[index]
        return [it for it in state.shares if it.id not in availability_of(state).unlisted]


@asynccontextmanager
async def taking_turns(pool: Pool) -> AsyncIterator[Pool]:
    """Run the turns until the block ends."""
    async with anyio.create_task_group() as group:
        group.start_soon(pool.runner.run)
        await anyio.wait_all_tasks_blocked()
        yield pool
        group.cancel_scope.cancel()


async def test_two_idle_gpus_are_offered_by_a_backend_each() -> None:
    """No idle GPU counts for two resources, and both resources have some."""
    async with taking_turns(Pool(2)) as pool:
        assert sorted([pool.offered(0), pool.offered(1)], key=min) == [{"fraction"}, {"timeslice"}]


async def test_one_idle_gpu_is_offered_by_one_backend_after_the_other() -> None:
    """The list follows the clock; what a turn withdraws stays listed for the grace."""
    async with taking_turns(Pool(1)) as pool:
        (first,) = pool.offered()
        assert not withdrawn(pool.states[0])

        skip(TIMING.turn)
        await becomes(lambda: withdrawn(pool.states[0]))
        assert pool.offered() == {first}
        assert withdrawn(pool.states[0]) == {it.id for it in pool.healthy()}

        skip(TIMING.grace)
        await becomes(lambda: pool.offered() == {"fraction", "timeslice"} - {first})
        assert not withdrawn(pool.states[0])


async def test_a_claim_ends_the_turns_of_a_gpu() -> None:
    """A GPU in use is its owner's, held and free shares, until its last lease has ended."""
    async with taking_turns(Pool(1)) as pool:
        share = pool.healthy()[0]
        skip(TIMING.turn)
        await becomes(lambda: withdrawn(pool.states[0]))
        pool.registry.apply(SharesClaimed((share,), at=1))
        assert pool.offered() == {share.backend}
        assert not withdrawn(pool.states[0])

        skip(60)
        await anyio.wait_all_tasks_blocked()
        assert pool.offered() == {share.backend}
        pool.registry.apply(SharesReleased((share,), at=2))
        assert pool.offered() == {share.backend}, "the last owner comes first, at once"
        await anyio.wait_all_tasks_blocked()
        skip(TIMING.turn)
        await becomes(lambda: withdrawn(pool.states[0]))


async def test_a_cordoned_gpu_takes_no_part() -> None:
    """The other idle GPU goes round while no pod can have this one."""
    async with taking_turns(Pool(2)) as pool:
        pool.registry.apply(GpuCordoned(pool.states[0].gpu.id, "riser", at=1))
        seen = set[str]()
        for _ in range(12):
            skip(TIMING.longest_turn)
            await anyio.wait_all_tasks_blocked()
            seen |= pool.offered(1)
        assert seen == {"fraction", "timeslice"}
        assert pool.offered(0) == set()


async def test_a_pool_that_offers_all_takes_no_turns() -> None:
    """With `offer: all` every backend offers every idle GPU."""
    async with taking_turns(Pool(1, "\n    offer: all")) as pool:
        assert pool.offered() == {"fraction", "timeslice"}


async def test_without_the_runner_all_backends_offer_an_idle_gpu() -> None:
    """The end of the runner leaves nothing held back."""
    async with taking_turns(Pool(1)) as pool:
        assert len(pool.offered()) == 1
    assert pool.offered() == {"fraction", "timeslice"}


def test_a_gpu_whose_turn_ends_backs_no_amount() -> None:
    """The rest of what counts as free can still be had when the turn has ended."""
    gpus = [gpu(index) for index in range(3)]
    text = MIXED.format(more="").replace("fraction, sharesPerGpu", "mps, unitsPerGpu")
    registry = Registry()
    registry.apply(GpusFound(tuple(gpus), at=0))
    offer = layout_of(*gpus, text=text).offer_fact
    registry.apply(offer)
    units = [[it for it in offer.shares if it.gpu == of.id and it.backend == "mps"] for of in gpus]
    registry.apply(SharesClaimed((*units[0][:2], *units[1][:3]), at=1))

    def free(turn: OfferTurn) -> list[int]:
        registry.apply(TurnsChanged({gpus[2].id: turn}))
        unhealthy = [availability_of(state).unlisted for state in registry.snapshot.gpus.values()]
        held = [state.leases for state in registry.snapshot.gpus.values()]
        return [
            sum(it.id not in unhealthy[index] and it.id not in held[index] for it in units[index])
            for index in range(3)
        ]

    assert free(OfferTurn("mps", 0)) == [2, 1, 4]
    assert free(OfferTurn("mps", 0, withdrawn=True, next="timeslice")) == [2, 0, 4]
    assert free(OfferTurn("timeslice", 1)) == [2, 0, 0]
