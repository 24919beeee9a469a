"""Layouts of MIG instances, planned in advance."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from metagpu.backends.mig import placement
from metagpu.backends.mig.backend import MigBackend
from metagpu.backends.mig.options import MigOptions
from metagpu.backends.mig.placement import (
    UnplaceableLayout,
    layout_name,
    place_layout,
    plan_layout,
)
from metagpu.backends.mig.profiles import MigGeometry, disjoint
from metagpu.core.grants.injection import Injection
from tests.backends.mig.gpus import mig_gpu
from tests.backends.mig.tables import A100_40, GEOMETRIES, PLAIN, only, slots, spots
from tests.rigs.build import layout_of


def planned(
    wanted: dict[str, int], used: str = "", keep: str = "", geometry: MigGeometry = A100_40
) -> list[str] | str:
    """Plan a layout; return the names of its placements, or the reason of a failure."""
    found = plan_layout(geometry, wanted, slots(used), spots(keep))
    return found.reason if isinstance(found, UnplaceableLayout) else [str(spot) for spot in found]


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
            slots_of = [slot for spot in found for slot in spot.footprint]
            assert len(slots_of) == len(set(slots_of))
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

    monkeypatch.setattr(placement, "disjoint", counted)

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
