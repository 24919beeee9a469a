"""The choice of replicas, by the number of containers on each GPU. Pure."""

from collections.abc import Callable, Collection, Iterator, Sequence
from enum import StrEnum
from typing import Final

from metagpu.backends.common.packing import GpuCandidate
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Share


class AllocationPolicy(StrEnum):
    """The GPU that comes first, in the words of NVIDIA's device plugin.

    - distributed: the GPU with the fewest replicas taken, so that each container waits least.
    - packed: the GPU with the most replicas taken, so that other GPUs stay idle.
    """

    DISTRIBUTED = "distributed"
    PACKED = "packed"


_Rank = tuple[int, ...]


def choose_replicas(
    size: int,
    candidates: Sequence[GpuCandidate],
    policy: AllocationPolicy,
    last: Collection[GpuId] = (),
) -> list[Share]:
    """Choose `size` replicas, or as many as there are, the required ones first.

    The order is that of taking one replica after the other, each from the GPU that then comes
    first by the policy. Equal GPUs are ranked by how few replicas this request got from them, then
    by index. The number of replicas before one on its own GPU tells all of that: one sort does it.

    Args:
        size: the number of replicas, required ones included.
        candidates: the GPUs to take replicas from.
        policy: the GPU that comes first.
        last: the GPUs to take from only when no other GPU has a replica left.
    """
    by_index = sorted(candidates, key=lambda it: it.gpu.index)
    required = [share for it in by_index for share in sorted(it.required, key=_number)]
    missing = max(0, size - len(required))
    ranked = sorted(_ranked(candidates, _RANKS[policy], last), key=lambda pair: pair[0])

    return [*required[:size], *(share for _, share in ranked[:missing])]


def _ranked(
    candidates: Sequence[GpuCandidate],
    rank: Callable[[GpuCandidate, int, int], _Rank],
    last: Collection[GpuId],
) -> Iterator[tuple[_Rank, Share]]:
    for candidate in candidates:
        free = sorted(
            [it for it in candidate.free if it not in candidate.required]
            if candidate.required
            else candidate.free,
            key=_number,
        )
        taken = candidate.total - len(free)
        for before, share in enumerate(free):
            yield (int(candidate.gpu.id in last), *rank(candidate, taken, before)), share


def _distributed(candidate: GpuCandidate, taken: int, before: int) -> _Rank:
    return taken + before, len(candidate.required) + before, candidate.gpu.index


def _packed(candidate: GpuCandidate, taken: int, before: int) -> _Rank:
    # The GPU that gave the first replica leads by one more: it stays first until it is full.
    return -taken, len(candidate.required), candidate.gpu.index, before


_RANKS: Final = {AllocationPolicy.DISTRIBUTED: _distributed, AllocationPolicy.PACKED: _packed}


def _number(share: Share) -> int:
    return share.number
