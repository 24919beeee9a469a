"""Where an instance goes, compared with all that could be chosen, and with simpler rules."""

from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bench import arrivals
from bench.optimum import Process
from metagpu.backends.mig.placement import Seat, choose
from metagpu.backends.mig.profiles import Board
from metagpu.core.model import Share, ShareId
from metagpu.core.sharing import conflicts
from tests.backends.mig.tables import A100_40, BOARDS, only
from tests.build import gpu, share

PLAIN: Final = only(A100_40, "1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")


def spot(index: int, name: str, board: Board = A100_40) -> Share:
    """Make the share of a spot, such as `2g.10gb@4`, of the GPU with this index."""
    places = {str(one): one for one in board.spots}
    number = [one for one in board.spots if one.profile == places[name].profile].index(places[name])
    made = share(gpu(index), number, backend="mig", slots=places[name].footprint)

    return replace(made, id=ShareId(f"{made.gpu}::{name}"))


def seat(
    index: int,
    profile: str,
    *,
    used: str = "",
    required: str = "",
    warm: str = "",
    board: Board = A100_40,
    free: Sequence[str] | None = None,
) -> Seat:
    """Make a GPU on which some spots are used, and of which one profile is asked for.

    What is free is all that does not overlap, unless it is named.
    """
    taken = [spot(index, name, board) for name in used.split()]
    slots = frozenset(slot for one in taken for slot in one.footprint)
    names = [str(one) for one in board.free(board.mask(slots), profile)] if free is None else free
    must = frozenset(spot(index, name, board) for name in required.split())
    idle = frozenset(spot(index, name, board) for name in warm.split())

    return Seat(gpu(index), board, slots, [spot(index, name, board) for name in names], must, idle)


def chosen(size: int, *seats: Seat) -> list[str] | None:
    """Choose; name what was chosen as `index:spot`."""
    found = choose(size, seats)
    if found is None:
        return None
    return [f"{int(one.gpu[-12:], 16)}:{one.id.partition('::')[2]}" for one in found]


# --- one instance ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "used", "expected"),
    [
        ("1g.5gb", "", "1g.5gb@6"),
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
def test_the_spot_that_costs_least_is_taken(profile: str, used: str, expected: str) -> None:
    """An instance goes where the largest profiles still fit: small ones to the far end."""
    assert chosen(1, seat(0, profile, used=used)) == [f"0:{expected}"]


@pytest.mark.parametrize(
    ("profile", "used", "expected"),
    [
        ("1g.5gb", ["", "1g.5gb@6"], "1:1g.5gb@5"),
        ("1g.5gb", ["", "7g.40gb@0", "4g.20gb@0"], "2:1g.5gb@6"),
        ("2g.10gb", ["", "3g.20gb@4 1g.5gb@3"], "1:2g.10gb@0"),
        ("3g.20gb", ["", "3g.20gb@4", "4g.20gb@0"], "2:3g.20gb@4"),
        ("1g.5gb", ["", ""], "0:1g.5gb@6"),
        ("1g.10gb", ["1g.5gb@6", "3g.20gb@0 1g.5gb@4 1g.5gb@5"], "1:1g.10gb@6"),
    ],
)
def test_the_gpu_that_loses_least_is_taken(profile: str, used: list[str], expected: str) -> None:
    """An idle GPU stays whole while there is room on one in use; equal GPUs go by index."""
    seats = [seat(index, profile, used=spots) for index, spots in enumerate(used)]

    assert chosen(1, *seats) == [expected]


def test_only_profiles_on_offer_have_a_worth() -> None:
    """Where large profiles are not allowed, no GPU is kept whole for them."""
    small = only(A100_40, "1g.5gb", "2g.10gb")

    assert chosen(1, seat(0, "1g.5gb")) == ["0:1g.5gb@6"]
    assert chosen(1, seat(0, "2g.10gb", used="1g.5gb@5 1g.5gb@6", board=small)) == ["0:2g.10gb@2"]


COMBINATIONS: Final = sorted(
    {
        tuple(sorted((one.profile.name for one in spots), reverse=True))
        for spots in PLAIN.arrangements()
        if spots
    }
)
"""The 37 ways to cut an A100, the largest instances of each first."""


@pytest.mark.parametrize("names", COMBINATIONS, ids=" ".join)
def test_every_combination_is_reached_one_by_one(names: Sequence[str]) -> None:
    """Instances that can be together find their places one after the other, the largest first."""
    occupied: frozenset[str] = frozenset()

    for name in names:
        free = [spot(0, str(one), PLAIN) for one in PLAIN.free(PLAIN.mask(occupied), name)]
        found = choose(1, [Seat(gpu(0), PLAIN, occupied, free)])
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
    """Instances of one container are of one GPU if one has room, else of as few as possible."""
    seats = [seat(index, profile, used=spots) for index, spots in enumerate(used)]

    assert chosen(size, *seats) == expected


def test_what_must_be_taken_comes_first() -> None:
    """Required shares are chosen, though an init container of the pod holds them already."""
    first = seat(0, "1g.5gb", used="4g.20gb@0", free=["1g.5gb@4", "1g.5gb@5", "1g.5gb@6"])
    second = seat(1, "1g.5gb", used="1g.5gb@0", required="1g.5gb@0")

    assert chosen(1, first, second) == ["1:1g.5gb@0"]
    assert chosen(2, first, second) == ["1:1g.5gb@0", "1:1g.5gb@1"]


@pytest.mark.parametrize(
    ("size", "required"),
    [(1, ["1g.5gb@0", "1g.5gb@0"]), (1, ["1g.5gb@0 1g.5gb@1"]), (8, ["1g.5gb@0"])],
    ids=["two for one", "two of one GPU for one", "more than fit"],
)
def test_what_must_be_taken_may_leave_no_way(size: int, required: list[str]) -> None:
    """Where the required shares are too many, or the others too few, nothing is chosen."""
    seats = [seat(index, "1g.5gb", required=spots) for index, spots in enumerate(required)]

    assert chosen(size, *seats) is None


def test_required_shares_of_several_gpus_are_all_taken() -> None:
    """What must be taken of two GPUs is taken of both, and the rest beside it."""
    seats = [
        seat(0, "1g.5gb"),
        seat(1, "1g.5gb", required="1g.5gb@3"),
        seat(2, "1g.5gb", required="1g.5gb@6"),
    ]

    assert chosen(3, *seats) == ["1:1g.5gb@3", "2:1g.5gb@6", "1:1g.5gb@2"]


# --- instances kept warm --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "profile", "warm", "expected"),
    [
        (1, "7g.40gb", ["1g.5gb@6", "7g.40gb@0"], ["1:7g.40gb@0"]),
        (1, "7g.40gb", ["1g.5gb@6", ""], ["1:7g.40gb@0"]),
        (1, "1g.5gb", ["2g.10gb@4", "1g.5gb@6"], ["1:1g.5gb@6"]),
        (1, "1g.5gb", ["", "1g.5gb@0"], ["0:1g.5gb@6"]),
        (2, "3g.20gb", ["2g.10gb@0", ""], ["1:3g.20gb@0", "1:3g.20gb@4"]),
    ],
)
def test_warm_instances_decide_among_equals(
    size: int, profile: str, warm: list[str], expected: list[str]
) -> None:
    """An idle instance is taken, or left alone, where that costs no room; never at that cost."""
    seats = [seat(index, profile, warm=spots) for index, spots in enumerate(warm)]

    assert chosen(size, *seats) == expected


# --- the rule as a whole, against all choices -----------------------------------------------------


@st.composite
def nodes(draw: st.DrawFn) -> tuple[int, list[Seat]]:
    """Make one to three GPUs of any boards, used in any way, of which any spots are available."""
    seats = []
    for index in range(draw(st.integers(1, 3))):
        board = BOARDS[draw(st.sampled_from(["A100-40", "A30", "RTX PRO 6000"]))]
        kind = draw(st.sampled_from(board.profiles))
        occupied: frozenset[str] = frozenset()
        for one in draw(st.lists(st.sampled_from(board.spots), max_size=4)):
            if one.footprint.isdisjoint(occupied):
                occupied |= one.footprint
        shares = [spot(index, str(one), board) for one in kind.spots]
        some = draw(st.lists(st.sampled_from(shares), unique=True, max_size=4))
        must = draw(st.sampled_from(shares)) if draw(st.integers(0, 4)) == 0 else None
        required = frozenset([must] if must else [])
        seats.append(Seat(gpu(index), board, occupied, [*some, *required], required))
    return draw(st.integers(1, 4)), seats


def ranked(those: Sequence[Share], seats: Sequence[Seat]) -> tuple[int, int]:
    """Say of how many GPUs some shares are, and what is lost with them."""
    lost = 0
    for one in seats:
        mine = [share for share in those if share.gpu == one.gpu.id]
        before = one.board.mask({*one.occupied, *(s for r in one.required for s in r.footprint)})
        after = before | one.board.mask(s for share in mine for s in share.footprint)
        lost += one.board.worth(before) - one.board.worth(after)
    return len({share.gpu for share in those}), lost


def possible(size: int, seats: Sequence[Seat]) -> list[tuple[Share, ...]]:
    """Find every legal choice."""
    required = {share for one in seats for share in one.required}
    taken = {one.gpu.id: one.occupied for one in seats}
    shares = {
        share
        for one in seats
        for share in one.free
        if share in required or share.footprint.isdisjoint(taken[share.gpu])
    }
    return [
        those
        for those in combinations(shares, size)
        if required <= set(those) and not any(conflicts(a, b) for a, b in combinations(those, 2))
    ]


@given(nodes())
def test_no_choice_is_better(asked: tuple[int, list[Seat]]) -> None:
    """If there is a legal choice, one is made: legal, of the fewest GPUs, with the least loss."""
    size, seats = asked
    every = possible(size, seats)
    found = choose(size, seats)

    if found is None:
        assert not every
    else:
        assert any(set(found) == set(those) for those in every)
        assert ranked(found, seats) == min(ranked(those, seats) for those in every)


@given(nodes(), st.randoms())
def test_the_order_of_the_question_does_not_matter(
    asked: tuple[int, list[Seat]], chance: Random
) -> None:
    """The same GPUs and shares in any order give the same choice."""
    size, seats = asked
    mixed = [
        Seat(one.gpu, one.board, one.occupied, chance.sample(one.free, len(one.free)), one.required)
        for one in chance.sample(seats, len(seats))
    ]

    assert choose(size, mixed) == choose(size, seats)


# --- pods that come and go ------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.5, 0.7, 0.9, 1.2])
@pytest.mark.parametrize("mix", [arrivals.even, arrivals.inverse])
@pytest.mark.parametrize("board", [PLAIN, A100_40, BOARDS["A30"]], ids=["plain", "A100", "A30"])
def test_more_pods_find_room_than_by_simpler_rules(
    board: Board, mix: arrivals.Mix, load: float
) -> None:
    """Over pods that come and go, strictly more are placed than by first fit or lowest start."""
    placed = dict.fromkeys((arrivals.planned, arrivals.first_fit, arrivals.lowest_start), 0)

    for seed in range(4):
        pods = arrivals.trace(board, gpus=4, mix=mix(board), load=load, count=1000, seed=seed)
        for rule in placed:
            placed[rule] += sum(arrivals.placed(arrivals.node(board, 4), pods, rule))

    ours = placed.pop(arrivals.planned)
    assert ours > max(placed.values())


@pytest.mark.parametrize("load", [0.3, 0.7, 1.2])
@pytest.mark.parametrize("mix", [arrivals.even, arrivals.inverse])
@pytest.mark.parametrize("board", [PLAIN, BOARDS["A30"]], ids=["plain", "A30"])
def test_no_rule_places_much_more_on_one_gpu(board: Board, mix: arrivals.Mix, load: float) -> None:
    """On one GPU the memory placed is within a tenth of a percent of the best possible rule's."""
    one = Process(board, mix(board), load)
    best, ours, first_fit = one.best(), one.by(arrivals.planned), one.by(arrivals.first_fit)

    assert first_fit < ours <= best + 0.0001
    assert ours >= 0.999 * best
