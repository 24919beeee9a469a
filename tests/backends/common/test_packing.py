"""The packing of fractions: one GPU where the request fits, else whole GPUs and one part."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.common.packing import (
    GpuCandidate,
    PlacementPolicy,
    choose_shares,
    fallback_choice,
    is_split,
)
from metagpu.core.model.shares import Share
from tests.rigs.build import gpu, share

BINPACK, SPREAD = PlacementPolicy.BINPACK, PlacementPolicy.SPREAD
EITHER = pytest.mark.parametrize("placement", PlacementPolicy)


def candidate(
    index: int,
    free: int | Sequence[int],
    *,
    whole: int = 10,
    required: Sequence[int] = (),
    numa: int | None = None,
) -> GpuCandidate:
    """Create a GPU with free shares: so many of the highest, or the given numbers."""
    of = gpu(index, numa_node=numa)
    numbers = range(whole - free, whole) if isinstance(free, int) else free
    shares = {number: share(of, number) for number in numbers}

    return GpuCandidate(
        of, whole, list(shares.values()), frozenset(shares[number] for number in required)
    )


def counted(chosen: Sequence[Share] | None) -> dict[int, int] | None:
    """Count the chosen shares by the index of their GPU."""
    if chosen is None:
        return None
    return dict(sorted(Counter(int(one.gpu[-12:], 16) for one in chosen).items()))


def placed(
    size: int, *candidates: GpuCandidate, placement: PlacementPolicy = BINPACK, largest: int = 10
) -> dict[int, int] | None:
    """Place a request; count the shares by GPU."""
    return counted(choose_shares(size, candidates, placement, largest))


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
    placement: PlacementPolicy, frees: list[int], size: int, expected: int
) -> None:
    """Binpack takes the fullest GPU with room, spread the emptiest; equals go by index."""
    candidates = [candidate(index, free) for index, free in enumerate(frees)]

    assert placed(size, *candidates, placement=placement) == {expected: size}


@EITHER
@pytest.mark.parametrize("size", range(1, 11))
def test_what_fits_on_one_gpu_lands_on_one(size: int, placement: PlacementPolicy) -> None:
    """Any request up to a whole GPU gets shares of one GPU alone."""
    chosen = placed(size, candidate(0, 3), candidate(1, 10), candidate(2, 6), placement=placement)

    assert chosen is not None
    assert list(chosen.values()) == [size]


@EITHER
def test_no_room_on_one_gpu_is_no_place(placement: PlacementPolicy) -> None:
    """A request that would fit on one GPU is never spread, however much is free elsewhere."""
    assert placed(5, candidate(0, 4), candidate(1, 4), candidate(2, 4), placement=placement) is None
    assert placed(1, placement=placement) is None


def test_the_largest_gpu_decides_what_one_gpu_is() -> None:
    """A fraction of the largest GPU is no reason to take several small ones whole."""
    small = [candidate(index, 4, whole=4) for index in range(3)]

    assert placed(8, *small, largest=10) is None
    assert placed(8, *small, largest=8) is None
    assert placed(8, *small, largest=4) == {0: 4, 1: 4}


@EITHER
def test_the_lowest_numbers_are_taken(placement: PlacementPolicy) -> None:
    """Shares of one GPU are taken by number, so that equal requests find equal shares free."""
    chosen = choose_shares(3, [candidate(0, [9, 2, 5, 3])], placement, 10)

    assert chosen is not None
    assert [one.number for one in chosen] == [2, 3, 5]


@EITHER
def test_shares_are_ranked_once(
    placement: PlacementPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many shares are asked for, those of each GPU are put in order once at most."""
    ranked: list[int] = []
    take = GpuCandidate.take

    def counting(self: GpuCandidate, count: int) -> list[Share]:
        ranked.append(self.gpu.index)
        return take(self, count)

    monkeypatch.setattr(GpuCandidate, "take", counting)
    candidates = [candidate(index, 100, whole=100) for index in range(8)]

    for size, gpus in ((1, 1), (100, 1), (450, 5), (800, 8)):
        ranked.clear()
        chosen = choose_shares(size, candidates, placement, 100)
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
    placement: PlacementPolicy, frees: list[int], size: int, expected: dict[int, int] | None
) -> None:
    """Whole GPUs first; the remainder goes to one GPU, the fullest or the emptiest with room."""
    candidates = [candidate(index, free) for index, free in enumerate(frees)]

    assert placed(size, *candidates, placement=placement) == expected


@pytest.mark.parametrize(
    ("wholes", "frees", "size", "expected"),
    [
        ([4, 4, 10], [4, 4, 0], 12, None),
        ([4, 4, 10], [4, 4, 10], 14, {0: 4, 2: 10}),
        ([4, 4, 10], [4, 4, 10], 18, {0: 4, 1: 4, 2: 10}),
        ([4, 4, 10], [4, 4, 9], 17, {0: 4, 1: 4, 2: 9}),
        ([6, 6, 10, 10], [6, 6, 2, 10], 14, {0: 4, 3: 10}),
        ([5, 5, 5, 13], [5, 5, 5, 13], 15, {0: 2, 3: 13}),
        ([10, 4, 4, 4, 2], [10, 4, 4, 4, 2], 12, {0: 10, 4: 2}),
    ],
)
def test_gpus_of_different_sizes(
    wholes: list[int], frees: list[int], size: int, expected: dict[int, int] | None
) -> None:
    """Every GPU counts as whole by its own number of shares, and as few as will do are taken."""
    candidates = [
        candidate(index, free, whole=whole)
        for index, (whole, free) in enumerate(zip(wholes, frees, strict=True))
    ]

    assert placed(size, *candidates, largest=max(wholes)) == expected


def test_sizes_are_combined_when_largest_first_leads_nowhere() -> None:
    """A small required share may need two small GPUs instead of the largest."""
    candidates = [
        candidate(0, 2, required=[8]),
        candidate(1, 6, whole=6),
        candidate(2, 6, whole=6),
        candidate(3, 10),
    ]

    assert placed(13, *candidates) == {0: 1, 1: 6, 2: 6}


# --- NUMA -----------------------------------------------------------------------------------------


@EITHER
def test_several_gpus_are_of_one_numa_node_if_one_has_room(placement: PlacementPolicy) -> None:
    """A request over several GPUs stays on one NUMA node, though others come first by index."""
    candidates = [
        candidate(0, 10, numa=0),
        candidate(1, 9, numa=0),
        candidate(2, 10, numa=1),
        candidate(3, 10, numa=1),
    ]

    assert placed(20, *candidates, placement=placement) == {2: 10, 3: 10}


@EITHER
def test_without_room_on_one_numa_node_any_will_do(placement: PlacementPolicy) -> None:
    """A request that no NUMA node can hold is placed over all of them."""
    candidates = [candidate(0, 10, numa=0), candidate(1, 10, numa=1), candidate(2, 10)]

    assert placed(30, *candidates, placement=placement) == {0: 10, 1: 10, 2: 10}


def test_required_shares_choose_the_numa_node() -> None:
    """Required shares decide the NUMA node of the rest."""
    candidates = [
        candidate(0, 10, numa=0),
        candidate(1, 10, numa=0),
        candidate(2, 10, numa=1),
        candidate(3, 10, numa=1, required=[4]),
    ]

    assert placed(20, *candidates) == {2: 10, 3: 10}


# --- required shares ------------------------------------------------------------------------------


@EITHER
@pytest.mark.parametrize("size", [2, 5])
def test_required_shares_choose_the_gpu(size: int, placement: PlacementPolicy) -> None:
    """Required shares are taken first, and the rest beside them."""
    candidates = [candidate(0, 10), candidate(1, 8, required=[9, 7]), candidate(2, 3)]
    chosen = choose_shares(size, candidates, placement, 10)

    assert chosen is not None
    assert [one.number for one in chosen] == [7, 9, 2, 3, 4][:size]
    assert counted(chosen) == {1: size}


@pytest.mark.parametrize(
    ("candidates", "size"),
    [
        ([candidate(0, 10, required=[0]), candidate(1, 10, required=[0])], 5),
        ([candidate(0, 3, required=[9]), candidate(1, 10)], 4),
        ([candidate(0, 3, required=[9]), candidate(1, 3, required=[9]), candidate(2, 10)], 12),
        ([candidate(0, 3, required=[8, 9])], 1),
    ],
    ids=["on two GPUs", "where there is no room", "two parts", "more than asked for"],
)
def test_required_shares_that_break_the_rule_have_no_place(
    candidates: list[GpuCandidate], size: int
) -> None:
    """Required shares that break the rule leave no placement."""
    assert placed(size, *candidates) is None


def test_required_shares_may_be_of_the_whole_gpu_or_the_part() -> None:
    """A GPU with many required shares is taken whole, whatever its index."""
    candidates = [candidate(0, 10, required=[0, 1]), candidate(1, 10, required=range(9))]

    assert placed(12, *candidates) == {0: 2, 1: 10}


# --- the rule as a whole, against brute force -----------------------------------------------------


@st.composite
def nodes(draw: st.DrawFn, *, with_required: bool = True) -> list[GpuCandidate]:
    """Make up to four small GPUs, of any sizes, with any shares free and any of those required."""
    candidates = []
    for index in range(draw(st.integers(1, 4))):
        whole = draw(st.integers(1, 5))
        free = draw(st.lists(st.integers(0, whole - 1), unique=True))
        some = st.lists(st.sampled_from(free), unique=True, max_size=2) if free else st.just([])
        required = draw(some) if with_required and draw(st.booleans()) else []
        numa = draw(st.sampled_from([None, 0, 1]))
        if free:
            candidates.append(candidate(index, free, whole=whole, required=required, numa=numa))
    return candidates


def legal(candidates: Sequence[GpuCandidate], size: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Find every way to take `size` shares that keeps the rule, as counts by GPU."""
    for counts in product(*[range(len(s.required), len(s.free) + 1) for s in candidates]):
        taken = [(count, s.total) for count, s in zip(counts, candidates, strict=True) if count]
        if sum(counts) == size and not is_split(taken, largest):
            yield counts


SIZES = st.integers(1, 14)
PLACEMENTS = st.sampled_from(PlacementPolicy)


@given(nodes(), SIZES, st.integers(0, 5), PLACEMENTS)
def test_a_place_is_found_whenever_there_is_one(
    candidates: list[GpuCandidate], size: int, taken: int, placement: PlacementPolicy
) -> None:
    """If any set of shares keeps the rule, one is found; if none does, none is."""
    largest = max([taken, *(s.total for s in candidates)])
    chosen = choose_shares(size, candidates, placement, largest)

    assert (chosen is not None) == any(legal(candidates, size, largest))


@given(nodes(), SIZES, st.integers(0, 5), PLACEMENTS)
def test_a_place_keeps_the_rule(
    candidates: list[GpuCandidate], size: int, taken: int, placement: PlacementPolicy
) -> None:
    """A placement is free, of the right size, with the required shares, and splits no fraction."""
    largest = max([taken, *(s.total for s in candidates)])
    chosen = choose_shares(size, candidates, placement, largest) or []
    counts = [(len(set(chosen) & set(s.free)), s.total) for s in candidates]

    assert len(set(chosen)) == len(chosen) in (0, size)
    assert set(chosen) <= {one for s in candidates for one in s.free}
    assert not chosen or all(s.required <= set(chosen) for s in candidates)
    assert not is_split([pair for pair in counts if pair[0]], largest)


@given(nodes(), SIZES, PLACEMENTS, st.randoms())
def test_the_order_of_the_question_does_not_matter(
    candidates: list[GpuCandidate], size: int, placement: PlacementPolicy, chance: Random
) -> None:
    """The same free shares in any order give the same choice."""
    mixed = [
        GpuCandidate(s.gpu, s.total, chance.sample(s.free, len(s.free)), s.required)
        for s in chance.sample(candidates, len(candidates))
    ]

    assert choose_shares(size, mixed, placement, 5) == choose_shares(size, candidates, placement, 5)
    assert fallback_choice(size, mixed) == fallback_choice(size, candidates)


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
    assert is_split(counts, largest) == expected


@given(nodes(), st.integers(0, 20))
def test_the_fallback_always_has_a_choice(candidates: list[GpuCandidate], size: int) -> None:
    """Without a placement by the rule there is a choice: required shares, then others."""
    chosen = fallback_choice(size, candidates)
    required = {one for s in candidates for one in s.required}

    assert len(set(chosen)) == len(chosen) == min(size, sum(len(s.free) for s in candidates))
    assert required <= set(chosen) or set(chosen) <= required


def test_the_fallback_takes_few_gpus() -> None:
    """The fallback takes the GPUs of required shares first, then those with most free shares."""
    candidates = [candidate(0, 3), candidate(1, 6), candidate(2, 4), candidate(3, 1, required=[9])]

    assert counted(fallback_choice(9, candidates)) == {1: 6, 2: 2, 3: 1}
