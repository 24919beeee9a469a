"""MIG combinations: footprints alone reproduce NVIDIA's tables."""

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product
from typing import Final, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.mig.profiles import (
    MigGeometry,
    PlacedProfile,
    disjoint,
    geometry_of,
    profile_resource,
    share_id,
    slot_of_instance,
)
from metagpu.core.availability.conflict import conflicts
from metagpu.core.model.mig import profile_of, slot_of
from metagpu.sim.machine.gpu_models import GPU_MODELS
from metagpu.sim.machine.mig_driver import MigDriverError, create_gpu_instance
from metagpu.sim.machine.spec import build_node
from tests.backends.mig.gpus import instance, mig_gpu
from tests.backends.mig.tables import A100_40, GEOMETRIES, only, profile
from tests.rigs.build import gpu, share

Combination: TypeAlias = frozenset[tuple[str, int]]
"""How many instances of each profile, those with none left out."""

PLAIN: Final = ("1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")
EVERY: Final = pytest.mark.parametrize("name", GEOMETRIES)

LARGEST: Final = (
    {"7g": 1},
    {"4g": 1, "3g": 1},
    {"4g": 1, "2g": 1, "1g": 1},
    {"4g": 1, "1g": 3},
    {"3g": 2},
    {"3g": 1, "2g": 2},
    {"3g": 1, "2g": 1, "1g": 2},
    {"3g": 1, "1g": 4},
    {"2g": 3, "1g": 1},
    {"2g": 2, "1g": 3},
    {"2g": 1, "1g": 5},
    {"1g": 7},
)
"""Full combinations of an A100: NVIDIA's MIG user guide draws them."""


def counted(spots: Iterable[PlacedProfile]) -> Combination:
    """Count the profiles of some placements."""
    return frozenset(Counter(spot.profile.name for spot in spots).items())


def combinations_of(geometry: MigGeometry) -> set[Combination]:
    """Return all combinations of a GPU, except the empty one."""
    return {counted(spots) for spots in geometry.arrangements() if spots}


def maximal(found: set[Combination]) -> set[Combination]:
    """Return the combinations that nothing can be added to."""

    def within(one: Combination, other: Combination) -> bool:
        counts = dict(other)
        return one != other and all(counts.get(name, 0) >= count for name, count in one)

    return {one for one in found if not any(within(one, other) for other in found)}


@pytest.mark.parametrize(
    ("name", "profiles", "all_of_them", "largest"),
    [
        ("A100-40", PLAIN, 37, 12),
        ("A100-40", (*PLAIN, "1g.10gb"), 77, 28),
        ("A100-40", (*PLAIN, "1g.10gb", "1g.5gb+me"), 127, 44),
        ("A30", ("1g.6gb", "2g.12gb", "4g.24gb"), 9, 4),
        ("H100-80", ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"), 37, 12),
        ("H100-80", tuple(p.name for p in GEOMETRIES["H100-80"].profiles), 127, 44),
        ("H200", ("1g.18gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"), 37, 12),
        ("B200", ("1g.23gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb"), 37, 12),
    ],
)
def test_all_combinations_are_reproduced(
    name: str, profiles: tuple[str, ...], all_of_them: int, largest: int
) -> None:
    """Sets of placements without a common slot are as many as NVIDIA's combinations."""
    found = combinations_of(only(GEOMETRIES[name], *profiles))

    assert len(found) == all_of_them
    assert len(maximal(found)) == largest


def test_the_combinations_of_an_a100_are_nvidias() -> None:
    """The twelve full combinations of an A100 are those of NVIDIA's guide, by name."""
    full = {name.split(".")[0]: name for name in PLAIN}
    expected = {
        frozenset((full[kind], count) for kind, count in counts.items()) for counts in LARGEST
    }

    assert maximal(combinations_of(only(A100_40, *PLAIN))) == expected


@EVERY
def test_slots_are_enough(name: str) -> None:
    """On no GPU model do instances without a common slot exceed the compute slices."""
    assert GEOMETRIES[name].overcommitted() is None


@EVERY
def test_as_many_fit_as_nvml_reports(name: str) -> None:
    """An empty GPU fits exactly NVML's count of each profile."""
    geometry = GEOMETRIES[name]

    assert geometry.free_counts(0) == {
        profile.name: profile.max_count for profile in geometry.profiles
    }


@pytest.mark.parametrize("compute", [1, 2])
def test_a_geometry_with_insufficient_slots_is_found(compute: int) -> None:
    """Disjoint placements that exceed the compute slices or instances are found."""
    short = MigGeometry((profile("1g.1gb", range(3), 1, 3),), compute_slices=compute)
    few = MigGeometry((profile("1g.1gb", range(3), 1, 2),), compute_slices=7)

    assert [str(spot) for spot in short.overcommitted() or ()][: compute + 1] == [
        f"1g.1gb@{start}" for start in range(compute + 1)
    ]
    assert len(few.overcommitted() or ()) == 3


@EVERY
def test_the_one_rule_of_sharing_is_all_the_planner_uses(name: str) -> None:
    """Two placements overlap as bits exactly when shares with their footprints conflict."""
    geometry, of = GEOMETRIES[name], gpu(0)

    for (number, one), (other_number, other) in combinations(
        enumerate(geometry.placed_profiles), 2
    ):
        shares = [
            share(of, at, backend="mig", slots=spot.footprint)
            for at, spot in ((number, one), (other_number, other))
        ]
        assert bool(geometry.masks[one] & geometry.masks[other]) == conflicts(*shares)


def test_a_footprint_is_memory_slices_and_engines() -> None:
    """`1g.5gb+me` at 6 takes memory slice 6 and the media engines, and nothing else."""
    spots = {str(spot): spot.footprint for spot in A100_40.placed_profiles}

    assert spots["1g.5gb+me@6"] == {"s6", "s+me"}
    assert spots["2g.10gb@4"] == {"s4", "s5"}
    assert spots["7g.40gb@0"] == {f"s{number}" for number in range(8)}


def test_order_matters() -> None:
    """Beside a 3g at 0 and a 2g at 4 one 1g fits; beside a 3g at 4 and a 2g at 0, two."""
    room = {
        start: A100_40.free_counts(
            A100_40.mask(
                slot
                for spot in A100_40.placed_profiles
                if str(spot) in (f"3g.20gb@{start}", f"2g.10gb@{4 - start}")
                for slot in spot.footprint
            )
        )
        for start in (0, 4)
    }

    assert (room[0]["1g.5gb"], room[4]["1g.5gb"]) == (1, 2)


def test_profiles_with_one_engine_exclude_each_other() -> None:
    """An A30 has one `+me` instance, of one size or the other, and beside it any without."""
    found = combinations_of(GEOMETRIES["A30"])

    assert frozenset({("1g.6gb+me", 1), ("2g.12gb", 1), ("1g.6gb", 1)}) in found
    assert not [one for one in found if {"1g.6gb+me", "2g.12gb+me"} <= {name for name, _ in one}]


def test_a_profile_with_all_engines_leaves_none_to_others() -> None:
    """Beside `+me.all` there can be instances without media engines, and no others."""
    beside = {
        name
        for one in combinations_of(GEOMETRIES["RTX PRO 6000"])
        if "1g.24gb+me.all" in dict(one)
        for name, _ in one
    }

    assert beside == {"1g.24gb+me.all", "1g.24gb-me", "2g.48gb-me"}


def test_a_profile_with_one_instance_excludes_itself() -> None:
    """A profile of which NVML allows one instance is offered once, for any reason."""
    geometry = MigGeometry(
        (profile("1g.1gb+new", range(4), 1, 1), profile("1g.1gb", range(4), 1, 4)), 4
    )

    assert geometry.overcommitted() is None
    assert geometry.free_counts(0) == {"1g.1gb+new": 1, "1g.1gb": 4}


def test_unknown_slots_block_no_profile() -> None:
    """A slot that no profile of the geometry uses blocks no profile; memory slices do."""
    geometry = only(A100_40, "2g.10gb")

    assert geometry.mask({"s+me", "whole"}) == 0
    assert [str(spot) for spot in geometry.free_placements(geometry.mask({"s+me", "s3"}))] == [
        "2g.10gb@0",
        "2g.10gb@4",
    ]


@pytest.mark.parametrize(
    ("slots", "largest", "slices"),
    [
        ("", "7g.40gb", 8),
        ("s6", "4g.20gb", 7),
        ("s0", "3g.20gb", 7),
        ("s0 s4", "2g.10gb", 6),
        ("s0 s2 s4 s6", "1g.5gb", 4),
        ("s0 s1 s2 s3 s4 s5 s6", None, 1),
    ],
)
def test_the_largest_profile_that_fits(slots: str, largest: str | None, slices: int) -> None:
    """A GPU in use has a largest profile for one more pod."""
    occupied = A100_40.mask(slots.split())
    found = A100_40.largest(occupied)

    assert (found and found.name) == largest
    assert A100_40.free_slices(occupied) == slices


@EVERY
def test_capacity_is_that_of_the_best_arrangement(name: str) -> None:
    """For all occupied slots, a profile's capacity is the most instances that can be added."""
    geometry = GEOMETRIES[name]
    states = {
        geometry.mask(s for spot in spots for s in spot.footprint)
        for spots in geometry.arrangements()
    }
    alone = {p.name: list(only(geometry, p.name).arrangements()) for p in geometry.profiles}

    for occupied in states:
        room = geometry.free_counts(occupied)
        for kind, ways in alone.items():
            fitting = (w for w in ways if not any(geometry.masks[s] & occupied for s in w))
            assert room[kind] == max(map(len, fitting))


@EVERY
def test_nothing_is_won_by_occupying_more(name: str) -> None:
    """Future capacity falls with each occupied slot, to zero where nothing fits."""
    geometry = GEOMETRIES[name]
    full = geometry.mask(slot for spot in geometry.placed_profiles for slot in spot.footprint)

    for occupied in range(0, full + 1, 3):
        for mask in set(geometry.masks.values()):
            assert geometry.future_capacity(occupied | mask) <= geometry.future_capacity(occupied)
    assert geometry.future_capacity(full) == 0


def test_disjoint_gives_every_way_once() -> None:
    """Choices of disjoint masks are complete, each in the masks' order."""
    masks = (0b0011, 0b0110, 0b1100, 0b0001, 0b11000)

    for count, occupied in product(range(5), (0, 0b1, 0b1000)):
        expected = [
            places
            for places in combinations(range(len(masks)), count)
            if not any(masks[place] & occupied for place in places)
            and not any(masks[a] & masks[b] for a, b in combinations(places, 2))
        ]
        assert list(disjoint(masks, count, occupied)) == expected


MIG_MODELS = [key for key, model in GPU_MODELS.items() if model.has_mig]


@pytest.mark.parametrize(
    ("profile", "resource"),
    [
        ("1g.5gb", "nvidia.com/mig-1g.5gb"),
        ("1g.5gb+me", "nvidia.com/mig-1g.5gb.me"),
        ("1g.24gb+me.all", "nvidia.com/mig-1g.24gb.me.all"),
        ("1g.24gb-me", "nvidia.com/mig-1g.24gb-me"),
    ],
)
def test_resources_are_named_as_by_nvidia(profile: str, resource: str) -> None:
    """A plus, which Kubernetes refuses, becomes a point."""
    assert profile_resource(profile) == resource


def test_an_id_has_profile_and_slice() -> None:
    """Profile and slice are read from the id alone, and from an instance that NVML lists."""
    gpu = mig_gpu()
    share = share_id(gpu.id, "1g.5gb+me@6")

    assert (slot_of(share), profile_of(share)) == ("1g.5gb+me@6", "1g.5gb+me")
    assert slot_of_instance(gpu.mig_profiles, instance(gpu, "3g.20gb@4")) == "3g.20gb@4"
    assert slot_of_instance((), instance(gpu, "3g.20gb@4")) == "profile 9@4"


def test_gpus_of_a_model_have_one_geometry() -> None:
    """The planner computes a geometry once for a model and its allowed profiles."""
    one, other = mig_gpu(0), mig_gpu(1)
    allowed = frozenset(("1g.5gb",))

    assert geometry_of(one.mig_profiles) is geometry_of(other.mig_profiles)
    assert [geometry.name for geometry in geometry_of(one.mig_profiles, allowed).profiles] == [
        "1g.5gb"
    ]


@pytest.mark.parametrize("key", MIG_MODELS)
def test_slots_are_sufficient(key: str) -> None:
    """No set of placements without a common slot exceeds the geometry."""
    assert geometry_of(mig_gpu(model=key).mig_profiles).overcommitted() is None


@given(st.sampled_from(MIG_MODELS), st.lists(st.integers(0, 200), max_size=12))
def test_the_driver_refuses_overlapping_placements_alone(key: str, picks: list[int]) -> None:
    """The driver accepts a placement exactly if no slot of it is taken."""
    node = build_node(f"{key}:1")
    gpu, profiles = node.gpu(0), mig_gpu(model=key).mig_profiles
    gpu.mig.enabled = True
    numbers = {profile.name: profile.number for profile in profiles}
    spots, taken = geometry_of(profiles).placed_profiles, set[str]()

    for pick in picks:
        spot = spots[pick % len(spots)]
        place, number = spot.placement, numbers[spot.profile.name]
        with node.changed:
            try:
                create_gpu_instance(node, gpu, number, place.start, place.size)
            except MigDriverError:
                assert not spot.footprint.isdisjoint(taken)
            else:
                assert spot.footprint.isdisjoint(taken)
                taken |= spot.footprint
