"""Bin packing of shares: a pure choice among the free shares of several GPUs.

The packing rule: a request that fits on one GPU gets shares of ONE GPU. A larger request takes
whole GPUs and a part of at most one other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from operator import attrgetter

import msgspec

from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import ResourceName, Share, by_gpu
from metagpu.core.model.snapshot import Snapshot


class PlacementPolicy(StrEnum):
    """The GPU to take when several would do.

    - binpack: the fullest GPU with enough free shares, so that whole GPUs stay free for large
      requests.
    - spread: the emptiest GPU, so that neighbours disturb each other least.
    """

    BINPACK = "binpack"
    SPREAD = "spread"


class AllocationPolicy(StrEnum):
    """The device whose replica comes first, in the words of NVIDIA's plugin.

    - distributed: the GPU or instance with the fewest replicas taken: each container waits least.
    - packed: the one with the most replicas taken, so that others stay idle.
    """

    DISTRIBUTED = "distributed"
    PACKED = "packed"


class GpuCandidate(msgspec.Struct, frozen=True):
    """One GPU as the choice sees it.

    Attributes:
        total: the number of shares that the GPU has.
        free: the shares that may be taken, the required ones among them.
        required: the shares that must be taken.
    """

    gpu: Gpu
    total: int
    free: Sequence[Share]
    required: frozenset[Share] = frozenset()

    @property
    def idle(self) -> bool:
        """True if all shares of the GPU may be taken."""
        return len(self.free) == self.total

    def take(self, count: int) -> list[Share]:
        """Take `count` shares: the required ones, then those of the lowest numbers."""
        ranked = sorted(self.free, key=attrgetter("number"))
        if self.required:
            ranked.sort(key=lambda share: share not in self.required)
        return ranked[:count]


def candidates_of(
    resource: ResourceName,
    available: Sequence[Share],
    required: Sequence[Share],
    snapshot: Snapshot,
) -> list[GpuCandidate]:
    """Return the GPUs of a preference request, each with its shares of the request."""
    on_offer = snapshot.offers[resource].by_gpu
    must = by_gpu(required)

    return [
        GpuCandidate(snapshot.gpus[gpu].gpu, len(on_offer[gpu]), free, frozenset(must.get(gpu, ())))
        for gpu, free in by_gpu([*available, *required] if required else available).items()
    ]


def choose_shares(
    size: int, candidates: Sequence[GpuCandidate], policy: PlacementPolicy, largest: int
) -> list[Share] | None:
    """Choose `size` shares by the rule; return `None` if that is impossible.

    Deterministic: among equal GPUs the one with the lowest index wins. A request over several GPUs
    takes as few GPUs as possible, on one NUMA node when one node has enough.

    Args:
        size: the number of shares, required ones included.
        candidates: the GPUs to take shares from.
        policy: the GPU to take when several would do.
        largest: the number of shares of the largest GPU on offer, free or not.
    """
    if size <= largest:
        return _on_one_gpu(size, candidates, policy)

    for group in _numa_groups(candidates):
        chosen = _on_several_gpus(size, group, policy)
        if chosen is not None:
            return chosen
    return None


def is_split(counts: Iterable[tuple[int, int]], largest: int) -> bool:
    """Return whether a chosen set of shares breaks the rule.

    Args:
        counts: for each GPU of the set, the number of shares taken and the number it has.
        largest: the number of shares of the largest GPU on offer.
    """
    pairs = list(counts)
    if len(pairs) <= 1:
        return False

    parts = sum(taken < total for taken, total in pairs)
    return sum(taken for taken, _ in pairs) <= largest or parts > 1


def choose_shares_or_fallback(
    size: int,
    open_candidates: Sequence[GpuCandidate],
    candidates: Sequence[GpuCandidate],
    policy: PlacementPolicy,
    largest: int,
) -> list[Share]:
    """Choose `size` shares by the rule, or as close to it as the free shares allow.

    Never fails: with fewer than `size` free shares, the answer has all of them.

    Args:
        size: the number of shares, required ones included.
        open_candidates: the GPUs that can give shares now.
        candidates: all GPUs; those that are not open are taken last.
        policy: the GPU to take when several would do.
        largest: the number of shares of the largest GPU on offer.
    """
    if chosen := choose_shares(size, open_candidates, policy, largest):
        return chosen
    fallback = [*fallback_choice(size, open_candidates), *fallback_choice(size, candidates)]
    return list(dict.fromkeys(fallback))[:size]


def fallback_choice(size: int, candidates: Sequence[GpuCandidate]) -> list[Share]:
    """Choose `size` shares from as few GPUs as possible, without the rule."""
    ordered = sorted(
        candidates,
        key=lambda candidate: (not candidate.required, -len(candidate.free), candidate.gpu.index),
    )
    required = [share for candidate in ordered for share in sorted(candidate.required, key=_number)]
    others = [share for candidate in ordered for share in candidate.take(candidate.total)]

    return list(dict.fromkeys([*required, *others]))[:size]


def _on_one_gpu(
    size: int, candidates: Sequence[GpuCandidate], policy: PlacementPolicy
) -> list[Share] | None:
    bound = [candidate for candidate in candidates if candidate.required]
    if len(bound) > 1:
        return None

    fitting = [
        candidate
        for candidate in bound or candidates
        if len(candidate.required) <= size <= len(candidate.free)
    ]
    return min(fitting, key=_rank(policy)).take(size) if fitting else None


def _on_several_gpus(
    size: int, candidates: Sequence[GpuCandidate], policy: PlacementPolicy
) -> list[Share] | None:
    combination = min(_combinations(size, candidates, policy), key=len, default=None)
    if combination is None:
        return None
    return [share for candidate, count in combination for share in candidate.take(count)]


def _combinations(
    size: int, candidates: Sequence[GpuCandidate], policy: PlacementPolicy
) -> Iterator[list[tuple[GpuCandidate, int]]]:
    """Yield combinations of whole GPUs and at most one part, the better ones first."""
    for part in (None, *sorted(candidates, key=_rank(policy))):
        others = [candidate for candidate in candidates if candidate is not part]
        others.sort(key=lambda candidate: (-candidate.total, candidate.gpu.index))
        bound = [other for other in others if other.required]
        if any(not candidate.idle for candidate in bound):
            continue  # this GPU would be a second part

        sums = _sums([other for other in others if other.idle and not other.required])
        missing = size - sum(candidate.total for candidate in bound)
        for count in _part_sizes(part):
            if (wholes := sums.get(missing - count)) is not None:
                whole_gpus = [(candidate, candidate.total) for candidate in (*bound, *wholes)]
                yield [*whole_gpus, *([(part, count)] if part else [])]


def _sums(candidates: Iterable[GpuCandidate]) -> Mapping[int, tuple[GpuCandidate, ...]]:
    """Map each number of shares that some GPUs have together to the fewest such GPUs."""
    sums: dict[int, tuple[GpuCandidate, ...]] = {0: ()}

    for candidate in candidates:
        for total, gpus in list(sums.items()):
            known = sums.get(total + candidate.total)
            if known is None or len(known) > len(gpus) + 1:
                sums[total + candidate.total] = (*gpus, candidate)
    return sums


def _part_sizes(candidate: GpuCandidate | None) -> range:
    """Return the numbers of shares that a part of a GPU may have; 0 without one."""
    if candidate is None:
        return range(1)
    most = min(len(candidate.free), candidate.total - 1)
    return range(max(1, len(candidate.required)), most + 1)


def _numa_groups(candidates: Sequence[GpuCandidate]) -> Iterator[Sequence[GpuCandidate]]:
    """Yield the GPUs of each NUMA node that holds all required shares, then all GPUs."""
    required_on = {candidate.gpu.numa_node for candidate in candidates if candidate.required}

    for node in sorted(
        {candidate.gpu.numa_node for candidate in candidates if candidate.gpu.numa_node is not None}
    ):
        if required_on <= {node}:
            yield [candidate for candidate in candidates if candidate.gpu.numa_node == node]
    yield candidates


def _rank(policy: PlacementPolicy) -> Callable[[GpuCandidate], tuple[int, int]]:
    sign = 1 if policy is PlacementPolicy.BINPACK else -1
    return lambda candidate: (sign * len(candidate.free), candidate.gpu.index)


def _number(share: Share) -> int:
    return share.number
