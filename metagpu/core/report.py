"""A snapshot as plain data, for people and programs: what `explain` and `status` say."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from metagpu.core import room
from metagpu.core.errors import MetagpuError
from metagpu.core.gpu import MIB, GpuId, bus_id
from metagpu.core.layout import Layout
from metagpu.core.model import Made, Pause, ResourceName, Share, ShareId
from metagpu.core.pods import KnownPod
from metagpu.core.sharing import conflicts
from metagpu.core.snapshot import GpuState, Snapshot


def explanation(snapshot: Snapshot, layout: Layout) -> dict[str, Any]:
    """Say what the kubelet is, or would be, offered, and why each GPU is in its pool."""
    why = {assignment.gpu.id: assignment for assignment in layout.assignments}
    rooms = layout.rooms(snapshot)
    left = {each.gpu.id: room.told(each) for each in rooms}

    return {
        "resources": {
            resource: {
                "capacity": len(offer.shares),
                "allocatable": sum(
                    len(shares) - sum(share.id in shut for share in shares)
                    for gpu, shares in offer.by_gpu.items()
                    if (state := snapshot.gpus[gpu]).verdict.healthy
                    for shut in (state.shut,)
                ),
            }
            for resource, offer in snapshot.offers.items()
        },
        "gpus": [
            {
                **_gpu(state),
                "nvlinkPeers": _nvlink_peers(snapshot, gpu),
                "pool": why[gpu].pool if gpu in why else None,
                "why": why[gpu].why if gpu in why else "not laid out yet",
                "shares": _shares(snapshot, gpu),
                "room": left.get(gpu),
            }
            for gpu, state in snapshot.gpus.items()
        ],
        "unusedPools": dict(layout.unused),
        "topology": _topology(snapshot),
        "remarks": list(room.sentences(rooms)),
        "rivals": dict(snapshot.rivals),
    }


def status(snapshot: Snapshot, layout: Layout) -> dict[str, Any]:
    """Say what `explanation` does, and who holds what."""
    held = Counter(
        (str(lease.share.resource), lease.share.gpu, lease.holder)
        for state in snapshot.gpus.values()
        for lease in state.leases.values()
    )

    return {
        **explanation(snapshot, layout),
        "leases": [
            {
                "resource": resource,
                "gpu": snapshot.gpus[gpu].gpu.index,
                "uuid": gpu,
                "shares": count,
                "holder": str(holder) if holder else None,
                **(_pod(snapshot.pods.find(holder, None)) if holder else {}),
            }
            for (resource, gpu, holder), count in held.items()
        ],
    }


def _pod(known: KnownPod | None) -> Mapping[str, str]:
    """Say what the API server tells of a holder's pod, nothing where it is not asked."""
    if known is None:
        return {}
    return {"podUid": known.uid, "podOwner": known.owner, "podPhase": known.phase}


def hindrance(state: GpuState, share: Share | None = None) -> str:
    """Say who keeps shares of a GPU, or this one, from being granted."""
    for lease in state.waits_for:
        who = lease.holder or "a pod that is being admitted"
        return (
            f"GPU {state.gpu} is held by {who} under {lease.share.resource or 'another name'}, "
            "which is not on offer as it was granted; the GPU waits for the end of that pod"
        )
    for why in _blocked(state, share):
        return f"GPU {state.gpu}: {why}"
    if state.leases:
        return f"GPU {state.gpu} is in use by {state.owner}"
    if alone := [backend for backend, stock in state.stocks.items() if stock.alone]:
        return f"GPU {state.gpu} is in the hands of {alone[0]}"
    return f"GPU {state.gpu} is being cleaned after its last lease by {state.owner}"


def _blocked(state: GpuState, share: Share | None) -> Iterator[str]:
    """Say what else than a lease is on the slots of a share."""
    if share is None:
        return
    for stock in state.stocks.values():
        for slot in sorted(share.footprint & stock.blocked.keys()):
            yield stock.blocked[slot]
        if share.id in stock.made and share.id not in state.leases:
            yield f"{share.id} was just given back, and is looked at"
        if share.id in stock.late and not any(
            conflicts(share, lease.share) for lease in state.leases.values()
        ):
            yield f"{share.id} has just become free, and has its turn in some seconds"


def pause(state: GpuState, backend: str) -> str:
    """Say why a backend gives no new shares of a GPU for now, empty when it does."""
    if state.cordon is not None:
        return (
            f"it is cordoned since {_moment(state.cordon.since)} ({state.cordon.reason}); "
            f"`metagpu uncordon {state.gpu.index}` on this node ends that"
        )
    if (suspended := state.suspended.get(backend)) is not None:
        return f"{backend} is suspended since {_moment(suspended.since)}: {suspended.reason}"
    return ""


def gpu_named(snapshot: Snapshot, name: str) -> GpuId:
    """Find a GPU by index, uuid or PCI bus id.

    Raises:
        MetagpuError: if there is none of that name; says which there are.
    """
    for gpu, state in snapshot.gpus.items():
        if name in (gpu, str(state.gpu.index)):
            return gpu
        with suppress(ValueError):
            if bus_id(name) == state.gpu.pci_bus_id:
                return gpu

    known = ", ".join(str(state.gpu.index) for state in snapshot.gpus.values()) or "none"
    raise MetagpuError(f"there is no GPU {name!r} here; there are: {known}")


def _gpu(state: GpuState) -> Mapping[str, Any]:
    return {
        "index": state.gpu.index,
        "uuid": state.gpu.id,
        "product": state.gpu.name,
        "memoryMiB": state.gpu.memory // MIB,
        "pciBusId": state.gpu.pci_bus_id or None,
        "numaNode": state.gpu.numa_node,
        "healthy": state.verdict.healthy,
        "reason": state.verdict.reason,
        "since": _moment(state.verdict.since),
        "backends": list(dict.fromkeys(share.backend for share in state.shares)),
        "owner": state.owner,
        "cleaning": {backend: _moment(since) for backend, since in state.cleaning.items()},
        "suspended": {backend: _pause(pause) for backend, pause in state.suspended.items()},
        "cordon": _pause(state.cordon) if state.cordon else None,
        "faults": [_fault(state, device) for device in state.faults],
        "made": [
            _made(share, it) for stock in state.stocks.values() for share, it in stock.made.items()
        ],
        "blocked": sorted(
            {
                *(why for stock in state.stocks.values() for why in stock.blocked.values()),
                *state.paused.values(),
            }
        ),
        "waitsFor": hindrance(state) if state.waits_for else None,
    }


def _made(share: ShareId, it: Made) -> Mapping[str, Any]:
    return {
        "share": share,
        "device": it.device,
        "gpuInstance": it.gpu_instance,
        "computeInstance": it.compute_instance,
        "idle": it.idle,
    }


def _fault(state: GpuState, device: str) -> Mapping[str, Any]:
    """Say what is wrong with a MIG device, and which shares it stands for: none if not ours."""
    verdict = state.faults[device]
    return {
        "device": device,
        "shares": sorted(
            share
            for stock in state.stocks.values()
            for share, made in stock.made.items()
            if made.device == device
        ),
        "reason": verdict.reason,
        "since": _moment(verdict.since),
    }


def _pause(it: Pause) -> Mapping[str, str | bool]:
    return {"reason": it.reason, "since": _moment(it.since), "reset": it.reset}


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def _nvlink_peers(snapshot: Snapshot, gpu: GpuId) -> list[int]:
    """Name the GPUs that this one reaches over NVLink, directly or through NVSwitches."""
    return [
        state.gpu.index
        for other, state in snapshot.gpus.items()
        if other != gpu and snapshot.topology.between(gpu, other).nvlinks
    ]


def _topology(snapshot: Snapshot) -> list[list[str]]:
    """Say of every two GPUs how they are connected, in the order of the GPUs."""
    return [
        ["X" if a == b else str(snapshot.topology.between(a, b)) for b in snapshot.gpus]
        for a in snapshot.gpus
    ]


def _shares(snapshot: Snapshot, gpu: GpuId) -> dict[ResourceName, dict[str, int]]:
    state = snapshot.gpus[gpu]
    leased = Counter(lease.share.resource for lease in state.leases.values())

    return {
        resource: {
            "capacity": len(offer.by_gpu[gpu]),
            "held": leased[resource],
            "free": state.free(resource),
        }
        for resource, offer in snapshot.offers.items()
        if gpu in offer.by_gpu
    }
