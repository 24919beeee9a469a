"""A snapshot as plain data, for people and programs: what `explain` and `status` say."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from metagpu.core.errors import MetagpuError
from metagpu.core.layout import Layout
from metagpu.core.model import MIB, GpuId, GpuState, Pause, ResourceName, Snapshot, bus_id


def explanation(snapshot: Snapshot, layout: Layout) -> dict[str, Any]:
    """Say what the kubelet is, or would be, offered, and why each GPU is in its pool."""
    why = {assignment.gpu.id: assignment for assignment in layout.assignments}

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
            }
            for gpu, state in snapshot.gpus.items()
        ],
        "topology": _topology(snapshot),
    }


def status(snapshot: Snapshot, layout: Layout) -> dict[str, Any]:
    """Say what `explanation` does, and who holds what."""
    held = Counter(
        (str(lease.share.resource), lease.share.gpu, str(lease.holder) if lease.holder else "")
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
                "holder": holder or None,
            }
            for (resource, gpu, holder), count in held.items()
        ],
    }


def hindrance(state: GpuState) -> str:
    """Say who keeps shares of a GPU from being granted."""
    for lease in state.waits_for:
        who = lease.holder or "a pod that is being admitted"
        return (
            f"GPU {state.gpu} is held by {who} under {lease.share.resource or 'another name'}, "
            "which is not on offer as it was granted; the GPU waits for the end of that pod"
        )
    if state.leases:
        return f"GPU {state.gpu} is in use by {state.owner}"
    return f"GPU {state.gpu} is being cleaned after its last lease by {state.owner}"


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
        "waitsFor": hindrance(state) if state.waits_for else None,
    }


def _pause(it: Pause) -> Mapping[str, str]:
    return {"reason": it.reason, "since": _moment(it.since)}


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
