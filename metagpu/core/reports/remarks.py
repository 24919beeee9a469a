"""Remarks of a node's report: what is free and cannot be had, and what would help."""

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from metagpu.core.availability.exact import FreePart, free_parts, held_back_of, largest_request
from metagpu.core.contracts.capabilities import no_shares_reason
from metagpu.core.layout.layout import Layout
from metagpu.core.model.backend_reports import FreeCapacity
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.offers import RequestRule
from metagpu.core.model.shares import Holder
from metagpu.core.model.snapshot import Offer, Snapshot
from metagpu.core.reports.schema.gpus import FreeCapacityReport, MoveReport
from metagpu.core.reports.schema.status import RemarkReport


class RemarkReason(StrEnum):
    """The kind of a remark, which no release changes; its text is for people.

    - resource_empty: no GPU of its pool has a share of a resource.
    - shares_held_back: free shares are held back, as no request could take them too.
    - move_for_request: after the move of a pod a larger request would fit.
    - instances_closed: a GPU grants no MIG instances now, whatever is free.
    - instances_full: no MIG instance fits on a GPU beside those that are there.
    - largest_instance: the largest MIG instance that fits on a GPU.
    - move_for_instance: after the move of a pod a MIG instance would fit that fits nowhere now.
    """

    RESOURCE_EMPTY = "resource_empty"
    SHARES_HELD_BACK = "shares_held_back"
    MOVE_FOR_REQUEST = "move_for_request"
    INSTANCES_CLOSED = "instances_closed"
    INSTANCES_FULL = "instances_full"
    LARGEST_INSTANCE = "largest_instance"
    MOVE_FOR_INSTANCE = "move_for_instance"


class Remark(msgspec.Struct, frozen=True):
    """A sentence of the report; `gpu` is the index of the only GPU that it is about."""

    reason: RemarkReason
    text: str
    gpu: int | None = None

    def report(self) -> RemarkReport:
        """Return the remark as a report has it."""
        where = "" if self.gpu is None else f"GPU {self.gpu}: "
        return RemarkReport(str(self.reason), self.gpu, f"{where}{self.text}")


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
    better = [move for move in _moves(rule, free, movable) if move.largest > now]
    room = {part.gpu: part.free for part in free}
    return min(
        better, key=lambda move: (-move.largest, move.part.shares, room[move.target]), default=None
    )


def _moves(
    rule: RequestRule, free: Sequence[FreePart], movable: Sequence[LeasedPart]
) -> Iterator[PartMove]:
    for part in movable:
        for target in free:
            if target.gpu == part.gpu or target.usable < part.shares:
                continue
            change = {part.gpu: part.shares, target.gpu: -part.shares}
            after = [
                replace(free_part, free=free_part.free + change.get(free_part.gpu, 0))
                for free_part in free
            ]
            yield PartMove(part, target.gpu, largest_request(rule, after))


def describe_empty(snapshot: Snapshot, layout: Layout) -> Iterator[Remark]:
    """Yield the resources of which no GPU has a share, with the reasons."""
    missing = {each.gpu.id: each.missing for each in layout.pool_assignments}
    for resource, offer in snapshot.offers.items():
        reasons: dict[str, list[int]] = {}
        for each in layout.backend_assignments if not offer.shares else ():
            if resource in each.backend.resources:
                reason = missing[each.gpu.id] or no_shares_reason(each.backend, each.gpu)
                reasons.setdefault(reason, []).append(each.gpu.index)
        if reasons:
            parts = [
                f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(map(str, gpus))}: {reason}"
                for reason, gpus in reasons.items()
            ]
            text = f"{resource} has the amount 0, because no GPU provides it; {'; '.join(parts)}"
            yield Remark(RemarkReason.RESOURCE_EMPTY, text)


def describe_held_back(snapshot: Snapshot) -> Iterator[Remark]:
    """Yield which shares are held back on each GPU, and whose move would make room."""
    for resource, offer in snapshot.offers.items():
        parts = free_parts(snapshot, offer)
        largest = largest_request(offer.rule.requests, parts)
        most = f"one pod can get at most {largest} now"
        held_back = False
        for part in parts:
            state = snapshot.gpus[part.gpu]
            if resource in held_back_of(state):
                held_back = True
                full = "the GPU serves as many containers as it can"
                shares = f"{part.free} free shares of {resource} are hidden from the scheduler"
                text = f"{shares}: {full if part.full else most}"
                yield Remark(RemarkReason.SHARES_HELD_BACK, text, state.gpu.index)
        if held_back and (move := best_move(offer.rule.requests, parts, _held(snapshot, offer))):
            source, target = (snapshot.gpus[gpu].gpu.index for gpu in (move.part.gpu, move.target))
            text = (
                f"if {move.part.holder} moved with its {move.part.shares} {resource} from GPU "
                f"{source} to GPU {target}, a request of {move.largest} would fit"
            )
            yield Remark(RemarkReason.MOVE_FOR_REQUEST, text)


def _held(snapshot: Snapshot, offer: Offer) -> list[LeasedPart]:
    """Return the shares that each container holds of a resource on each GPU."""
    counts = Counter(
        (gpu, lease.holder)
        for gpu in offer.by_gpu
        for lease in snapshot.gpus[gpu].leases.values()
        if lease.share.resource == offer.resource and lease.holder
    )
    return [LeasedPart(gpu, holder, shares) for (gpu, holder), shares in counts.items()]


def describe_capacity(capacities: Sequence[FreeCapacity]) -> Iterator[Remark]:
    """Yield sentences: the largest free instance of each GPU, then useful moves."""
    for capacity in capacities:
        index = capacity.gpu.index
        if capacity.closed:
            text = "pods get no MIG instances now"
            yield Remark(RemarkReason.INSTANCES_CLOSED, text, index)
        elif capacity.largest is None:
            yield Remark(RemarkReason.INSTANCES_FULL, "the GPU is full", index)
        else:
            text = f"the largest instance that fits is {capacity.largest}"
            yield Remark(RemarkReason.LARGEST_INSTANCE, text, index)

    for capacity in capacities:
        index = capacity.gpu.index
        for move in capacity.moves:
            text = (
                f"if {move.holder} moved from {move.slot} of GPU {index} to {move.target_slot} of "
                f"GPU {move.target_gpu.index}, a {move.profile} would fit on GPU {index}"
            )
            yield Remark(RemarkReason.MOVE_FOR_INSTANCE, text)


def capacity_report(capacity: FreeCapacity) -> FreeCapacityReport:
    """Return the free capacity of a GPU as a report has it."""
    return FreeCapacityReport(
        largest=capacity.largest,
        largest_slices=capacity.largest_slices,
        free_slices=capacity.free_slices,
        slices=capacity.slices,
        moves=[
            MoveReport(
                profile=move.profile,
                freed_slot=move.freed_slot,
                holder=str(move.holder) if move.holder else None,
                from_slot=move.slot,
                to_slot=move.target_slot,
                to_gpu=move.target_gpu.index,
            )
            for move in capacity.moves
        ],
    )
