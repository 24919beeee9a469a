"""Reasons why a share cannot be granted now, as texts for people."""

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Final

from metagpu.core.model.defrag import LeasedPart, best_move
from metagpu.core.model.offers import largest_request
from metagpu.core.model.remarks import Remark, RemarkReason
from metagpu.core.model.shares import CordonSource, Lease, Share
from metagpu.core.model.sharing import conflicts
from metagpu.core.model.snapshot import GpuState, Offer, Snapshot, free_parts

_MAX_HOLDERS: Final = 5
"""Pods that one reason lists; `metagpu status` lists every lease."""


def unavailable_reason(state: GpuState, share: Share | None = None) -> str:
    """Return why shares of a GPU, or one share, are unavailable."""
    waiting = state.waiting_shares
    if waiting is None or (waiting and (share is None or share.id in waiting)):
        return _orphaned_reason(state)
    for reason in _slot_reasons(state, share):
        return f"GPU {state.gpu}: {reason}"
    if state.leases:
        return f"GPU {state.gpu} is in use by {state.owner}"
    for backend, provisioned in state.provisioned.items():
        if provisioned.exclusive:
            return f"GPU {state.gpu} is reserved by {backend}"
    return f"GPU {state.gpu} is being cleaned after its last lease by {state.owner}"


def _orphaned_reason(state: GpuState) -> str:
    """Return which pods a GPU, or a part of it, waits for."""
    orphaned, waiting = state.orphaned_leases, state.waiting_shares
    holders = dict.fromkeys(str(it.holder or "a pod that is being admitted") for it in orphaned)
    names = dict.fromkeys(it.share.resource or "another name" for it in orphaned)
    what = "the GPU waits" if waiting is None else f"{len(waiting)} free shares wait"
    if waiting is not None and len(waiting) == 1:
        what = "1 free share waits"
    pods = "that pod" if len(holders) == 1 else "these pods"
    return (
        f"GPU {state.gpu} is held by {_listed(holders)} under {', '.join(names)}, "
        f"which is not on offer as it was granted; {what} for the end of {pods}"
    )


def _listed(names: Iterable[str]) -> str:
    given = list(names)
    more = [f"{len(given) - _MAX_HOLDERS} more"] if len(given) > _MAX_HOLDERS else []
    return ", ".join([*given[:_MAX_HOLDERS], *more])


def _slot_reasons(state: GpuState, share: Share | None) -> Iterator[str]:
    """Yield what occupies the slots of a share, apart from leases."""
    if share is None:
        return
    for provisioned in state.provisioned.values():
        for slot in sorted(share.footprint & provisioned.blocked.keys()):
            yield provisioned.blocked[slot]
        if share.id in provisioned.devices and share.id not in state.leases:
            yield f"{share.id} was just released and is being checked for processes"
        if share.id in provisioned.delayed and not any(
            conflicts(share, lease.share) for lease in state.leases.values()
        ):
            yield f"{share.id} has just become free and is offered again in a few seconds"


def unconfirmed_reason(lease: Lease) -> str:
    """Return why a share is not granted that an earlier kubelet granted."""
    if lease.holder is None:
        return "the kubelet has just started, and a pod of before may still run with it; try again"
    return (
        f"{lease.holder} still runs with it, although the kubelet, which started without its "
        "checkpoint, takes it for free; it is free when that pod is gone"
    )


def pause_reason(state: GpuState, backend: str) -> str:
    """Return why a backend grants no new shares of a GPU; empty where it grants."""
    if (cordon := state.cordon) is not None:
        end = (
            f"`metagpu uncordon {state.gpu.index}` on this node ends that"
            if CordonSource.OPERATOR in state.cordons
            else f"`kubectl metagpu uncordon NODE/{state.gpu.index}` ends that"
            if CordonSource.NODE in state.cordons
            else "shares are given again after that"
        )
        return f"it is cordoned since {iso_time(cordon.since)} ({cordon.reason}); {end}"
    if (suspended := state.suspended.get(backend)) is not None:
        return f"{backend} is suspended since {iso_time(suspended.since)}: {suspended.reason}"
    return ""


def describe_held_back(snapshot: Snapshot) -> Iterator[Remark]:
    """Yield which shares are held back on each GPU, and whose move would make room."""
    for resource, offer in snapshot.offers.items():
        parts = free_parts(snapshot, offer)
        largest = largest_request(offer.rule.requests, parts)
        count_too_many = f"with them more would count as free than one request can get: {largest}"
        held_back = False
        for part in parts:
            state = snapshot.gpus[part.gpu]
            if resource in state.held_back:
                held_back = True
                full = "the GPU serves as many containers as it can"
                shares = f"{part.free} free shares of {resource} are held back"
                text = f"{shares}: {full if part.full else count_too_many}"
                yield Remark(RemarkReason.SHARES_HELD_BACK, text, state.gpu.index)
        if held_back and (move := best_move(offer.rule.requests, parts, _held(snapshot, offer))):
            source, target = (snapshot.gpus[it].gpu.index for it in (move.part.gpu, move.target))
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


def iso_time(at: float) -> str:
    """Return a time in seconds since the epoch as UTC in ISO 8601."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
