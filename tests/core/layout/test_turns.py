"""Turns of a pool's backends: what the schedule decides, and how it is applied."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.core.availability.reasons import availability_of
from metagpu.core.layout.turns import TurnCandidate, TurnRunner, TurnSchedule, TurnTiming
from metagpu.core.model.gpu import GpuId
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

THREE = ("timeslice", "mps", "whole")
TIMING = TurnTiming()
ROUND_S = 4 * len(THREE) * (TIMING.longest_turn + TIMING.grace)
"""The longest time in which each backend has had all idle GPUs once."""


def idle(count: int, backends: Sequence[str] = THREE) -> list[TurnCandidate]:
    """Return idle GPUs of some backends."""
    return [TurnCandidate(GpuId(f"GPU-{n}"), tuple(backends)) for n in range(count)]


def used(gpus: Sequence[TurnCandidate], by: Mapping[int, str]) -> list[TurnCandidate]:
    """Return the GPUs, some of them with an owner."""
    return [
        TurnCandidate(candidate.gpu, candidate.backends, by.get(n))
        for n, candidate in enumerate(gpus)
    ]


def offering(turns: Mapping[GpuId, OfferTurn]) -> list[str]:
    """Return the backend of each GPU, marked while its turn ends."""
    return [turn.backend + ("-" if turn.withdrawn else "") for turn in turns.values()]


def changes(
    schedule: TurnSchedule, gpus: Sequence[TurnCandidate], begin: float, seconds: float
) -> list[tuple[float, list[str]]]:
    """Follow the schedule for a time, called when it asks to be; return what it offers."""
    now, found = begin, list[tuple[float, list[str]]]()
    while now < begin + seconds:
        there = offering(schedule.apply(gpus, now))
        if not found or found[-1][1] != there:
            found.append((now, there))
        wait = schedule.seconds_to_next(now)
        assert wait > 0, "the schedule asks to be called at once, for ever"
        now += wait
    return found


def test_as_many_idle_gpus_as_backends_give_each_backend_one() -> None:
    """On an idle node each backend has a GPU of its own, and a pod of any kind is placed."""
    assert sorted(offering(TurnSchedule().apply(idle(3), 0))) == sorted(THREE)
    assert sorted(offering(TurnSchedule().apply(idle(7), 0))).count("mps") in (2, 3)


def test_one_idle_gpu_goes_from_one_backend_to_the_next() -> None:
    """Each backend has the GPU for the time of a turn, and its end is the grace."""
    found = changes(TurnSchedule(), idle(1), 0, 9)

    assert [(at, *names) for at, names in found] == [
        (0, "mps"),
        (2, "mps-"),
        (2.5, "whole"),
        (4, "whole-"),
        (4.5, "timeslice"),
        (8, "timeslice-"),
        (8.5, "mps"),
    ]


def test_the_last_owner_offers_a_gpu_first() -> None:
    """The scheduler counts a GPU there that has just become idle: its number is not wrong."""
    schedule = TurnSchedule()
    schedule.apply(used(idle(1), {0: "whole"}), 0)
    found = changes(schedule, idle(1), 30, 5)

    assert found[:1] == [(30, ["whole"])]
    assert {"timeslice", "mps"} & {name for _, names in found[1:] for name in names}


def test_a_turn_is_as_long_after_a_claim_as_before() -> None:
    """A GPU that is claimed changes no other GPU's turn before its time."""
    schedule, gpus = TurnSchedule(), idle(3)
    before = offering(schedule.apply(gpus, 0))
    after = offering(schedule.apply(used(gpus, {0: before[0]}), 0.1))

    assert after == before


def test_a_backend_that_is_not_ready_has_no_turn() -> None:
    """A suspended backend's turn would be lost: the GPU goes to another at once."""
    schedule, gpus = TurnSchedule(), idle(1)
    (first,) = offering(schedule.apply(gpus, 0))
    others = [name for name in THREE if name != first]
    found = changes(schedule, idle(1, others), 0.1, 30)

    assert found[0][1][0] in others
    assert {name.rstrip("-") for _, (name,) in found} == set(others)


def test_a_gpu_that_no_pod_can_have_keeps_its_turn() -> None:
    """A cordon changes nothing that the kubelet sees beside it."""
    schedule = TurnSchedule()
    before = schedule.apply(idle(2), 0)
    cordoned = [TurnCandidate(GpuId("GPU-0"), ()), idle(2)[1]]

    assert schedule.apply(cordoned, 1)[GpuId("GPU-0")] == before[GpuId("GPU-0")]


def test_turns_grow_while_nothing_changes() -> None:
    """Each turn writes the Node: a quiet pool writes it seldom, and a change is answered soon."""
    schedule = TurnSchedule()
    found = changes(schedule, idle(1), 0, 600)
    ends = [at for at, (name,) in found if name.endswith("-")]
    gaps = [b - a for a, b in pairwise(ends)]

    assert gaps[0] == pytest.approx(TIMING.turn)
    assert max(gaps[-6:]) >= TIMING.longest_turn
    later = changes(schedule, idle(2), 600, 10)
    assert len(later) > 4


@given(
    gpus=st.integers(1, 6),
    backends=st.integers(2, 4),
    steps=st.lists(
        st.tuples(st.floats(0.01, 5), st.integers(0, 5), st.integers(0, 3)), max_size=40
    ),
)
def test_an_idle_gpu_has_one_backend_and_each_backend_gets_all(
    gpus: int, backends: int, steps: list[tuple[float, int, int]]
) -> None:
    """Pods come and go at any time: a GPU goes on by way of a grace, and nobody is left out."""
    names = ["fraction", "timeslice", "mps", "whole"][:backends]
    schedule, free = TurnSchedule(), idle(gpus, names)
    now, owners, before = 0.0, dict[int, str](), dict[GpuId, OfferTurn]()

    for wait, index, backend in steps:
        now += wait
        turns = dict(schedule.apply(used(free, owners), now))
        for each, turn in turns.items():
            last = before.get(each)
            if last is not None and turn.backend != last.backend and not owned(each, owners):
                assert last.withdrawn
                assert turn.since >= last.until
        before = {each: offer_turn for each, offer_turn in turns.items() if not owned(each, owners)}
        number = index % gpus
        if number in owners:
            del owners[number]
        elif backend % 2:
            owners[number] = turns[GpuId(f"GPU-{number}")].backend

    all_of_it = set[str]()
    at_turn = set[tuple[int, str]]()
    for _, there in changes(schedule, free, now, 2 * ROUND_S):
        at_turn |= set(enumerate(there))
        all_of_it |= {there[0]} if len(set(there)) == 1 else set()
    assert at_turn >= {(n, name) for n in range(gpus) for name in names}
    assert all_of_it >= set(names)


def owned(gpu: GpuId, owners: Mapping[int, str]) -> bool:
    """Return whether a GPU of `idle` has an owner."""
    return int(gpu.removeprefix("GPU-")) in owners


MIXED = """
version: metagpu/v1
pools:
  - name: all{more}
    backends:
      - {{backend: fraction, sharesPerGpu: 4}}
      - {{backend: timeslice, resource: nvidia.com/gpu.shared, replicas: 2}}
"""


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
        return {share.backend for share in self.healthy(index)}

    def healthy(self, index: int = 0) -> list[Share]:
        """Return the shares of a GPU that are listed Healthy."""
        state = self.states[index]
        return [share for share in state.shares if share.id not in availability_of(state).unlisted]


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
        assert withdrawn(pool.states[0]) == {share.id for share in pool.healthy()}

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
    units = [
        [share for share in offer.shares if share.gpu == of.id and share.backend == "mps"]
        for of in gpus
    ]
    registry.apply(SharesClaimed((*units[0][:2], *units[1][:3]), at=1))

    def free(turn: OfferTurn) -> list[int]:
        registry.apply(TurnsChanged({gpus[2].id: turn}))
        unhealthy = [availability_of(state).unlisted for state in registry.snapshot.gpus.values()]
        held = [state.leases for state in registry.snapshot.gpus.values()]
        return [
            sum(
                unit.id not in unhealthy[index] and unit.id not in held[index]
                for unit in units[index]
            )
            for index in range(3)
        ]

    assert free(OfferTurn("mps", 0)) == [2, 1, 4]
    assert free(OfferTurn("mps", 0, withdrawn=True, next="timeslice")) == [2, 0, 4]
    assert free(OfferTurn("timeslice", 1)) == [2, 0, 0]
