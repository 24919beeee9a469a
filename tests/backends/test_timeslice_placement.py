"""The choice among replicas: the fewest or the most taken first, the same each time."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.timeslice_placement import AllocationPolicy, Seat, place
from metagpu.core.model import Share
from tests.build import gpu, share

DISTRIBUTED, PACKED = AllocationPolicy.DISTRIBUTED, AllocationPolicy.PACKED


def seat(index: int, whole: int, free: int, *, required: int = 0, last: bool = False) -> Seat:
    """Make a seat whose first replicas are required and whose last ones are free."""
    all_of_it = [share(gpu(index), number, backend="timeslice") for number in range(whole)]
    return Seat(gpu(index), whole, all_of_it[:required], all_of_it[whole - free :], last)


def by_index(chosen: Sequence[Share]) -> list[int]:
    """Say from which GPU each replica is, in the order of the choice."""
    return [gpu_index for each in chosen for gpu_index in range(8) if gpu(gpu_index).id == each.gpu]


@pytest.mark.parametrize(
    ("policy", "seats", "size", "expected"),
    [
        # Idle GPUs one after the other, then again from the first.
        (DISTRIBUTED, [seat(0, 4, 4), seat(1, 4, 4), seat(2, 4, 4)], 4, [0, 1, 2, 0]),
        # The fewest taken first, until all have as many.
        (DISTRIBUTED, [seat(0, 4, 2), seat(1, 4, 4), seat(2, 4, 3)], 4, [1, 2, 1, 0]),
        # Taken replicas are counted, not free ones: fewest neighbours, whatever the pool allows.
        (DISTRIBUTED, [seat(0, 10, 8), seat(1, 2, 1)], 2, [1, 0]),
        # Required ones are taken by this very request, and count.
        (DISTRIBUTED, [seat(0, 4, 3, required=1), seat(1, 4, 4)], 3, [0, 1, 0]),
        # Equally taken: whoever gave least to this request.
        (DISTRIBUTED, [seat(0, 4, 3, required=1), seat(1, 4, 3)], 2, [0, 1]),
        # The most taken first, until it is full.
        (PACKED, [seat(0, 4, 4), seat(1, 4, 2), seat(2, 4, 3)], 4, [1, 1, 2, 2]),
        (PACKED, [seat(0, 4, 4), seat(1, 4, 4)], 5, [0, 0, 0, 0, 1]),
        (PACKED, [seat(0, 4, 2), seat(1, 4, 2, required=1)], 2, [1, 0]),
        # What is to come last comes last, and comes.
        (DISTRIBUTED, [seat(0, 4, 4, last=True), seat(1, 4, 1)], 3, [1, 0, 0]),
        (PACKED, [seat(0, 4, 1, last=True), seat(1, 4, 4)], 5, [1, 1, 1, 1, 0]),
        (PACKED, [], 3, []),
    ],
)
def test_the_policy_decides(
    policy: AllocationPolicy, seats: list[Seat], size: int, expected: list[int]
) -> None:
    """Replicas come from the GPUs in the order of the policy."""
    assert by_index(place(size, seats, policy)) == expected


def test_low_numbers_come_first() -> None:
    """Within a GPU the numbers go up, in whatever order the kubelet lists them."""
    one = seat(0, 4, 4)
    mixed = Seat(one.gpu, 4, [], [one.free[number] for number in (2, 0, 3, 1)])

    assert [each.number for each in place(3, [mixed], DISTRIBUTED)] == [0, 1, 2]


def one_by_one(size: int, seats: Sequence[Seat], policy: AllocationPolicy) -> list[int]:
    """Take replicas as the policy is told: look at all GPUs again for each of them."""
    free = {each.gpu.index: len(each.free) for each in seats}
    taken = {each.gpu.index: each.whole - len(each.free) for each in seats}
    given_ = {each.gpu.index: len(each.required) for each in seats}
    last = {each.gpu.index: each.last for each in seats}
    sign = 1 if policy is DISTRIBUTED else -1
    order: list[int] = []

    for _ in range(size - sum(given_.values())):
        open_ = [index for index in free if free[index]]
        if not open_:
            break
        ranks = {i: (last[i], sign * taken[i], given_[i], i) for i in open_}
        best = min(open_, key=ranks.__getitem__)
        free[best] -= 1
        taken[best] += 1
        given_[best] += 1
        order.append(best)
    return order


@st.composite
def nodes(draw: st.DrawFn) -> list[Seat]:
    """Make up to five GPUs of different counts in any state, in any order."""
    seats = []
    for index in range(draw(st.integers(0, 5))):
        whole = draw(st.integers(1, 6))
        free = draw(st.integers(0, whole))
        required = draw(st.integers(0, min(2, whole - free)))
        seats.append(seat(index, whole, free, required=required, last=draw(st.booleans())))
    return draw(st.permutations(seats))


@given(nodes(), st.integers(0, 20), st.sampled_from(AllocationPolicy))
def test_one_sort_is_as_good_as_many(
    seats: list[Seat], size: int, policy: AllocationPolicy
) -> None:
    """What is chosen at once is what would be chosen by looking again before each replica."""
    required = sum(len(each.required) for each in seats)
    chosen = place(size, seats, policy)

    assert by_index(chosen[required:]) == one_by_one(size, seats, policy)


@given(nodes(), st.integers(0, 20), st.sampled_from(AllocationPolicy))
def test_the_order_of_gpus_does_not_matter(
    seats: list[Seat], size: int, policy: AllocationPolicy
) -> None:
    """The same node has the same answer."""
    assert place(size, seats, policy) == place(size, seats[::-1], policy)


@given(nodes(), st.integers(0, 20))
def test_distributed_evens_out(seats: list[Seat], size: int) -> None:
    """No GPU gets a replica while another with room has two fewer taken."""
    sound = [each for each in seats if not each.last]
    chosen = Counter(by_index(place(size, sound, DISTRIBUTED)))
    now = {
        each.gpu.index: each.taken - len(each.required) + chosen[each.gpu.index] for each in sound
    }
    roomy = [
        each.gpu.index
        for each in sound
        if chosen[each.gpu.index] < len(each.free) + len(each.required)
    ]
    grown = [each.gpu.index for each in sound if chosen[each.gpu.index] > len(each.required)]

    assert all(now[more] <= now[other] + 1 for more in grown for other in roomy)
