"""Free capacity of a GPU whose MIG instances are created as pods ask for them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from metagpu.core.model.gpu import Gpu
from metagpu.core.model.remarks import Remark, RemarkReason
from metagpu.core.model.shares import Holder


class DefragMove(msgspec.Struct, frozen=True):
    """A pod whose move would free a place for a profile that fits on no GPU.

    Attributes:
        profile: the profile that would fit after the move, at `freed_slot`.
        holder: the container that would have to move, `None` where the kubelet has not named it.
        slot: the instance that the container holds, as `1g.5gb@4`.
        target_slot: the place it could have instead, on `target_gpu`.
    """

    profile: str
    freed_slot: str
    holder: Holder | None
    slot: str
    target_gpu: Gpu
    target_slot: str


class FreeCapacity(msgspec.Struct, frozen=True):
    """The free capacity of one GPU.

    Attributes:
        largest: the largest profile that could be placed now, `None` where none fits.
        largest_slices: the memory slices that this profile occupies, 0 where none fits.
        free_slices: memory slices that nothing occupies, of `slices`; they need not be adjacent.
        closed: whether the GPU grants nothing now, whatever its free capacity.
        moves: for each profile that fits on no GPU, the cheapest move that would help, if that
            move is on this GPU.
    """

    gpu: Gpu
    largest: str | None
    largest_slices: int
    free_slices: int
    slices: int
    closed: bool = False
    moves: tuple[DefragMove, ...] = ()


def describe_capacity(capacities: Sequence[FreeCapacity]) -> Iterator[Remark]:
    """Yield sentences: the largest free instance of each GPU, then useful moves."""
    for capacity in capacities:
        index = capacity.gpu.index
        if capacity.closed:
            text = "no instances are granted now"
            yield Remark(RemarkReason.INSTANCES_CLOSED, text, index)
        elif capacity.largest is None:
            yield Remark(RemarkReason.INSTANCES_FULL, "the GPU is full", index)
        else:
            text = f"the largest instance that fits is {capacity.largest}"
            yield Remark(RemarkReason.LARGEST_INSTANCE, text, index)

    for capacity in capacities:
        index = capacity.gpu.index
        for it in capacity.moves:
            text = (
                f"if {it.holder} moved from {it.slot} of GPU {index} to {it.target_slot} of GPU "
                f"{it.target_gpu.index}, a {it.profile} would fit on GPU {index}"
            )
            yield Remark(RemarkReason.MOVE_FOR_INSTANCE, text)


def to_dict(capacity: FreeCapacity) -> Mapping[str, Any]:
    """Return the free capacity of a GPU as JSON values."""
    return {
        "largest": capacity.largest,
        "largestSlices": capacity.largest_slices,
        "freeSlices": capacity.free_slices,
        "slices": capacity.slices,
        "moves": [
            {
                "profile": it.profile,
                "freedSlot": it.freed_slot,
                "holder": str(it.holder) if it.holder else None,
                "from": it.slot,
                "to": it.target_slot,
                "toGpu": it.target_gpu.index,
            }
            for it in capacity.moves
        ],
    }
