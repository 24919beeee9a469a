"""The move of one pod after which a larger request would fit. Pure."""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.offers import FreePart, RequestRule, largest_request
from metagpu.core.model.shares import Holder


class LeasedPart(msgspec.Struct, frozen=True):
    """The shares of one resource that a container holds on one GPU."""

    gpu: GpuId
    holder: Holder
    shares: int


class PartMove(msgspec.Struct, frozen=True):
    """A container whose move to another GPU makes room for a larger request.

    Attributes:
        largest: the largest request that could be placed after the move.
    """

    part: LeasedPart
    target: GpuId
    largest: int


def best_move(
    rule: RequestRule, free: Sequence[FreePart], held: Sequence[LeasedPart]
) -> PartMove | None:
    """Return the move that makes room for the largest request, if one helps.

    Of equal moves the container with the fewest shares moves, to the fullest GPU that has room.
    Containers with shares on several GPUs stay: their pod would have to leave all of them.

    Args:
        rule: the sets of shares that one request may take.
        free: every GPU with shares of the resource.
        held: what containers hold of the resource.
    """
    holders = [part.holder for part in held]
    movable = [part for part in held if holders.count(part.holder) == 1]
    now = largest_request(rule, free)
    better = [it for it in _moves(rule, free, movable) if it.largest > now]
    room = {part.gpu: part.free for part in free}
    return min(better, key=lambda it: (-it.largest, it.part.shares, room[it.target]), default=None)


def _moves(
    rule: RequestRule, free: Sequence[FreePart], movable: Sequence[LeasedPart]
) -> Iterator[PartMove]:
    for part in movable:
        for target in free:
            if target.gpu == part.gpu or target.usable < part.shares:
                continue
            change = {part.gpu: part.shares, target.gpu: -part.shares}
            after = [replace(it, free=it.free + change.get(it.gpu, 0)) for it in free]
            yield PartMove(part, target.gpu, largest_request(rule, after))
