"""Where a fraction goes: what fits on one GPU lands on one, more takes whole GPUs and one part."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.placement import Placement, Seat, gather, place, splits
from metagpu.core.model import Share
from tests.build import gpu, share

BINPACK, SPREAD = Placement.BINPACK, Placement.SPREAD
EITHER = pytest.mark.parametrize("placement", Placement)


def seat(
    index: int,
    free: int | Sequence[int],
    *,
    whole: int = 10,
    required: Sequence[int] = (),
    numa: int | None = None,
) -> Seat:
    """Make a GPU of which some shares are free: so many of the highest, or these numbers."""
    of = gpu(index, numa_node=numa)
    numbers = range(whole - free, whole) if isinstance(free, int) else free
    shares = {number: share(of, number) for number in numbers}

    return Seat(of, whole, list(shares.values()), frozenset(shares[number] for number in required))


def counted(chosen: Sequence[Share] | None) -> dict[int, int] | None:
    """Count the chosen shares by the index of their GPU."""
    if chosen is None:
        return None
    return dict(sorted(Counter(int(one.gpu[-12:], 16) for one in chosen).items()))


def placed(
    size: int, *seats: Seat, placement: Placement = BINPACK, largest: int = 10
) -> dict[int, int] | None:
    """Place a request; count the shares by GPU."""
    return counted(place(size, seats, placement, largest))


# --- on one GPU -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "frees", "size", "expected"),
    [
        (BINPACK, [10, 4, 7], 4, 1),
        (BINPACK, [10, 4, 7], 5, 2),
        (BINPACK, [10, 4, 7], 8, 0),
        (BINPACK, [10, 10, 10], 5, 0),
        (BINPACK, [9, 5, 5], 5, 1),
        (SPREAD, [4, 10, 7], 4, 1),
        (SPREAD, [4, 9, 9], 4, 1),
        (SPREAD, [4, 5, 6], 6, 2),
        (SPREAD, [10, 10], 10, 0),
    ],
)
def test_one_gpu_is_chosen_by_how_full_it_is(
    placement: Placement, frees: list[int], size: int, expected: int
) -> None:
    """Binpack takes the fullest GPU with room, spread the emptiest; equals go by index."""
    seats = [seat(index, free) for index, free in enumerate(frees)]

    assert placed(size, *seats, placement=placement) == {expected: size}


@EITHER
@pytest.mark.parametrize("size", range(1, 11))
def test_what_fits_on_one_gpu_lands_on_one(size: int, placement: Placement) -> None:
    """Any request up to a whole GPU gets shares of one GPU alone."""
    chosen = placed(size, seat(0, 3), seat(1, 10), seat(2, 6), placement=placement)

    assert chosen is not None
    assert list(chosen.values()) == [size]


@EITHER
def test_no_room_on_one_gpu_is_no_place(placement: Placement) -> None:
    """A request that would fit on one GPU is never spread, however much is free elsewhere."""
    assert placed(5, seat(0, 4), seat(1, 4), seat(2, 4), placement=placement) is None
    assert placed(1, placement=placement) is None


def test_the_largest_gpu_decides_what_one_gpu_is() -> None:
    """A fraction of the largest GPU is no reason to take several small ones whole."""
    small = [seat(index, 4, whole=4) for index in range(3)]

    assert placed(8, *small, largest=10) is None
    assert placed(8, *small, largest=4) == {0: 4, 1: 4}


@EITHER
def test_the_lowest_numbers_are_taken(placement: Placement) -> None:
    """Of one GPU, shares go by their number, so that the same ones are free for the next."""
    chosen = place(3, [seat(0, [9, 2, 5, 3])], placement, 10)

    assert chosen is not None
    assert [one.number for one in chosen] == [2, 3, 5]


@EITHER
def test_shares_are_ranked_once(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many shares are asked for, those of each GPU are put in order once at most."""
    ranked: list[int] = []
    take = Seat.take

    def counting(self: Seat, count: int) -> list[Share]:
        ranked.append(self.gpu.index)
        return take(self, count)

    monkeypatch.setattr(Seat, "take", counting)
    seats = [seat(index, 100, whole=100) for index in range(8)]

    for size, gpus in ((1, 1), (100, 1), (450, 5), (800, 8)):
        ranked.clear()
        chosen = place(size, seats, placement, 100)
        assert chosen is not None
        assert len(chosen) == size
        assert len(set(ranked)) == len(ranked) == gpus


# --- on several GPUs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "frees", "size", "expected"),
    [
        (BINPACK, [10, 10, 10], 20, {0: 10, 1: 10}),
        (BINPACK, [10, 10, 6, 3], 13, {0: 10, 3: 3}),
        (BINPACK, [10, 10, 6, 3], 15, {0: 10, 2: 5}),
        (BINPACK, [10, 10, 6, 3], 18, {0: 8, 1: 10}),
        (BINPACK, [10, 6], 16, {0: 10, 1: 6}),
        (BINPACK, [10, 6], 17, None),
        (BINPACK, [9, 9, 9], 11, None),
        (BINPACK, [10, 10, 10], 30, {0: 10, 1: 10, 2: 10}),
        (BINPACK, [10, 10, 10], 31, None),
        (SPREAD, [6, 10, 3, 10], 13, {1: 3, 3: 10}),
        (SPREAD, [6, 10], 13, {0: 3, 1: 10}),
        (SPREAD, [10, 10, 6], 20, {0: 10, 1: 10}),
    ],
)
def test_larger_requests_take_whole_gpus_and_one_part(
    placement: Placement, frees: list[int], size: int, expected: dict[int, int] | None
) -> None:
    """Whole GPUs first; the remainder goes to one GPU, the fullest or the emptiest with room."""
    seats = [seat(index, free) for index, free in enumerate(frees)]

    assert placed(size, *seats, placement=placement) == expected


@pytest.mark.parametrize(
    ("wholes", "frees", "size", "expected"),
    [
        ([4, 4, 10], [4, 4, 0], 12, None),
        ([4, 4, 10], [4, 4, 10], 14, {0: 4, 2: 10}),
        ([4, 4, 10], [4, 4, 10], 18, {0: 4, 1: 4, 2: 10}),
        ([4, 4, 10], [4, 4, 9], 17, {0: 4, 1: 4, 2: 9}),
        ([6, 6, 10, 10], [6, 6, 2, 10], 14, {0: 4, 3: 10}),
        ([5, 5, 5, 13], [5, 5, 5, 13], 15, {0: 2, 3: 13}),
    ],
)
def test_gpus_of_different_sizes(
    wholes: list[int], frees: list[int], size: int, expected: dict[int, int] | None
) -> None:
    """Every GPU counts as whole by its own number of shares, and as few as will do are taken."""
    seats = [
        seat(index, free, whole=whole)
        for index, (whole, free) in enumerate(zip(wholes, frees, strict=True))
    ]

    assert placed(size, *seats, largest=max(wholes)) == expected


def test_sizes_are_combined_when_largest_first_leads_nowhere() -> None:
    """A required part that is small may need two small GPUs where the largest would not do."""
    seats = [
        seat(0, 2, required=[8]),
        seat(1, 6, whole=6),
        seat(2, 6, whole=6),
        seat(3, 10),
    ]

    assert placed(13, *seats) == {0: 1, 1: 6, 2: 6}


# --- NUMA -----------------------------------------------------------------------------------------


@EITHER
def test_several_gpus_are_of_one_numa_node_if_one_has_room(placement: Placement) -> None:
    """A request over several GPUs stays on one NUMA node, though others come first by index."""
    seats = [
        seat(0, 10, numa=0),
        seat(1, 9, numa=0),
        seat(2, 10, numa=1),
        seat(3, 10, numa=1),
    ]

    assert placed(20, *seats, placement=placement) == {2: 10, 3: 10}


@EITHER
def test_without_room_on_one_numa_node_any_will_do(placement: Placement) -> None:
    """A request that no NUMA node can hold is placed over all of them."""
    seats = [seat(0, 10, numa=0), seat(1, 10, numa=1), seat(2, 10)]

    assert placed(30, *seats, placement=placement) == {0: 10, 1: 10, 2: 10}


def test_required_shares_choose_the_numa_node() -> None:
    """What must be taken says where the rest goes."""
    seats = [
        seat(0, 10, numa=0),
        seat(1, 10, numa=0),
        seat(2, 10, numa=1),
        seat(3, 10, numa=1, required=[4]),
    ]

    assert placed(20, *seats) == {2: 10, 3: 10}


# --- required shares ------------------------------------------------------------------------------


@EITHER
@pytest.mark.parametrize("size", [2, 5])
def test_required_shares_choose_the_gpu(size: int, placement: Placement) -> None:
    """What must be taken is taken first, and the rest beside it."""
    seats = [seat(0, 10), seat(1, 8, required=[9, 7]), seat(2, 3)]
    chosen = place(size, seats, placement, 10)

    assert chosen is not None
    assert [one.number for one in chosen] == [7, 9, 2, 3, 4][:size]
    assert counted(chosen) == {1: size}


@pytest.mark.parametrize(
    ("seats", "size"),
    [
        ([seat(0, 10, required=[0]), seat(1, 10, required=[0])], 5),
        ([seat(0, 3, required=[9]), seat(1, 10)], 4),
        ([seat(0, 3, required=[9]), seat(1, 3, required=[9]), seat(2, 10)], 12),
        ([seat(0, 3, required=[8, 9])], 1),
    ],
    ids=["on two GPUs", "where there is no room", "two parts", "more than asked for"],
)
def test_required_shares_that_break_the_rule_have_no_place(seats: list[Seat], size: int) -> None:
    """What must be taken may make the rule impossible; then there is no place."""
    assert placed(size, *seats) is None


def test_required_shares_may_be_a_whole_gpus_or_the_parts() -> None:
    """A GPU with much that must be taken is taken whole, whatever its index."""
    seats = [seat(0, 10, required=[0, 1]), seat(1, 10, required=range(9))]

    assert placed(12, *seats) == {0: 2, 1: 10}


# --- the rule as a whole, against brute force -----------------------------------------------------


@st.composite
def nodes(draw: st.DrawFn, *, with_required: bool = True) -> list[Seat]:
    """Make up to four small GPUs, of any sizes, with any shares free and any of those required."""
    seats = []
    for index in range(draw(st.integers(1, 4))):
        whole = draw(st.integers(1, 5))
        free = draw(st.lists(st.integers(0, whole - 1), unique=True))
        some = st.lists(st.sampled_from(free), unique=True, max_size=2) if free else st.just([])
        required = draw(some) if with_required and draw(st.booleans()) else []
        numa = draw(st.sampled_from([None, 0, 1]))
        if free:
            seats.append(seat(index, free, whole=whole, required=required, numa=numa))
    return seats


def legal(seats: Sequence[Seat], size: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Find every way to take `size` shares that keeps the rule, as counts by GPU."""
    for counts in product(*[range(len(s.required), len(s.free) + 1) for s in seats]):
        taken = [(count, s.whole) for count, s in zip(counts, seats, strict=True) if count]
        if sum(counts) == size and not splits(taken, largest):
            yield counts


SIZES = st.integers(1, 14)
PLACEMENTS = st.sampled_from(Placement)


@given(nodes(), SIZES, st.integers(0, 5), PLACEMENTS)
def test_a_place_is_found_whenever_there_is_one(
    seats: list[Seat], size: int, taken: int, placement: Placement
) -> None:
    """If any set of shares keeps the rule, one is found; if none does, none is."""
    largest = max([taken, *(s.whole for s in seats)])
    chosen = place(size, seats, placement, largest)

    assert (chosen is not None) == any(legal(seats, size, largest))


@given(nodes(), SIZES, st.integers(0, 5), PLACEMENTS)
def test_a_place_keeps_the_rule(
    seats: list[Seat], size: int, taken: int, placement: Placement
) -> None:
    """What is found has the right size, is free, holds what is required, and splits nothing."""
    largest = max([taken, *(s.whole for s in seats)])
    chosen = place(size, seats, placement, largest) or []
    counts = [(len(set(chosen) & set(s.free)), s.whole) for s in seats]

    assert len(set(chosen)) == len(chosen) in (0, size)
    assert set(chosen) <= {one for s in seats for one in s.free}
    assert not chosen or all(s.required <= set(chosen) for s in seats)
    assert not splits([pair for pair in counts if pair[0]], largest)


@given(nodes(), SIZES, PLACEMENTS, st.randoms())
def test_the_order_of_the_question_does_not_matter(
    seats: list[Seat], size: int, placement: Placement, chance: Random
) -> None:
    """The same free shares in any order give the same choice."""
    mixed = [
        Seat(s.gpu, s.whole, chance.sample(s.free, len(s.free)), s.required)
        for s in chance.sample(seats, len(seats))
    ]

    assert place(size, mixed, placement, 5) == place(size, seats, placement, 5)
    assert gather(size, mixed) == gather(size, seats)


# --- what breaks the rule, and what to do then ----------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "largest", "expected"),
    [
        ([], 10, False),
        ([(3, 10)], 10, False),
        ([(10, 10)], 10, False),
        ([(2, 10), (1, 10)], 10, True),
        ([(5, 10), (5, 10)], 10, True),
        ([(10, 10), (1, 10)], 10, False),
        ([(10, 10), (10, 10)], 10, False),
        ([(9, 10), (9, 10)], 10, True),
        ([(10, 10), (9, 10), (9, 10)], 10, True),
        ([(4, 4), (4, 4)], 10, True),
        ([(4, 4), (4, 4)], 4, False),
        ([(4, 4), (7, 10)], 10, False),
    ],
)
def test_a_set_splits_a_fraction_or_does_not(
    counts: list[tuple[int, int]], largest: int, *, expected: bool
) -> None:
    """Several GPUs are right only for more than the largest GPU, and with at most one part."""
    assert splits(counts, largest) == expected


@given(nodes(), st.integers(0, 20))
def test_gathering_always_gives_what_there_is(seats: list[Seat], size: int) -> None:
    """Without a place by the rule there are still shares: the required ones, then others."""
    chosen = gather(size, seats)
    required = {one for s in seats for one in s.required}

    assert len(set(chosen)) == len(chosen) == min(size, sum(len(s.free) for s in seats))
    assert required <= set(chosen) or set(chosen) <= required


def test_gathering_takes_few_gpus() -> None:
    """The GPUs with most to give come first, after those of the required shares."""
    seats = [seat(0, 3), seat(1, 6), seat(2, 4), seat(3, 1, required=[9])]

    assert counted(gather(9, seats)) == {1: 6, 2: 2, 3: 1}
