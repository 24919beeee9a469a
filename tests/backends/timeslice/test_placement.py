"""The choice among replicas: the fewest or the most taken first, the same each time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.common.packing import AllocationPolicy, GpuCandidate
from metagpu.backends.timeslice.backend import choose_replicas
from metagpu.core.model.shares import Share
from tests.rigs.build import gpu, share

DISTRIBUTED, PACKED = AllocationPolicy.DISTRIBUTED, AllocationPolicy.PACKED


@dataclass(frozen=True)
class GpuCase:
    """One GPU of a test: the candidate, and whether it comes last."""

    candidate: GpuCandidate
    last: bool = False

    @property
    def index(self) -> int:
        """The GPU's index."""
        return self.candidate.gpu.index

    @property
    def required(self) -> int:
        """The number of required replicas."""
        return len(self.candidate.required)

    @property
    def free(self) -> int:
        """The number of replicas that may be taken beside the required ones."""
        return len(self.candidate.free) - self.required

    @property
    def taken(self) -> int:
        """The number of replicas that are taken, the required ones among them."""
        return self.candidate.total - self.free


def case(index: int, total: int, free: int, *, required: int = 0, last: bool = False) -> GpuCase:
    """Return a GPU whose first replicas are required and whose last ones are free."""
    replicas = [share(gpu(index), number, backend="timeslice") for number in range(total)]
    chosen = [*replicas[:required], *replicas[total - free :]]
    return GpuCase(GpuCandidate(gpu(index), total, chosen, frozenset(replicas[:required])), last)


def choose(size: int, cases: Sequence[GpuCase], policy: AllocationPolicy) -> list[Share]:
    """Choose replicas of the GPUs of a test."""
    last = {each.candidate.gpu.id for each in cases if each.last}
    return choose_replicas(size, [each.candidate for each in cases], policy, last)


def by_index(chosen: Sequence[Share]) -> list[int]:
    """Return the GPU of each replica, in the order of the choice."""
    return [gpu_index for each in chosen for gpu_index in range(8) if gpu(gpu_index).id == each.gpu]


@pytest.mark.parametrize(
    ("policy", "cases", "size", "expected"),
    [
        # Idle GPUs one after the other, then again from the first.
        (DISTRIBUTED, [case(0, 4, 4), case(1, 4, 4), case(2, 4, 4)], 4, [0, 1, 2, 0]),
        # The fewest taken first, until all have as many.
        (DISTRIBUTED, [case(0, 4, 2), case(1, 4, 4), case(2, 4, 3)], 4, [1, 2, 1, 0]),
        # Taken replicas are counted, not free ones: fewest neighbours, whatever the pool allows.
        (DISTRIBUTED, [case(0, 10, 8), case(1, 2, 1)], 2, [1, 0]),
        # Required ones are taken by this very request, and count.
        (DISTRIBUTED, [case(0, 4, 3, required=1), case(1, 4, 4)], 3, [0, 1, 0]),
        # Equally taken: the GPU that gave least to this request.
        (DISTRIBUTED, [case(0, 4, 3, required=1), case(1, 4, 3)], 2, [0, 1]),
        # The most taken first, until it is full.
        (PACKED, [case(0, 4, 4), case(1, 4, 2), case(2, 4, 3)], 4, [1, 1, 2, 2]),
        (PACKED, [case(0, 4, 4), case(1, 4, 4)], 5, [0, 0, 0, 0, 1]),
        (PACKED, [case(0, 4, 2), case(1, 4, 2, required=1)], 2, [1, 0]),
        # What is to come last comes last, and comes.
        (DISTRIBUTED, [case(0, 4, 4, last=True), case(1, 4, 1)], 3, [1, 0, 0]),
        (PACKED, [case(0, 4, 1, last=True), case(1, 4, 4)], 5, [1, 1, 1, 1, 0]),
        (PACKED, [], 3, []),
    ],
)
def test_the_policy_decides(
    policy: AllocationPolicy, cases: list[GpuCase], size: int, expected: list[int]
) -> None:
    """Replicas come from the GPUs in the order of the policy."""
    assert by_index(choose(size, cases, policy)) == expected


def test_low_numbers_come_first() -> None:
    """Within a GPU the numbers go up, in whatever order the kubelet lists them."""
    one = case(0, 4, 4).candidate
    mixed = GpuCandidate(one.gpu, 4, [one.free[number] for number in (2, 0, 3, 1)])

    assert [each.number for each in choose_replicas(3, [mixed], DISTRIBUTED)] == [0, 1, 2]


def one_by_one(size: int, cases: Sequence[GpuCase], policy: AllocationPolicy) -> list[int]:
    """Take replicas one by one, and compare all GPUs again before each."""
    free = {each.index: each.free for each in cases}
    taken = {each.index: each.taken for each in cases}
    given_ = {each.index: each.required for each in cases}
    last = {each.index: each.last for each in cases}
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
def nodes(draw: st.DrawFn) -> list[GpuCase]:
    """Make up to five GPUs of different counts in any state, in any order."""
    cases = []
    for index in range(draw(st.integers(0, 5))):
        whole = draw(st.integers(1, 6))
        free = draw(st.integers(0, whole))
        required = draw(st.integers(0, min(2, whole - free)))
        cases.append(case(index, whole, free, required=required, last=draw(st.booleans())))
    return draw(st.permutations(cases))


@given(nodes(), st.integers(0, 20), st.sampled_from(AllocationPolicy))
def test_one_sort_is_as_good_as_many(
    cases: list[GpuCase], size: int, policy: AllocationPolicy
) -> None:
    """One sort gives the choice of a new sort before each replica."""
    required = sum(each.required for each in cases)
    chosen = choose(size, cases, policy)

    assert by_index(chosen[required:]) == one_by_one(size, cases, policy)


@given(nodes(), st.integers(0, 20), st.sampled_from(AllocationPolicy))
def test_the_order_of_gpus_does_not_matter(
    cases: list[GpuCase], size: int, policy: AllocationPolicy
) -> None:
    """The same node has the same answer."""
    assert choose(size, cases, policy) == choose(size, cases[::-1], policy)


@given(nodes(), st.integers(0, 20))
def test_distributed_evens_out(cases: list[GpuCase], size: int) -> None:
    """No GPU gets a replica while another one has two fewer taken and one free."""
    sound = [each for each in cases if not each.last]
    chosen = Counter(by_index(choose(size, sound, DISTRIBUTED)))
    now = {each.index: each.taken - each.required + chosen[each.index] for each in sound}
    roomy = [each.index for each in sound if chosen[each.index] < each.free + each.required]
    grown = [each.index for each in sound if chosen[each.index] > each.required]

    assert all(now[more] <= now[other] + 1 for more in grown for other in roomy)
