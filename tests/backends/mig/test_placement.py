"""The placement of instances, compared with all choices and with simpler rules."""

from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bench import arrivals
from bench.mig_placement import TOLERANCE, boards, churn, orders, profile_sets
from bench.optimum import Process
from bench.orders import best_orders, placed_orders, possible_orders
from metagpu.backends.mig.placement import PlacementCandidate, choose_placements
from metagpu.backends.mig.profiles import MigGeometry
from metagpu.core.availability.conflict import conflicts
from metagpu.core.model.shares import Share, ShareId
from tests.backends.mig.tables import A100_40, GEOMETRIES, PLAIN, only
from tests.rigs.build import gpu, share


def spot(index: int, name: str, geometry: MigGeometry = A100_40) -> Share:
    """Create the share of a placement, such as `2g.10gb@4`, of the GPU with this index."""
    places = {str(one): one for one in geometry.placed_profiles}
    number = [one for one in geometry.placed_profiles if one.profile == places[name].profile].index(
        places[name]
    )
    made = share(gpu(index), number, backend="mig", slots=places[name].footprint)

    return replace(made, id=ShareId(f"{made.gpu}::{name}"))


def candidate(
    index: int,
    profile: str,
    *,
    used: str = "",
    required: str = "",
    warm: str = "",
    geometry: MigGeometry = A100_40,
    free: Sequence[str] | None = None,
) -> PlacementCandidate:
    """Create a candidate GPU with used placements and a requested profile.

    What is free is all that does not overlap, unless it is named.
    """
    taken = [spot(index, name, geometry) for name in used.split()]
    slots = frozenset(slot for one in taken for slot in one.footprint)
    names = (
        [str(one) for one in geometry.free_placements(geometry.mask(slots), profile)]
        if free is None
        else free
    )
    must = frozenset(spot(index, name, geometry) for name in required.split())
    idle = frozenset(spot(index, name, geometry) for name in warm.split())

    return PlacementCandidate(
        gpu(index), geometry, slots, [spot(index, name, geometry) for name in names], must, idle
    )


def chosen(size: int, *candidates: PlacementCandidate) -> list[str] | None:
    """Choose; return the choice as `index:placement`."""
    found = choose_placements(size, candidates)
    if found is None:
        return None
    return [f"{int(one.gpu[-12:], 16)}:{one.id.partition('::')[2]}" for one in found]


# --- one instance ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "used", "expected"),
    [
        ("1g.5gb", "", "1g.5gb@5"),
        ("1g.5gb", "1g.5gb@6", "1g.5gb@5"),
        ("1g.5gb", "3g.20gb@4", "1g.5gb@3"),
        ("2g.10gb", "", "2g.10gb@4"),
        ("2g.10gb", "3g.20gb@4", "2g.10gb@2"),
        ("3g.20gb", "", "3g.20gb@4"),
        ("1g.10gb", "", "1g.10gb@6"),
        ("1g.5gb+me", "", "1g.5gb+me@6"),
        ("7g.40gb", "", "7g.40gb@0"),
    ],
)
def test_the_cheapest_placement_is_taken(profile: str, used: str, expected: str) -> None:
    """An instance goes where the largest profiles still fit: small ones to the far end."""
    assert chosen(1, candidate(0, profile, used=used)) == [f"0:{expected}"]


@pytest.mark.parametrize(
    ("profile", "used", "expected"),
    [
        ("1g.5gb", ["", "1g.5gb@6"], "1:1g.5gb@5"),
        ("1g.5gb", ["", "7g.40gb@0", "4g.20gb@0"], "2:1g.5gb@6"),
        ("2g.10gb", ["", "3g.20gb@4 1g.5gb@3"], "1:2g.10gb@0"),
        ("3g.20gb", ["", "3g.20gb@4", "4g.20gb@0"], "2:3g.20gb@4"),
        ("1g.5gb", ["", ""], "0:1g.5gb@5"),
        ("1g.10gb", ["1g.5gb@6", "3g.20gb@0 1g.5gb@4 1g.5gb@5"], "1:1g.10gb@6"),
    ],
)
def test_the_gpu_that_loses_least_is_taken(profile: str, used: list[str], expected: str) -> None:
    """An idle GPU stays whole while one in use has a place; equal GPUs go by index."""
    candidates = [candidate(index, profile, used=spots) for index, spots in enumerate(used)]

    assert chosen(1, *candidates) == [expected]


def test_only_profiles_on_offer_have_a_worth() -> None:
    """A GPU does not stay whole for large profiles that are not allowed."""
    small = only(A100_40, "1g.5gb", "2g.10gb")

    assert chosen(1, candidate(0, "1g.5gb")) == ["0:1g.5gb@5"]
    assert chosen(1, candidate(0, "2g.10gb", used="1g.5gb@5 1g.5gb@6", geometry=small)) == [
        "0:2g.10gb@2"
    ]


COMBINATIONS: Final = sorted(
    {
        tuple(sorted((one.profile.name for one in spots), reverse=True))
        for spots in PLAIN.arrangements()
        if spots
    }
)
"""The 37 combinations of an A100, the largest instances of each first."""


@pytest.mark.parametrize("names", COMBINATIONS, ids=" ".join)
def test_every_combination_is_reached_one_by_one(names: Sequence[str]) -> None:
    """Instances that fit together are placed one after the other, the largest first."""
    occupied: frozenset[str] = frozenset()

    for name in names:
        free = [
            spot(0, str(one), PLAIN) for one in PLAIN.free_placements(PLAIN.mask(occupied), name)
        ]
        found = choose_placements(1, [PlacementCandidate(gpu(0), PLAIN, occupied, free)])
        assert found is not None
        occupied |= found[0].footprint


# --- several instances ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "profile", "used", "expected"),
    [
        (2, "2g.10gb", ["", ""], ["0:2g.10gb@0", "0:2g.10gb@2"]),
        (2, "2g.10gb", ["3g.20gb@4 1g.5gb@3", "2g.10gb@4"], ["1:2g.10gb@0", "1:2g.10gb@2"]),
        (3, "3g.20gb", ["", "", "4g.20gb@0"], ["0:3g.20gb@0", "0:3g.20gb@4", "2:3g.20gb@4"]),
        (2, "7g.40gb", ["", "1g.5gb@6", ""], ["0:7g.40gb@0", "2:7g.40gb@0"]),
        (2, "1g.5gb+me", ["", ""], ["0:1g.5gb+me@6", "1:1g.5gb+me@6"]),
        (2, "1g.5gb+me", [""], None),
        (8, "1g.5gb", [""], None),
    ],
)
def test_several_instances_are_of_as_few_gpus_as_will_do(
    size: int, profile: str, used: list[str], expected: list[str] | None
) -> None:
    """Instances of one container are of one GPU if possible, else of as few as possible."""
    candidates = [candidate(index, profile, used=spots) for index, spots in enumerate(used)]

    assert chosen(size, *candidates) == expected


def test_required_shares_come_first() -> None:
    """Required shares are chosen, though an init container of the pod holds them already."""
    first = candidate(0, "1g.5gb", used="4g.20gb@0", free=["1g.5gb@4", "1g.5gb@5", "1g.5gb@6"])
    second = candidate(1, "1g.5gb", used="1g.5gb@0", required="1g.5gb@0")

    assert chosen(1, first, second) == ["1:1g.5gb@0"]
    assert chosen(2, first, second) == ["1:1g.5gb@0", "1:1g.5gb@1"]


@pytest.mark.parametrize(
    ("size", "required"),
    [(1, ["1g.5gb@0", "1g.5gb@0"]), (1, ["1g.5gb@0 1g.5gb@1"]), (8, ["1g.5gb@0"])],
    ids=["two for one", "two of one GPU for one", "more than fit"],
)
def test_required_shares_may_leave_no_choice(size: int, required: list[str]) -> None:
    """With too many required shares, or too few others, nothing is chosen."""
    candidates = [
        candidate(index, "1g.5gb", required=spots) for index, spots in enumerate(required)
    ]

    assert chosen(size, *candidates) is None


def test_required_shares_of_several_gpus_are_all_taken() -> None:
    """Required shares of two GPUs are taken of both, and the rest beside them."""
    candidates = [
        candidate(0, "1g.5gb"),
        candidate(1, "1g.5gb", required="1g.5gb@3"),
        candidate(2, "1g.5gb", required="1g.5gb@6"),
    ]

    assert chosen(3, *candidates) == ["1:1g.5gb@3", "2:1g.5gb@6", "1:1g.5gb@2"]


# --- instances kept warm --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "profile", "warm", "expected"),
    [
        (1, "7g.40gb", ["1g.5gb@6", "7g.40gb@0"], ["1:7g.40gb@0"]),
        (1, "7g.40gb", ["1g.5gb@6", ""], ["1:7g.40gb@0"]),
        (1, "1g.5gb", ["2g.10gb@4", "1g.5gb@5"], ["1:1g.5gb@5"]),
        (1, "1g.5gb", ["", "1g.5gb@0"], ["0:1g.5gb@5"]),
        (1, "1g.5gb", ["1g.5gb@4"], ["0:1g.5gb@4"]),
        (1, "1g.5gb", ["1g.5gb+me@5"], ["0:1g.5gb@4"]),
        (2, "3g.20gb", ["2g.10gb@0", ""], ["1:3g.20gb@0", "1:3g.20gb@4"]),
    ],
)
def test_warm_instances_decide_among_equals(
    size: int, profile: str, warm: list[str], expected: list[str]
) -> None:
    """An idle instance is taken or avoided among equal placements alone."""
    candidates = [candidate(index, profile, warm=spots) for index, spots in enumerate(warm)]

    assert chosen(size, *candidates) == expected


# --- the rule as a whole, against all choices -----------------------------------------------------


@st.composite
def nodes(draw: st.DrawFn) -> tuple[int, list[PlacementCandidate]]:
    """Create one to three GPUs of any models, used in any way, with any shares available."""
    candidates = []
    for index in range(draw(st.integers(1, 3))):
        geometry = GEOMETRIES[draw(st.sampled_from(["A100-40", "A30", "RTX PRO 6000"]))]
        kind = draw(st.sampled_from(geometry.profiles))
        occupied: frozenset[str] = frozenset()
        for one in draw(st.lists(st.sampled_from(geometry.placed_profiles), max_size=4)):
            if one.footprint.isdisjoint(occupied):
                occupied |= one.footprint
        shares = [spot(index, str(one), geometry) for one in kind.placed_profiles]
        some = draw(st.lists(st.sampled_from(shares), unique=True, max_size=4))
        must = draw(st.sampled_from(shares)) if draw(st.integers(0, 4)) == 0 else None
        required = frozenset([must] if must else [])
        candidates.append(
            PlacementCandidate(gpu(index), geometry, occupied, [*some, *required], required)
        )
    return draw(st.integers(1, 4)), candidates


def ranked(those: Sequence[Share], candidates: Sequence[PlacementCandidate]) -> tuple[int, int]:
    """Return the number of GPUs of some shares, and their loss."""
    lost = 0
    for one in candidates:
        mine = [share for share in those if share.gpu == one.gpu.id]
        before = one.geometry.mask({*one.occupied, *(s for r in one.required for s in r.footprint)})
        after = before | one.geometry.mask(s for share in mine for s in share.footprint)
        lost += one.geometry.future_capacity(before) - one.geometry.future_capacity(after)
    return len({share.gpu for share in those}), lost


def possible(size: int, candidates: Sequence[PlacementCandidate]) -> list[tuple[Share, ...]]:
    """Return every legal choice."""
    required = {share for one in candidates for share in one.required}
    taken = {one.gpu.id: one.occupied for one in candidates}
    shares = {
        share
        for one in candidates
        for share in one.free
        if share in required or share.footprint.isdisjoint(taken[share.gpu])
    }
    return [
        those
        for those in combinations(shares, size)
        if required <= set(those) and not any(conflicts(a, b) for a, b in combinations(those, 2))
    ]


@given(nodes())
def test_no_choice_is_better(asked: tuple[int, list[PlacementCandidate]]) -> None:
    """A legal choice is made if one exists, of the fewest GPUs with the least loss."""
    size, candidates = asked
    every = possible(size, candidates)
    found = choose_placements(size, candidates)

    if found is None:
        assert not every
    else:
        assert any(set(found) == set(those) for those in every)
        assert ranked(found, candidates) == min(ranked(those, candidates) for those in every)


@given(nodes(), st.randoms())
def test_the_order_of_the_request_does_not_matter(
    asked: tuple[int, list[PlacementCandidate]], chance: Random
) -> None:
    """The same GPUs and shares in any order give the same choice."""
    size, candidates = asked
    mixed = [
        PlacementCandidate(
            one.gpu,
            one.geometry,
            one.occupied,
            chance.sample(one.free, len(one.free)),
            one.required,
        )
        for one in chance.sample(candidates, len(candidates))
    ]

    assert choose_placements(size, mixed) == choose_placements(size, candidates)


# --- pods that come and go ------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("load", [0.5, 0.7, 0.9, 1.2])
@pytest.mark.parametrize("mix", [arrivals.even, arrivals.inverse])
@pytest.mark.parametrize(
    "geometry", [PLAIN, A100_40, GEOMETRIES["A30"]], ids=["plain", "A100", "A30"]
)
def test_more_pods_are_placed_than_by_simpler_rules(
    geometry: MigGeometry, mix: arrivals.Mix, load: float
) -> None:
    """In a sequence of pods, more are placed than by first fit or lowest start."""
    placed = dict.fromkeys((arrivals.planned, arrivals.first_fit, arrivals.lowest_start), 0)

    for seed in range(4):
        pods = arrivals.trace(geometry, gpus=4, mix=mix(geometry), load=load, count=1000, seed=seed)
        for rule in placed:
            placed[rule] += sum(arrivals.placed(arrivals.node(geometry, 4), pods, rule))

    ours = placed.pop(arrivals.planned)
    assert ours > max(placed.values())


@pytest.mark.long
@pytest.mark.parametrize("load", [0.3, 0.7, 1.2])
@pytest.mark.parametrize("mix", [arrivals.even, arrivals.inverse])
@pytest.mark.parametrize("geometry", [PLAIN, GEOMETRIES["A30"]], ids=["plain", "A30"])
def test_no_rule_places_much_more_on_one_gpu(
    geometry: MigGeometry, mix: arrivals.Mix, load: float
) -> None:
    """On one GPU the memory placed is within a tenth of a percent of the best possible rule's."""
    one = Process(geometry, mix(geometry), load)
    best, ours, first_fit = one.best(), one.by(arrivals.planned), one.by(arrivals.first_fit)

    assert first_fit < ours
    assert ours >= 0.999 * best


@pytest.mark.parametrize(
    ("profiles", "fit", "best", "planner", "first_fit"),
    [
        ("1g.5gb 3g.20gb", 23, 23, 23, 22),
        ("1g.5gb 2g.10gb 3g.20gb", 92, 89, 89, 78),
        ("1g.5gb 2g.10gb 3g.20gb 7g.40gb", 93, 90, 90, 79),
        ("1g.5gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb", 113, 99, 98, 86),
    ],
)
def test_orders_of_arrival_are_placed_in_full(
    profiles: str, fit: int, best: int, planner: int, first_fit: int
) -> None:
    """Of all orders in which instances that fit may come, nearly as many as possible are placed."""
    geometry = only(A100_40, *profiles.split())

    assert possible_orders(geometry) == fit
    assert best_orders(geometry) == best
    assert placed_orders(geometry, arrivals.planned) == planner
    assert placed_orders(geometry, arrivals.first_fit) == first_fit


@pytest.mark.long
@pytest.mark.parametrize("board", boards(), ids=lambda names: names.partition(",")[0])
def test_no_set_of_profiles_is_placed_worse_than_by_first_fit(board: str) -> None:
    """A piece of `python -m bench.mig_placement`, which compares every set of profiles."""
    some = list(profile_sets(boards()[board]))[5::47]

    for geometry in some:
        arrived, stayed = orders(geometry), next(churn(geometry))
        assert arrived.planner >= arrived.first_fit, arrived
        assert stayed.planner >= max(stayed.first_fit - TOLERANCE, 0.99), stayed
