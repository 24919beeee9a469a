"""Layouts planned in advance, and capacity opened by one pod's move."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.mig import planner
from metagpu.backends.mig.backend import MigBackend
from metagpu.backends.mig.options import MigOptions
from metagpu.backends.mig.planner import (
    GpuOccupancy,
    InstanceMove,
    UnplaceableLayout,
    find_moves,
    layout_name,
    place_layout,
    plan_layout,
)
from metagpu.backends.mig.profiles import MigGeometry, PlacedProfile, disjoint
from metagpu.core.grants.injection import Injection
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Holder, ProvisionedState, ShareId
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.diagnosis import CheckResult, check_configuration
from metagpu.core.reports.reading import plain_report
from metagpu.core.reports.schema import StatusReport
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
from tests.backends.mig.tables import A100_40, GEOMETRIES, only
from tests.rigs.build import after, gpu, layout_of
from tests.rigs.reported import complete

PLAIN: Final = only(A100_40, "1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")


def spots(names: str, geometry: MigGeometry = A100_40) -> tuple[PlacedProfile, ...]:
    """Return placements by their names, such as `2g.10gb@4 1g.5gb@6`."""
    known = {str(spot): spot for spot in geometry.placed_profiles}
    return tuple(known[name] for name in names.split())


def slots(names: str) -> frozenset[str]:
    """Return the slots of some placements of an A100."""
    return frozenset(slot for spot in spots(names) for slot in spot.footprint)


def planned(
    wanted: dict[str, int], used: str = "", keep: str = "", geometry: MigGeometry = A100_40
) -> list[str] | str:
    """Plan a layout; return the names of its placements, or the reason of a failure."""
    found = plan_layout(geometry, wanted, slots(used), spots(keep))
    return found.reason if isinstance(found, UnplaceableLayout) else [str(spot) for spot in found]


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (
            {"2g.10gb": 2, "1g.5gb": 3},
            ["2g.10gb@4", "2g.10gb@2", "1g.5gb@6", "1g.5gb@1", "1g.5gb@0"],
        ),
        ({"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2}, None),
        ({"1g.5gb": 4, "3g.20gb": 1}, None),
        ({"1g.5gb": 7}, [f"1g.5gb@{start}" for start in range(6, -1, -1)]),
        ({"7g.40gb": 1}, ["7g.40gb@0"]),
        ({"1g.5gb": 1}, ["1g.5gb@5"]),
        ({"1g.5gb": 0}, []),
        ({}, []),
    ],
)
def test_a_layout_gets_exact_placements(wanted: dict[str, int], expected: list[str] | None) -> None:
    """A layout has the only possible placements, or those that leave most capacity."""
    found = planned(wanted)

    if expected is None:
        names = Counter(str(spot).partition("@")[0] for spot in found)
        assert names == Counter(wanted)
        assert "3g.20gb@4" in found
    else:
        assert found == expected


@pytest.mark.parametrize("geometry", [PLAIN, GEOMETRIES["A30"]], ids=["A100", "A30"])
def test_exactly_the_possible_layouts_are_planned(geometry: MigGeometry) -> None:
    """Of all counts of all profiles, exactly the possible layouts are planned."""
    reachable = {
        frozenset(Counter(spot.profile.name for spot in those).items())
        for those in geometry.arrangements()
    }

    by_size = sorted(geometry.profiles, key=lambda p: (-p.memory_slices, -p.compute_slices))
    order = [profile.name for profile in by_size]

    for counts in product(*[range(profile.max_count + 2) for profile in geometry.profiles]):
        wanted = {p.name: n for p, n in zip(geometry.profiles, counts, strict=True)}
        found = plan_layout(geometry, wanted)
        asked = frozenset((kind, count) for kind, count in wanted.items() if count)
        assert isinstance(found, tuple) == (asked in reachable)
        if isinstance(found, tuple):
            assert frozenset(Counter(spot.profile.name for spot in found).items()) == asked
            assert sound([[spot.footprint for spot in found]])
        else:
            upto = {name: wanted[name] for name in order[: order.index(found.profile)]}
            assert isinstance(plan_layout(geometry, {**upto, found.profile: found.fits}), tuple)
            assert isinstance(
                plan_layout(geometry, {**upto, found.profile: found.fits + 1}), UnplaceableLayout
            )


@pytest.mark.parametrize(
    ("wanted", "used", "reason"),
    [
        (
            {"5g.20gb": 1},
            "",
            "the GPU has no profile 5g.20gb; it has "
            + ", ".join(profile.name for profile in A100_40.profiles),
        ),
        ({"3g.20gb": 3}, "", "3 x 3g.20gb wanted, room for 2"),
        ({"7g.40gb": 1}, "1g.5gb@6", "1 x 7g.40gb wanted, room for 0 next to the slots in use"),
        (
            {"1g.5gb": 5, "3g.20gb": 1},
            "",
            "5 x 1g.5gb wanted, room for 4 next to 1 x 3g.20gb",
        ),
        (
            {"1g.5gb": 2, "3g.20gb": 1, "2g.10gb": 2},
            "",
            "2 x 1g.5gb wanted, room for 0 next to 1 x 3g.20gb and 2 x 2g.10gb",
        ),
        (
            {"1g.5gb": 3, "3g.20gb": 1},
            "2g.10gb@0",
            "3 x 1g.5gb wanted, room for 2 next to 1 x 3g.20gb and the slots in use",
        ),
    ],
)
def test_an_impossible_layout_has_a_reason(wanted: dict[str, int], used: str, reason: str) -> None:
    """The reason has the first impossible profile, the largest first, and the possible count."""
    assert planned(wanted, used) == reason


def test_a_count_costs_no_time_whatever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of a layout with a billion instances takes as few tries as one with eight."""
    tries = 0

    def counted(masks: Sequence[int], count: int, occupied: int) -> Iterator[tuple[int, ...]]:
        nonlocal tries
        tries += 1
        return disjoint(masks, count, occupied)

    monkeypatch.setattr(planner, "disjoint", counted)

    assert planned({"1g.5gb": 10**9}) == "1000000000 x 1g.5gb wanted, room for 7"
    assert tries < 100


def test_a_gpu_without_profiles_has_a_reason() -> None:
    """A GPU without allowed profiles has a complete reason without names."""
    assert planned({"1g.5gb": 1}, geometry=only(A100_40)) == (
        "the GPU has no profile 1g.5gb; it has none"
    )


@pytest.mark.parametrize(
    ("wanted", "used", "keep", "expected"),
    [
        ({"1g.5gb": 1}, "", "1g.5gb@0", ["1g.5gb@0"]),
        ({"1g.5gb": 1}, "1g.5gb@6", "", ["1g.5gb@5"]),
        ({"2g.10gb": 2}, "", "2g.10gb@0 2g.10gb@4", ["2g.10gb@4", "2g.10gb@0"]),
        ({"3g.20gb": 1, "1g.5gb": 1}, "", "1g.5gb@6 1g.5gb@1", ["3g.20gb@4", "1g.5gb@1"]),
        ({"3g.20gb": 1}, "", "1g.5gb@6", ["3g.20gb@4"]),
    ],
)
def test_existing_instances_are_kept_where_possible(
    wanted: dict[str, int], used: str, keep: str, expected: list[str]
) -> None:
    """Instances in use are never overlapped; as many idle ones as possible stay."""
    assert planned(wanted, used, keep) == expected


# --- moves ----------------------------------------------------------------------------------------


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


A = mig_gpu(0)


def backend(layout: dict[str, int], resource: str | None = None) -> MigBackend:
    """Create the backend of a pool with a layout."""
    return MigBackend(MigOptions("mig", layout=layout, resource=resource), Injection())


def test_each_instance_is_one_share() -> None:
    """An id has profile and slice, the resource the profile; no two shares exclude each other."""
    shares = backend({"1g.5gb": 3, "2g.10gb": 2}).shares(A)

    assert [(share.id.partition("::")[2], share.resource, share.number) for share in shares] == [
        *((f"1g.5gb@{at}", "nvidia.com/mig-1g.5gb", n) for n, at in enumerate((0, 1, 6))),
        *((f"2g.10gb@{at}", "nvidia.com/mig-2g.10gb", n) for n, at in enumerate((2, 4))),
    ]
    slots = [slot for share in shares for slot in share.footprint]
    assert len(slots) == len(set(slots))
    assert shares[-1].memory == 9856 * 2**20


def test_ids_do_not_depend_on_the_order_of_the_file() -> None:
    """Ids depend neither on the file's order nor on further profiles of a newer driver."""
    there = place_layout(A, {"1g.5gb": 3, "2g.10gb": 2})

    assert place_layout(A, {"2g.10gb": 2, "1g.5gb": 3}) == there
    assert not isinstance(there, UnplaceableLayout)
    assert len(there) == 5


def test_one_name_numbers_its_shares() -> None:
    """Under one name the numbers of the shares are those of the instances."""
    shares = backend({"1g.5gb": 7}, "nvidia.com/gpu").shares(A)

    assert {share.resource for share in shares} == {"nvidia.com/gpu"}
    assert [share.number for share in shares] == list(range(7))
    assert backend({"1g.5gb": 7}, "nvidia.com/gpu").resources == ("nvidia.com/gpu",)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("{3g.20gb: 3}", "the layout 3x3g.20gb does not fit: 3 x 3g.20gb wanted, room for 2"),
        (
            "{4g.20gb: 1, 2g.10gb: 2}",
            (
                "the layout 1x4g.20gb-2x2g.10gb does not fit: 2 x 2g.10gb wanted, room for 1 "
                "next to 1 x 4g.20gb"
            ),
        ),
        (
            "{9g.5gb: 1, 1g.5gb: 1}",
            (
                "the layout 1x9g.5gb-1x1g.5gb does not fit: the GPU has no profile 9g.5gb; it has "
                "1g.5gb, 1g.5gb+me, 1g.10gb, 2g.10gb, 3g.20gb, 4g.20gb, 7g.40gb"
            ),
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_reported(layout: str, why: str) -> None:
    """Such a GPU offers nothing, `explain` has the reason, and the resource has no shares."""
    text = (
        f"version: metagpu/v1\npools: [{{name: a, backends: [{{backend: mig, layout: {layout}}}]}}]"
    )
    found = layout_of(A, text=text)

    assert not found.shares
    assert len(found.backends) == layout.count(":")
    assert [assignment.reason for assignment in found.pool_assignments] == [
        f"all GPUs, but no shares: {why}"
    ]


def test_a_layout_is_named_as_in_mig_parted() -> None:
    """The largest profiles come first."""
    assert layout_name({"1g.5gb": 3, "2g.10gb": 2}) == "2x2g.10gb-3x1g.5gb"


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
        "nvidia.com/mig-7g.39gb has the amount 0, as no GPU provides it; GPUs 0, 1: it has none of "
        "the MIG profiles 7g.39gb; it has 1g.5gb"
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
