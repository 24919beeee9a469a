"""How much room is left on a GPU that is cut as pods ask: numbers, and the same as sentences."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from metagpu.core.gpu import Gpu
from metagpu.core.model import Holder


class Relief(msgspec.Struct, frozen=True):
    """A pod whose move would open room, on its own GPU, for what fits nowhere.

    Attributes:
        profile: what would then fit, at `opens`.
        holder: the container that would have to move.
        spot: the instance it has, as `1g.5gb@4`.
        onto: where it could be, on `target`.
    """

    profile: str
    opens: str
    holder: Holder | None
    spot: str
    target: Gpu
    onto: str


class Room(msgspec.Struct, frozen=True):
    """What is left of one GPU.

    Attributes:
        largest: the largest profile that could be placed now, `None` if none can.
        largest_slices: the memory slices it would occupy, 0 for none.
        free_slices: memory slices that nothing occupies, of `slices`; they need not be adjacent.
        shut: whether the GPU gives nothing now, be there room or not.
        reliefs: for each profile that fits nowhere, the cheapest move that would help, if it would
            be on this GPU.
    """

    gpu: Gpu
    largest: str | None
    largest_slices: int
    free_slices: int
    slices: int
    shut: bool = False
    reliefs: tuple[Relief, ...] = ()


def sentences(rooms: Sequence[Room]) -> Iterator[str]:
    """Say it for people: what still fits on each GPU, then which moves would help."""
    for room in rooms:
        if room.shut:
            yield f"GPU {room.gpu.index}: it gives no instances now"
        elif room.largest is None:
            yield f"GPU {room.gpu.index}: it is full"
        else:
            yield f"GPU {room.gpu.index}: the largest instance that fits is {room.largest}"

    for room in rooms:
        for it in room.reliefs:
            yield (
                f"if {it.holder} moved from {it.spot} of GPU {room.gpu.index} to {it.onto} of GPU "
                f"{it.target.index}, a {it.profile} would fit on GPU {room.gpu.index}"
            )


def told(room: Room) -> Mapping[str, Any]:
    """Say it for programs."""
    return {
        "largest": room.largest,
        "largestSlices": room.largest_slices,
        "freeSlices": room.free_slices,
        "slices": room.slices,
        "moves": [
            {
                "profile": it.profile,
                "opens": it.opens,
                "holder": str(it.holder) if it.holder else None,
                "from": it.spot,
                "to": it.onto,
                "toGpu": it.target.index,
            }
            for it in room.reliefs
        ],
    }
