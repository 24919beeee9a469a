"""Layouts that are known beforehand, and what moving one pod would open."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.mig.planner import Misfit, Move, Site, moves, plan_layout
from metagpu.backends.mig.profiles import Board, Spot
from tests.backends.mig.tables import A100_40, BOARDS, only
from tests.build import gpu

PLAIN: Final = only(A100_40, "1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")


def spots(names: str, board: Board = A100_40) -> tuple[Spot, ...]:
    """Find spots by their names, such as `2g.10gb@4 1g.5gb@6`."""
    known = {str(spot): spot for spot in board.spots}
    return tuple(known[name] for name in names.split())


def slots(names: str) -> frozenset[str]:
    """Say what some spots of an A100 occupy."""
    return frozenset(slot for spot in spots(names) for slot in spot.footprint)


def planned(
    wanted: dict[str, int], used: str = "", keep: str = "", board: Board = A100_40
) -> list[str] | str:
    """Plan a layout; name the spots, or the reason why it cannot be."""
    found = plan_layout(board, wanted, slots(used), spots(keep))
    return found.reason if isinstance(found, Misfit) else [str(spot) for spot in found]


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
        ({"1g.5gb": 1}, ["1g.5gb@6"]),
        ({"1g.5gb": 0}, []),
        ({}, []),
    ],
)
def test_a_layout_gets_exact_placements(wanted: dict[str, int], expected: list[str] | None) -> None:
    """A layout is placed as it must be, and where it leaves a choice, so that most stays free."""
    found = planned(wanted)

    if expected is None:
        names = Counter(str(spot).partition("@")[0] for spot in found)
        assert names == Counter(wanted)
        assert "3g.20gb@4" in found
    else:
        assert found == expected


@pytest.mark.parametrize("board", [PLAIN, BOARDS["A30"]], ids=["A100", "A30"])
def test_exactly_the_possible_layouts_are_planned(board: Board) -> None:
    """Of all counts of all profiles, exactly those are planned that a GPU can be cut into."""
    reachable = {
        frozenset(Counter(spot.profile.name for spot in those).items())
        for those in board.arrangements()
    }

    by_size = sorted(board.profiles, key=lambda p: (-p.memory_slices, -p.compute_slices))
    order = [profile.name for profile in by_size]

    for counts in product(*[range(profile.max_count + 2) for profile in board.profiles]):
        wanted = {p.name: n for p, n in zip(board.profiles, counts, strict=True)}
        found = plan_layout(board, wanted)
        asked = frozenset((kind, count) for kind, count in wanted.items() if count)
        assert isinstance(found, tuple) == (asked in reachable)
        if isinstance(found, tuple):
            assert frozenset(Counter(spot.profile.name for spot in found).items()) == asked
            assert sound([[spot.footprint for spot in found]])
        else:
            upto = {name: wanted[name] for name in order[: order.index(found.profile)]}
            assert isinstance(plan_layout(board, {**upto, found.profile: found.fits}), tuple)
            assert isinstance(plan_layout(board, {**upto, found.profile: found.fits + 1}), Misfit)


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
        ({"7g.40gb": 1}, "1g.5gb@6", "1 x 7g.40gb wanted, room for 0 beside what is in use"),
        (
            {"1g.5gb": 5, "3g.20gb": 1},
            "",
            "5 x 1g.5gb wanted, room for 4 beside 1 x 3g.20gb",
        ),
        (
            {"1g.5gb": 2, "3g.20gb": 1, "2g.10gb": 2},
            "",
            "2 x 1g.5gb wanted, room for 0 beside 1 x 3g.20gb and 2 x 2g.10gb",
        ),
        (
            {"1g.5gb": 3, "3g.20gb": 1},
            "2g.10gb@0",
            "3 x 1g.5gb wanted, room for 2 beside 1 x 3g.20gb and what is in use",
        ),
    ],
)
def test_a_layout_that_cannot_be_says_why(wanted: dict[str, int], used: str, reason: str) -> None:
    """The reason names the first profile that is too many, the largest first, and what fits."""
    assert planned(wanted, used) == reason


def test_a_gpu_without_profiles_says_so() -> None:
    """Where the configuration allows no profile, the reason does not end in the air."""
    assert planned({"1g.5gb": 1}, board=only(A100_40)) == (
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
def test_what_is_there_is_kept_where_it_can_be(
    wanted: dict[str, int], used: str, keep: str, expected: list[str]
) -> None:
    """What is in use is never overlapped; of idle instances as many as possible stay."""
    assert planned(wanted, used, keep) == expected


# --- moves ----------------------------------------------------------------------------------------


def site(index: int, held: str = "", others: str = "", board: Board = A100_40) -> Site:
    """Make a GPU on which pods hold some spots, and others are taken for good."""
    return Site(gpu(index), board, spots(held, board), slots(others))


def told(found: Iterable[Move]) -> list[str]:
    """Write moves down: `0:1g.5gb@0 to 1:1g.5gb@6 opens 3g.20gb@0`."""
    return [
        f"{move.gpu.index}:{move.spot} to {move.target.index}:{move.onto} opens {move.opens}"
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
def test_a_move_that_makes_room_is_found(
    profile: str, sites: list[Site], expected: list[str]
) -> None:
    """If one instance elsewhere makes room for a profile, it is said which, and where to."""
    assert told(moves(profile, sites)) == expected


def test_what_is_held_may_be_of_a_profile_no_more_on_offer() -> None:
    """An instance of a profile that the configuration dropped is in the way, and is not moved."""
    held = spots("1g.5gb@4")
    here = Site(gpu(0), only(A100_40, "7g.40gb"), held)

    assert moves("7g.40gb", [here]) == []


@st.composite
def nodes(draw: st.DrawFn) -> list[Site]:
    """Make one to three A100 with any instances on them, some of which cannot be moved."""
    found = []
    for index in range(draw(st.integers(1, 3))):
        held: list[Spot] = []
        taken = 0
        for spot in draw(st.lists(st.sampled_from(PLAIN.spots), max_size=5)):
            if not PLAIN.masks[spot] & taken:
                taken |= PLAIN.masks[spot]
                held.append(spot)
        fixed = draw(st.integers(0, 1))
        others = frozenset(slot for spot in held[:fixed] for slot in spot.footprint)
        found.append(Site(gpu(index), PLAIN, tuple(held[fixed:]), others))
    return found


def after(move: Move, sites: Sequence[Site]) -> list[list[frozenset[str]]]:
    """Say what is on each GPU once a move is made and the wanted instance is there."""
    result = []
    for one in sites:
        on = [spot.footprint for spot in one.held if (one.gpu, spot) != (move.gpu, move.spot)]
        on += [one.others] if one.others else []
        on += [move.onto.footprint] if one.gpu == move.target else []
        on += [move.opens.footprint] if one.gpu == move.gpu else []
        result.append(on)
    return result


@given(nodes(), st.sampled_from([profile.name for profile in PLAIN.profiles]))
def test_moves_are_all_that_help(sites: list[Site], profile: str) -> None:
    """A move leaves nothing overlapping, and whatever single instance could make room is named."""
    found = moves(profile, sites)
    every = {
        (one.gpu.index, spot)
        for one in sites
        for spot in one.held
        for target in sites
        for onto in spot.profile.spots
        for opens in PLAIN.spots
        if opens.profile.name == profile
        and sound(after(Move(one.gpu, spot, target.gpu, onto, opens), sites))
    }

    if any(one.board.free(one.occupied, profile) for one in sites):
        assert found == []
    else:
        assert {(move.gpu.index, move.spot) for move in found} == every
        assert all(sound(after(move, sites)) for move in found)
        assert len(found) == len(every)


def sound(gpus: Iterable[Sequence[frozenset[str]]]) -> bool:
    """Tell whether nothing overlaps on any GPU."""
    return all(len(frozenset().union(*on)) == sum(map(len, on)) for on in gpus)
