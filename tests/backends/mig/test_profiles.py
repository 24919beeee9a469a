"""What a GPU can be cut into: footprints alone reproduce what NVIDIA says is possible."""

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product
from typing import Final, TypeAlias

import pytest

from metagpu.backends.mig.profiles import Board, Spot, disjoint
from metagpu.core.sharing import conflicts
from tests.backends.mig.tables import A100_40, BOARDS, only, profile
from tests.build import gpu, share

Combination: TypeAlias = frozenset[tuple[str, int]]
"""How many instances of each profile, those with none left out."""

PLAIN: Final = ("1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")
EVERY: Final = pytest.mark.parametrize("name", BOARDS)

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
"""What an A100 can be cut into so that no more fits: NVIDIA's MIG user guide draws them."""


def counted(spots: Iterable[Spot]) -> Combination:
    """Count the profiles of some spots."""
    return frozenset(Counter(spot.profile.name for spot in spots).items())


def combinations_of(board: Board) -> set[Combination]:
    """Find what a GPU can be cut into, the uncut GPU left out."""
    return {counted(spots) for spots in board.arrangements() if spots}


def maximal(found: set[Combination]) -> set[Combination]:
    """Keep the combinations to which nothing can be added."""

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
        ("H100-80", tuple(p.name for p in BOARDS["H100-80"].profiles), 127, 44),
        ("H200", ("1g.18gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"), 37, 12),
        ("B200", ("1g.23gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb"), 37, 12),
    ],
)
def test_all_combinations_are_reproduced(
    name: str, profiles: tuple[str, ...], all_of_them: int, largest: int
) -> None:
    """Sets of spots without a slot in common are as many as NVIDIA's boards have combinations."""
    found = combinations_of(only(BOARDS[name], *profiles))

    assert len(found) == all_of_them
    assert len(maximal(found)) == largest


def test_the_combinations_of_an_a100_are_nvidias() -> None:
    """The twelve ways to cut all of an A100 are those of NVIDIA's guide, by name."""
    full = {name.split(".")[0]: name for name in PLAIN}
    expected = {
        frozenset((full[kind], count) for kind, count in counts.items()) for counts in LARGEST
    }

    assert maximal(combinations_of(only(A100_40, *PLAIN))) == expected


@EVERY
def test_slots_are_enough(name: str) -> None:
    """On no board have instances without a slot in common too few compute slices, or too many."""
    assert BOARDS[name].overcommitted() is None


@EVERY
def test_as_many_fit_as_nvml_says(name: str) -> None:
    """Of each profile alone, an empty GPU has room for exactly the count that NVML tells."""
    board = BOARDS[name]

    assert board.room(0) == {profile.name: profile.max_count for profile in board.profiles}


@pytest.mark.parametrize("compute", [1, 2])
def test_a_board_whose_slots_say_too_little_is_found(compute: int) -> None:
    """Where disjoint spots need more compute slices, or instances, than there are, one is named."""
    short = Board((profile("1g.1gb", range(3), 1, 3),), compute_slices=compute)
    few = Board((profile("1g.1gb", range(3), 1, 2),), compute_slices=7)

    assert [str(spot) for spot in short.overcommitted() or ()][: compute + 1] == [
        f"1g.1gb@{start}" for start in range(compute + 1)
    ]
    assert len(few.overcommitted() or ()) == 3


@EVERY
def test_the_one_rule_of_sharing_is_all_the_planner_uses(name: str) -> None:
    """Two spots overlap as bits exactly when shares with their footprints conflict."""
    board, of = BOARDS[name], gpu(0)

    for (number, one), (other_number, other) in combinations(enumerate(board.spots), 2):
        shares = [
            share(of, at, backend="mig", slots=spot.footprint)
            for at, spot in ((number, one), (other_number, other))
        ]
        assert bool(board.masks[one] & board.masks[other]) == conflicts(*shares)


def test_a_footprint_is_memory_slices_and_engines() -> None:
    """`1g.5gb+me` at 6 takes memory slice 6 and the media engines, and nothing else."""
    spots = {str(spot): spot.footprint for spot in A100_40.spots}

    assert spots["1g.5gb+me@6"] == {"s6", "s+me"}
    assert spots["2g.10gb@4"] == {"s4", "s5"}
    assert spots["7g.40gb@0"] == {f"s{number}" for number in range(8)}


def test_order_matters() -> None:
    """Beside a 3g at 0 and a 2g at 4 one 1g fits; beside a 3g at 4 and a 2g at 0, two."""
    room = {
        start: A100_40.room(
            A100_40.mask(
                slot
                for spot in A100_40.spots
                if str(spot) in (f"3g.20gb@{start}", f"2g.10gb@{4 - start}")
                for slot in spot.footprint
            )
        )
        for start in (0, 4)
    }

    assert (room[0]["1g.5gb"], room[4]["1g.5gb"]) == (1, 2)


def test_profiles_with_one_engine_exclude_each_other() -> None:
    """An A30 has one `+me` instance, of one size or the other, and beside it any without."""
    found = combinations_of(BOARDS["A30"])

    assert frozenset({("1g.6gb+me", 1), ("2g.12gb", 1), ("1g.6gb", 1)}) in found
    assert not [one for one in found if {"1g.6gb+me", "2g.12gb+me"} <= {name for name, _ in one}]


def test_who_takes_all_engines_leaves_none_to_others() -> None:
    """Beside `+me.all` there can be instances without media engines, and no others."""
    beside = {
        name
        for one in combinations_of(BOARDS["RTX PRO 6000"])
        if "1g.24gb+me.all" in dict(one)
        for name, _ in one
    }

    assert beside == {"1g.24gb+me.all", "1g.24gb-me", "2g.48gb-me"}


def test_a_profile_there_can_be_one_of_excludes_itself() -> None:
    """A profile of which NVML allows one instance is offered once, whatever the reason."""
    board = Board((profile("1g.1gb+new", range(4), 1, 1), profile("1g.1gb", range(4), 1, 4)), 4)

    assert board.overcommitted() is None
    assert board.room(0) == {"1g.1gb+new": 1, "1g.1gb": 4}


def test_slots_of_others_are_in_nobodys_way() -> None:
    """A slot that no profile of the board uses hinders none of them; memory slices do."""
    board = only(A100_40, "2g.10gb")

    assert board.mask({"s+me", "whole"}) == 0
    assert [str(spot) for spot in board.free(board.mask({"s+me", "s3"}))] == [
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
    """Of a GPU in use it can be said what is the most that one pod could still get."""
    occupied = A100_40.mask(slots.split())
    found = A100_40.largest(occupied)

    assert (found and found.name) == largest
    assert A100_40.free_slices(occupied) == slices


@EVERY
def test_room_is_what_the_arrangements_say(name: str) -> None:
    """For all that can be occupied, the room for a profile is the most that can be added of it."""
    board = BOARDS[name]
    states = {
        board.mask(s for spot in spots for s in spot.footprint) for spots in board.arrangements()
    }
    alone = {p.name: list(only(board, p.name).arrangements()) for p in board.profiles}

    for occupied in states:
        room = board.room(occupied)
        for kind, ways in alone.items():
            fitting = (w for w in ways if not any(board.masks[s] & occupied for s in w))
            assert room[kind] == max(map(len, fitting))


@EVERY
def test_nothing_is_won_by_occupying_more(name: str) -> None:
    """What is left is worth the less, the more is occupied, and nothing when nothing fits."""
    board = BOARDS[name]
    full = board.mask(slot for spot in board.spots for slot in spot.footprint)

    for occupied in range(0, full + 1, 3):
        for mask in set(board.masks.values()):
            assert board.worth(occupied | mask) <= board.worth(occupied)
    assert board.worth(full) == 0


def test_disjoint_gives_every_way_once() -> None:
    """Ways to take some masks are all those that overlap nowhere, each in the masks' order."""
    masks = (0b0011, 0b0110, 0b1100, 0b0001, 0b11000)

    for count, occupied in product(range(5), (0, 0b1, 0b1000)):
        expected = [
            places
            for places in combinations(range(len(masks)), count)
            if not any(masks[place] & occupied for place in places)
            and not any(masks[a] & masks[b] for a, b in combinations(places, 2))
        ]
        assert list(disjoint(masks, count, occupied)) == expected
