"""Free capacity of GPUs, and what a pod's move opens."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.mig.capacity import GpuOccupancy, InstanceMove, find_moves
from metagpu.backends.mig.profiles import MigGeometry, PlacedProfile
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Holder, ProvisionedState, ShareId
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.diagnosis import CheckResult, check_configuration
from metagpu.core.reports.reading import plain_report
from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.reports.status import explain_report
from metagpu.core.state.facts import (
    GpuCordoned,
    GpuFaulted,
    GpusFound,
    LeasesObserved,
    ProvisioningReported,
    SharesClaimed,
)
from metagpu.kubectl.judgement import judge
from metagpu.kubectl.obstacles import ClusterNode
from metagpu.kubectl.pods import PodDemand, Request
from tests.backends.mig.gpus import mig_gpu
from tests.backends.mig.tables import A100_40, PLAIN, only, slots, spots
from tests.rigs.build import after, gpu, layout_of
from tests.rigs.reported import complete


def site(
    index: int, held: str = "", others: str = "", geometry: MigGeometry = A100_40
) -> GpuOccupancy:
    """Create a GPU on which pods hold some placements, and others are blocked."""
    return GpuOccupancy(gpu(index), geometry, spots(held, geometry), slots(others))


def move_texts(found: Iterable[InstanceMove]) -> list[str]:
    """Write moves as text: `0:1g.5gb@0 to 1:1g.5gb@6 opens 3g.20gb@0`."""
    return [
        f"{move.gpu.index}:{move.source} to {move.target_gpu.index}:{move.destination} "
        f"opens {move.opened}"
        for move in found
    ]


@pytest.mark.parametrize(
    ("profile", "sites", "expected"),
    [
        (
            "3g.20gb",
            [site(0, "1g.5gb@0 1g.5gb@4")],
            [
                "0:1g.5gb@0 to 0:1g.5gb@5 opens 3g.20gb@0",
                "0:1g.5gb@4 to 0:1g.5gb@1 opens 3g.20gb@4",
            ],
        ),
        (
            "7g.40gb",
            [site(0, "2g.10gb@4"), site(1, "4g.20gb@0")],
            [
                "0:2g.10gb@4 to 1:2g.10gb@4 opens 7g.40gb@0",
                "1:4g.20gb@0 to 0:4g.20gb@0 opens 7g.40gb@0",
            ],
        ),
        (
            "7g.40gb",
            [site(0, "3g.20gb@4"), site(1, "1g.5gb@6")],
            [
                "1:1g.5gb@6 to 0:1g.5gb@3 opens 7g.40gb@0",
                "0:3g.20gb@4 to 1:3g.20gb@0 opens 7g.40gb@0",
            ],
        ),
        (
            "3g.20gb",
            [site(0, "1g.5gb@0", others="1g.5gb@4")],
            ["0:1g.5gb@0 to 0:1g.5gb@5 opens 3g.20gb@0"],
        ),
        ("3g.20gb", [site(0, "1g.5gb@0")], []),
        ("3g.20gb", [site(0, "4g.20gb@0 2g.10gb@4")], []),
        ("1g.5gb+me", [site(0, "1g.5gb+me@6")], []),
        ("1g.5gb+me", [], []),
    ],
    ids=[
        "on its own GPU",
        "to another GPU",
        "the smallest first",
        "not what nobody can move",
        "not when there is room",
        "not when there is nowhere to go",
        "not to the same engine",
        "without GPUs",
    ],
)
def test_a_move_that_opens_a_place_is_found(
    profile: str, sites: list[GpuOccupancy], expected: list[str]
) -> None:
    """A move that opens a place for a profile is found, with its target."""
    assert move_texts(find_moves(profile, sites)) == expected


def test_an_instance_of_a_dropped_profile_is_not_moved() -> None:
    """An instance of a profile that the configuration dropped blocks, and is not moved."""
    held = spots("1g.5gb@4")
    here = GpuOccupancy(gpu(0), only(A100_40, "7g.40gb"), held)

    assert find_moves("7g.40gb", [here]) == []


@st.composite
def nodes(draw: st.DrawFn) -> list[GpuOccupancy]:
    """Create one to three A100 with any instances on them, some of which cannot be moved."""
    found = []
    for index in range(draw(st.integers(1, 3))):
        held: list[PlacedProfile] = []
        taken = 0
        for spot in draw(st.lists(st.sampled_from(PLAIN.placed_profiles), max_size=5)):
            if not PLAIN.masks[spot] & taken:
                taken |= PLAIN.masks[spot]
                held.append(spot)
        fixed = draw(st.integers(0, 1))
        others = frozenset(slot for spot in held[:fixed] for slot in spot.footprint)
        found.append(GpuOccupancy(gpu(index), PLAIN, tuple(held[fixed:]), others))
    return found


def slots_after(move: InstanceMove, sites: Sequence[GpuOccupancy]) -> list[list[frozenset[str]]]:
    """Return the slots of each GPU after a move and the wanted instance."""
    result = []
    for one in sites:
        on = [spot.footprint for spot in one.held if (one.gpu, spot) != (move.gpu, move.source)]
        on += [one.other_slots] if one.other_slots else []
        on += [move.destination.footprint] if one.gpu == move.target_gpu else []
        on += [move.opened.footprint] if one.gpu == move.gpu else []
        result.append(on)
    return result


@given(nodes(), st.sampled_from([profile.name for profile in PLAIN.profiles]))
def test_moves_are_all_that_help(sites: list[GpuOccupancy], profile: str) -> None:
    """A move leaves nothing overlapping, and every helpful single move is found."""
    found = find_moves(profile, sites)
    every = {
        (one.gpu.index, spot)
        for one in sites
        for spot in one.held
        for target in sites
        for onto in spot.profile.placed_profiles
        for opens in PLAIN.placed_profiles
        if opens.profile.name == profile
        and sound(slots_after(InstanceMove(one.gpu, spot, target.gpu, onto, opens), sites))
    }

    if any(one.geometry.free_placements(one.occupied, profile) for one in sites):
        assert found == []
    else:
        assert {(move.gpu.index, move.source) for move in found} == every
        assert all(sound(slots_after(move, sites)) for move in found)
        assert len(found) == len(every)


def sound(gpus: Iterable[Sequence[frozenset[str]]]) -> bool:
    """Return whether no slots overlap on any GPU."""
    return all(len(frozenset().union(*on)) == sum(map(len, on)) for on in gpus)


A, B = mig_gpu(0), mig_gpu(1)
LAYOUT = layout_of(
    A,
    B,
    text=(
        "version: metagpu/v1\npools: [{name: a, backends: [{backend: mig, "
        "profiles: [1g.5gb, 2g.10gb, 3g.20gb, 7g.40gb]}]}]"
    ),
)


def held(of: GpuId, *slots: str) -> dict[ShareId, Holder]:
    """Report pods that hold some instances; a pod has its instance's name."""
    return {ShareId(f"{of}::{slot}"): Holder("default", slot, "main") for slot in slots}


def capacity_lines(snapshot: Snapshot) -> list[str]:
    """Return the operator's lines."""
    return [remark.text for remark in explain_report(snapshot, LAYOUT).remarks]


def node(*holders: dict[ShareId, Holder]) -> Snapshot:
    """Return the snapshot while pods hold these instances."""
    everyone = {share: holder for each in holders for share, holder in each.items()}
    return after(GpusFound((A, B), at=0), LAYOUT.offer_fact, LeasesObserved(everyone, at=5))


def test_the_largest_instance_that_fits_is_named() -> None:
    """Each GPU's largest free profile is named; blocked slots and claims count as taken."""
    snapshot = node(held(A.id, "3g.20gb@0"))
    assert capacity_lines(snapshot) == [
        "GPU 0: the largest instance that fits is 3g.20gb",
        "GPU 1: the largest instance that fits is 7g.40gb",
    ]

    claimed = next(share for share in LAYOUT.shares if share.id == f"{A.id}::2g.10gb@4")
    blocked = ProvisionedState(blocked={f"s{n}": "foreign" for n in range(8)})
    snapshot = after(
        SharesClaimed((claimed,), at=6),
        ProvisioningReported(B.id, "mig", blocked, at=6),
        since=snapshot,
    )
    assert capacity_lines(snapshot) == [
        "GPU 0: the largest instance that fits is 1g.5gb",
        "GPU 1: the GPU is full",
    ]


def test_the_helpful_move_is_named() -> None:
    """A profile that fits nowhere has the pod to move, its place and its target, if any."""
    snapshot = node(held(A.id, "1g.5gb@0", "1g.5gb@4"), held(B.id, "2g.10gb@0", "3g.20gb@4"))
    assert capacity_lines(snapshot) == [
        "GPU 0: the largest instance that fits is 2g.10gb",
        "GPU 1: the largest instance that fits is 2g.10gb",
        (
            "if default/1g.5gb@0 (main) moved from 1g.5gb@0 of GPU 0 to 1g.5gb@6 of GPU 0, a "
            "3g.20gb would fit on GPU 0"
        ),
    ]
    assert len(capacity_lines(node(held(A.id, "7g.40gb@0"), held(B.id, "7g.40gb@0")))) == 2


def test_a_fixed_layout_has_no_capacity_lines() -> None:
    """GPUs with a fixed layout have all instances that they shall have."""
    pool = "{name: a, backends: [{backend: mig, layout: {1g.5gb: 7}}]}"
    fixed = layout_of(A, text=f"version: metagpu/v1\npools: [{pool}]")
    assert fixed.free_capacity(after(GpusFound((A,), at=0), fixed.offer_fact)) == []


def test_a_profile_that_no_gpu_has_is_a_remark() -> None:
    """An amount of 0 has its reason in the report, in the doctor's finding, and in `why`."""
    text = """
version: metagpu/v1
pools: [{name: a, backends: [{backend: mig, profiles: [1g.5gb, 7g.39gb], enableMig: true}]}]
"""
    layout = layout_of(A, B, text=text)
    explained = explain_report(after(GpusFound((A, B), at=0), layout.offer_fact), layout)
    remark, *_ = explained.remarks
    assert remark.reason == "resource_empty"
    assert remark.text.startswith(
        "nvidia.com/mig-7g.39gb has the amount 0, because no GPU provides it; GPUs 0, 1: it has "
        "none of the MIG profiles 7g.39gb; it has 1g.5gb"
    )

    reported = plain_report(explained)
    reported["configuration"] = {"error": None, "misfits": []}
    status = complete(reported, StatusReport)
    assert check_configuration(status)[:2] == (CheckResult.WARNING, remark.text)
    demand = PodDemand("default", "p", (Request("main", "nvidia.com/mig-7g.39gb", 1),))
    assert judge(demand, ClusterNode("n", report=status)).reason.startswith(remark.text)


def test_free_capacity_is_reported_in_numbers() -> None:
    """Each GPU has its largest profile with slices, its free slices, and the helpful move."""
    snapshot = node(held(A.id, "1g.5gb@0", "1g.5gb@4"), held(B.id, "2g.10gb@0", "3g.20gb@4"))
    explained = explain_report(snapshot, LAYOUT)
    first, second = (
        plain_report(report.free_capacity) for report in explained.gpus if report.free_capacity
    )

    move = {
        "profile": "3g.20gb",
        "freedSlot": "3g.20gb@0",
        "holder": "default/1g.5gb@0 (main)",
        "from": "1g.5gb@0",
        "to": "1g.5gb@6",
        "toGpu": 0,
    }
    assert first == {
        "largest": "2g.10gb",
        "largestSlices": 2,
        "freeSlices": 6,
        "slices": 8,
        "moves": [move],
    }
    assert second == {**first, "freeSlices": 2, "moves": []}
    empty = explain_report(node(), LAYOUT).gpus[0].free_capacity
    assert empty is not None
    assert (empty.largest, empty.largest_slices, empty.free_slices) == ("7g.40gb", 8, 8)


def test_a_full_gpu_has_no_largest_profile() -> None:
    """On a full GPU the largest profile has no name and no slices, whatever is free."""
    [first, _] = LAYOUT.free_capacity(node(held(A.id, "7g.40gb@0")))

    assert (first.largest, first.largest_slices, first.free_slices) == (None, 0, 0)


def test_an_unavailable_gpu_has_no_capacity() -> None:
    """A cordoned or faulty GPU is named so, and is the target of no move."""
    crowded = node(held(A.id, "1g.5gb@0", "1g.5gb@4"), held(B.id, "1g.5gb@0", "1g.5gb@4"))
    snapshot = after(
        GpuFaulted(A.id, "XID 79", at=6), GpuCordoned(B.id, "riser", at=6), since=crowded
    )
    first, second = LAYOUT.free_capacity(snapshot)

    assert (first.largest, first.closed, first.free_slices) == (None, True, 6)
    assert (second.largest, second.closed, second.moves) == (None, True, ())
    assert capacity_lines(snapshot) == [
        "GPU 0: pods get no MIG instances now",
        "GPU 1: pods get no MIG instances now",
    ]
