"""Which replicas to take: a pure choice by how many containers a GPU has already."""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

import msgspec

from metagpu.core.gpu import Gpu
from metagpu.core.model import Share


class AllocationPolicy(StrEnum):
    """Which GPU comes first (NVIDIA's words).

    - distributed: the one with the fewest replicas taken, so that each container waits least.
    - packed: the one with the most, so that other GPUs stay idle.
    """

    DISTRIBUTED = "distributed"
    PACKED = "packed"


class Seat(msgspec.Struct, frozen=True):
    """One GPU as the choice sees it.

    Attributes:
        whole: how many replicas the GPU has.
        required: replicas that must be taken.
        free: those that may be taken beside them.
        last: whether to take from here only when nothing else is left.
    """

    gpu: Gpu
    whole: int
    required: Sequence[Share]
    free: Sequence[Share]
    last: bool = False

    @property
    def taken(self) -> int:
        """How many replicas are not to be had any more, the required ones among them."""
        return self.whole - len(self.free)


_Rank = tuple[int, ...]


def place(size: int, seats: Sequence[Seat], policy: AllocationPolicy) -> list[Share]:
    """Choose `size` replicas, or as many as there are, the required ones first.

    The order is that of taking one after the other, each from the GPU that then comes first by the
    policy; equal GPUs by how little this request got from them, then by index. How many replicas
    stand before one on its own GPU says all of that, so one sort does it.
    """
    required = [share for seat in _by_index(seats) for share in sorted(seat.required, key=_number)]
    missing = max(0, size - len(required))
    ranked = sorted(_ranked(seats, _RANKS[policy]), key=lambda pair: pair[0])

    return [*required[:size], *(share for _, share in ranked[:missing])]


def _ranked(
    seats: Sequence[Seat], rank: Callable[[Seat, int], _Rank]
) -> Iterator[tuple[_Rank, Share]]:
    for seat in seats:
        for before, share in enumerate(sorted(seat.free, key=_number)):
            yield (int(seat.last), *rank(seat, before)), share


def _distributed(seat: Seat, before: int) -> _Rank:
    return seat.taken + before, len(seat.required) + before, seat.gpu.index


def _packed(seat: Seat, before: int) -> _Rank:
    # Whoever is taken from first leads by one more: it stays first until it is full.
    return -seat.taken, len(seat.required), seat.gpu.index, before


_RANKS = {AllocationPolicy.DISTRIBUTED: _distributed, AllocationPolicy.PACKED: _packed}


def _by_index(seats: Sequence[Seat]) -> list[Seat]:
    return sorted(seats, key=lambda seat: seat.gpu.index)


def _number(share: Share) -> int:
    return share.number
