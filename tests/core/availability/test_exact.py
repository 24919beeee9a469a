"""The choice of the shares that are held back, and of those that pods on their way get."""

import pytest
from msgspec.structs import replace

from metagpu.core.availability.exact import (
    FreePart,
    free_part,
    held_back_gpus,
    held_back_of,
    largest_request,
    with_place_for_arriving,
)
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.offers import OfferRule, RequestRule
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder, OfferTurn
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import LeasesObserved, PodsListed, SharesClaimed, TurnsChanged
from tests.rigs.build import METAGPU, after, gpu, offered

WHOLE, ONE, ANY = RequestRule.WHOLE_GPUS, RequestRule.ONE_GPU, RequestRule.ANY


def parts(*free: int, total: int = 100, full: tuple[int, ...] = ()) -> list[FreePart]:
    """Return GPUs of equal shares, of which so many are free; `full` ones take nobody more."""
    return [FreePart(GpuId(str(n)), total, number, n in full) for n, number in enumerate(free)]


def uneven(*pairs: tuple[int, int]) -> list[FreePart]:
    """Return GPUs by their numbers of free shares and of all shares."""
    return [FreePart(GpuId(str(n)), total, free) for n, (free, total) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("rule", "gpus", "held", "largest"),
    [
        (WHOLE, parts(30, 30), {"1"}, 30),
        (WHOLE, parts(30, 40), {"0"}, 40),
        (WHOLE, parts(30, 40, 100), {"0"}, 140),
        (WHOLE, parts(100, 100), set(), 200),
        (WHOLE, parts(0, 0), set(), 0),
        (WHOLE, parts(), set(), 0),
        (WHOLE, parts(100, 30, 20, 30), {"2", "3"}, 130),
        (ONE, parts(30, 40), {"0"}, 40),
        (ONE, parts(30, 40, 100), set(), 100),
        (ANY, parts(30, 40), set(), 70),
        # Without the largest GPU, no request between a smaller GPU and the largest one fits.
        (WHOLE, uneven((10, 80), (40, 40), (40, 40)), {"0", "2"}, 90),
        (WHOLE, uneven((10, 80), (40, 40)), {"0"}, 40),
        (WHOLE, uneven((80, 80), (40, 40), (15, 40), (20, 80)), {"2"}, 140),
        (ONE, uneven((10, 80), (40, 40), (40, 40)), {"0", "2"}, 40),
        (ONE, parts(100, 30, 40, full=(0, 2)), {"0", "2"}, 30),
        (ONE, parts(100, 30, 40, full=(2,)), {"2"}, 100),
        (ONE, parts(100, full=(0,)), {"0"}, 0),
    ],
)
def test_what_no_request_could_take_together_is_held_back(
    rule: RequestRule, gpus: list[FreePart], held: set[str], largest: int
) -> None:
    """The shares left on offer are those that a request of the whole sum would take."""
    assert held_back_gpus(rule, gpus) == held
    assert largest_request(rule, gpus) == largest


@pytest.mark.parametrize("rule", RequestRule)
def test_a_resource_without_a_gpu_gives_nothing(rule: RequestRule) -> None:
    """No request can be placed where no GPU has shares of a resource."""
    assert largest_request(rule, ()) == 0


A, B = gpu(0).id, gpu(1).id
POD = KnownPod("u", "team", "a", requests={METAGPU: 2})


def used() -> Snapshot:
    """Return two GPUs of ten shares, of each of which a container of the pod holds one."""
    _, snapshot = offered(gpu(0), gpu(1))
    held = [snapshot.gpus[index].shares[0].id for index in (A, B)]
    holders = dict.fromkeys(held, Holder("team", "a", "main"))
    return after(PodsListed((POD,), 1.0), LeasesObserved(holders, at=1), since=snapshot)


def hidden(snapshot: Snapshot) -> list[tuple[int, int]]:
    """Return how many shares of each GPU are held back, and how many leased ones are hidden."""
    return [
        (
            len(held_back_of(state).get(METAGPU, ())),
            len(state.hidden.ending if state.hidden else ()),
        )
        for state in snapshot.gpus.values()
    ]


def test_a_node_hides_what_its_next_pod_could_not_have() -> None:
    """Of two GPUs with equal rests one is held back; shares of pods that end are hidden too."""
    running = used()
    ending = after(PodsListed((replace(POD, terminating=True),), 2.0), since=running)
    other = after(PodsListed((replace(POD, name="b", terminating=True),), 2.0), since=running)
    free = after(LeasesObserved({}, at=3), since=ending)

    assert hidden(running) == [(0, 0), (10, 0)]
    assert hidden(ending) == [(0, 1), (10, 1)]
    assert hidden(other) == [(0, 0), (10, 0)]
    assert hidden(free) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("withdrawn", [False, True])
def test_no_pod_is_bound_for_a_gpu_whose_turn_ends(*, withdrawn: bool) -> None:
    """The shares that are held back are those beside the ones of other GPUs."""
    layout, snapshot = offered(gpu(0), gpu(1), gpu(2))
    of_one_gpu = replace(layout.offer_fact, rules={METAGPU: OfferRule(RequestRule.ONE_GPU)})
    one, two = (snapshot.gpus[gpu(n).id].shares[:n] for n in (1, 2))
    turns = TurnsChanged({A: OfferTurn("fraction", 1, withdrawn=withdrawn)})
    now = after(of_one_gpu, SharesClaimed((*one, *two), at=1), turns, since=snapshot)

    assert hidden(now) == [(0, 0), (0, 0), (10 if withdrawn else 0, 0)]


@pytest.mark.parametrize(
    ("asked", "ending", "expected"),
    [(0, False, 9), (10, False, 9), (10, True, 11), (8, True, 10), (1, True, 9)],
)
def test_a_pod_on_its_way_finds_the_amount_it_was_bound_by(
    asked: int, expected: int, *, ending: bool
) -> None:
    """The kubelet admits what pods request, as far as shares are free or about to be so."""
    new = KnownPod("v", "team", "b", requests={METAGPU: asked}, arriving=asked > 0)
    pods = PodsListed((replace(POD, terminating=ending), new), 2.0)

    assert with_place_for_arriving(after(pods, since=used()), {METAGPU: 9}) == {METAGPU: expected}


@pytest.mark.parametrize(("most", "usable"), [(0, 0), (1, 0), (2, 9)])
def test_a_gpu_with_its_most_containers_has_no_usable_share(most: int, usable: int) -> None:
    """Free shares of a GPU that serves no further container are nobody's."""
    snapshot = used()
    rule = OfferRule(RequestRule.ONE_GPU, {A: most})
    part = free_part(snapshot.gpus[A], replace(snapshot.offers[METAGPU], rule=rule))

    assert (part.total, part.free, part.usable) == (10, 9, usable)
