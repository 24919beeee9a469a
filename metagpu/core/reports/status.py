"""Snapshots as plain data: the answers of `metagpu explain` and `metagpu status`."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from metagpu.core.availability.exact import free_parts, held_back_of, largest_request
from metagpu.core.availability.reasons import availability_of, count_free, waits_for
from metagpu.core.devices.devices import devices_of
from metagpu.core.errors import UnknownGpu
from metagpu.core.layout.layout import Layout
from metagpu.core.model.gpu import MIB, Gpu, GpuId, parse_bus_id
from metagpu.core.model.mig import profile_of
from metagpu.core.model.offers import Api
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.quantities import iso_time
from metagpu.core.model.shares import (
    HardwareDevice,
    Holder,
    OfferTurn,
    Pause,
    Recovery,
    ResourceClaimRef,
    ResourceName,
    Share,
    ShareId,
)
from metagpu.core.model.snapshot import (
    GpuState,
    Offer,
    Snapshot,
)
from metagpu.core.reports.remarks import capacity_report, describe_capacity, describe_held_back

_Held = tuple[str, GpuId, Holder | None, ResourceClaimRef | None, tuple[Holder, ...]]
"""One entry of the leases: resource, GPU, holder, ResourceClaim and the claim's other holders."""


def explain_report(snapshot: Snapshot, layout: Layout) -> dict[str, Any]:
    """Return the offers to the kubelet, and why each GPU is in its pool or in none."""
    assignments = {assignment.gpu.id: assignment for assignment in layout.pool_assignments}
    capacities = layout.free_capacity(snapshot)
    free = {each.gpu.id: capacity_report(each) for each in capacities}

    return {
        "resources": {
            resource: {
                "capacity": len(offer.shares),
                "allocatable": sum(
                    len(shares) - sum(share.id in unhealthy for share in shares)
                    for gpu, shares in offer.by_gpu.items()
                    for unhealthy in (availability_of(snapshot.gpus[gpu]).unlisted,)
                ),
            }
            for resource, offer in snapshot.offers.items()
        },
        "gpus": [
            {
                **_gpu_report(state),
                "nvlinkPeers": _nvlink_peers(snapshot, gpu),
                "pool": assignments[gpu].pool if gpu in assignments else None,
                "poolReason": assignments[gpu].reason if gpu in assignments else "not assigned yet",
                "shares": _shares_report(snapshot, gpu),
                "freeCapacity": free.get(gpu),
            }
            for gpu, state in snapshot.gpus.items()
        ],
        "unreadableGpus": [
            {"index": index, "reason": verdict.reason, "since": iso_time(verdict.since)}
            for index, verdict in snapshot.unreadable_gpus.items()
        ],
        "unusedPools": dict(layout.unused_pools),
        "topology": _topology(snapshot),
        "offers": {
            resource: _offer_report(snapshot, offer) for resource, offer in snapshot.offers.items()
        },
        "devices": _devices_report(snapshot),
        "remarks": [
            it.as_report() for it in (*describe_held_back(snapshot), *describe_capacity(capacities))
        ],
        "competingPlugins": dict(snapshot.competing_plugins),
        "registrationProblems": dict(snapshot.registration_problems),
    }


def status_report(snapshot: Snapshot, layout: Layout) -> dict[str, Any]:
    """Return the data of `explain_report`, and every lease with its holder."""
    held = defaultdict[_Held, list[Share]](list)
    for state in snapshot.gpus.values():
        for it in state.leases.values():
            key = str(it.share.resource), it.share.gpu, it.holder, it.resource_claim, it.sharers
            held[key].append(it.share)
    capacity = {
        gpu: Counter(share.resource for share in state.shares)
        for gpu, state in snapshot.gpus.items()
    }

    return {
        **explain_report(snapshot, layout),
        "leases": [
            {
                "resource": resource,
                "gpu": snapshot.gpus[gpu].gpu.index,
                "uuid": gpu,
                "shares": len(shares),
                "part": _part(snapshot.gpus[gpu].gpu, shares, capacity[gpu]),
                "holder": str(holder) if holder else None,
                **({"resourceClaim": str(claim)} if claim else {}),
                **({"sharers": [str(it) for it in sharers]} if sharers else {}),
                **(_pod_details(snapshot.pods.find(holder, None)) if holder else {}),
            }
            for (resource, gpu, holder, claim, sharers), shares in held.items()
        ],
    }


def _part(gpu: Gpu, shares: Sequence[Share], capacity: Mapping[ResourceName, int]) -> float | None:
    """Return the part of a GPU that shares are, `None` where it is unknown.

    Containers that take turns have a part each as if the GPU were divided among them.
    """
    first = shares[0]
    if first.interchangeable and (alike := capacity.get(first.resource)):
        part = len(shares) / alike
    elif gpu.memory and first.memory:
        part = sum(share.memory for share in shares) / gpu.memory
    else:
        return None
    return round(min(part, 1.0), 4)


def _offer_report(snapshot: Snapshot, offer: Offer) -> Mapping[str, int | str]:
    """Return what is free of a resource, and of that what is held back.

    The free devices are those of DRA: a number in `limits` counts devices there.
    """
    parts, resource = free_parts(snapshot, offer), offer.resource
    return {
        "free": sum(part.free for part in parts),
        "heldBack": sum(it.free for it in parts if resource in held_back_of(snapshot.gpus[it.gpu])),
        "largestRequest": largest_request(offer.rule.requests, parts),
        "requestRule": str(offer.rule.requests),
        **({"freeDevices": _free_devices(snapshot, offer)} if offer.api is Api.DRA else {}),
    }


def _free_devices(snapshot: Snapshot, offer: Offer) -> int:
    """Return the devices of DRA that a pod could still get a part of."""
    return sum(
        any(it.id not in taken for it in device.shares)
        for gpu in offer.by_gpu
        for state in (snapshot.gpus[gpu],)
        for taken in (availability_of(state).refused | state.leases.keys(),)
        for device in devices_of(state)
        if device.resource == offer.resource
    )


def _devices_report(snapshot: Snapshot) -> Mapping[str, Mapping[str, Any]]:
    """Return how many devices of each type DRA has, and what is free of them."""
    found: dict[str, dict[str, Any]] = {}
    for state in snapshot.gpus.values():
        taken = availability_of(state).refused | state.leases.keys()
        for it in devices_of(state):
            free = sum(share.id not in taken for share in it.shares)
            of_type = found.setdefault(it.type, {"devices": 0, "free": 0, "largest": {}})
            of_type["devices"] += 1
            of_type["free"] += free > 0
            if it.capacity_name is not None:
                largest = of_type["largest"].get(it.capacity_name, 0)
                of_type["largest"][it.capacity_name] = max(largest, free * it.unit)
    return found


def _pod_details(known: KnownPod | None) -> Mapping[str, str]:
    """Return the API server's data of a pod; an empty mapping for an unknown pod."""
    if known is None:
        return {}
    return {"podUid": known.uid, "podOwner": known.owner, "podPhase": known.phase}


def find_gpu(snapshot: Snapshot, name: str) -> GpuId:
    """Find a GPU by index, uuid or PCI bus id.

    Raises:
        MetagpuError: no GPU has this name; the message lists the GPUs of the node.
    """
    for gpu, state in snapshot.gpus.items():
        if name in (gpu, str(state.gpu.index)):
            return gpu
        with suppress(ValueError):
            if parse_bus_id(name) == state.gpu.pci_bus_id:
                return gpu

    known = ", ".join(str(state.gpu.index) for state in snapshot.gpus.values()) or "none"
    raise UnknownGpu(f"there is no GPU {name!r} here; there are: {known}")


def _time_of_day(at: float) -> float:
    """Return the time of day of a time of the event loop, whose clock is monotonic."""
    return time.time() - (time.monotonic() - at)


def _gpu_report(state: GpuState) -> Mapping[str, Any]:
    return {
        "index": state.gpu.index,
        "uuid": state.gpu.id,
        "product": state.gpu.name,
        "memoryMiB": None if state.gpu.memory is None else state.gpu.memory // MIB,
        "pciBusId": state.gpu.pci_bus_id or None,
        "numaNode": state.gpu.numa_node,
        "healthy": state.verdict.healthy,
        "reason": state.verdict.reason,
        "since": iso_time(state.verdict.since),
        "recovery": _recovery_report(state.verdict.recovery),
        "backends": list(dict.fromkeys(share.backend for share in state.shares)),
        "owner": state.owner,
        "api": str(state.api),
        "turn": _turn_report(state.present_turn) if state.present_turn else None,
        "cleaning": {it: iso_time(_time_of_day(at)) for it, at in state.cleaning.items()},
        "suspended": {backend: _pause_report(pause) for backend, pause in state.suspended.items()},
        "cordon": _pause_report(state.cordon) if state.cordon else None,
        "unheard": _pause_report(state.unheard) if state.unheard else None,
        "faults": [_fault_report(state, device) for device in state.mig_faults],
        "devices": [
            _device_report(state, share, it)
            for backend in state.provisioned.values()
            for share, it in backend.devices.items()
        ],
        "blocked": sorted(
            {
                *(
                    reason
                    for backend in state.provisioned.values()
                    for reason in backend.blocked.values()
                ),
                *state.paused_shares.values(),
            }
        ),
        "paused": sorted(set(state.paused_shares.values())),
        "waitsFor": waits_for(state),
    }


def _turn_report(it: OfferTurn) -> Mapping[str, str | float | bool]:
    return {
        "backend": it.backend,
        "withdrawn": it.withdrawn,
        "next": it.next,
        "nextIn": round(max(0.0, it.until - time.monotonic()), 1),
    }


def _device_report(state: GpuState, share: ShareId, it: HardwareDevice) -> Mapping[str, Any]:
    lease, placement = state.leases.get(share), it.placement
    return {
        "share": share,
        "holder": str(lease.holder) if lease and lease.holder else None,
        "device": it.device,
        "profile": profile_of(share),
        "placement": {"start": placement.start, "size": placement.size} if placement else None,
        "gpuInstance": it.gpu_instance,
        "computeInstance": it.compute_instance,
        "idle": it.idle,
    }


def _fault_report(state: GpuState, device: str) -> Mapping[str, Any]:
    """Return the fault of a MIG device, with shares if metagpu created the device."""
    verdict = state.mig_faults[device]
    return {
        "device": device,
        "shares": sorted(
            share
            for backend in state.provisioned.values()
            for share, it in backend.devices.items()
            if it.device == device
        ),
        "reason": verdict.reason,
        "since": iso_time(verdict.since),
    }


def _recovery_report(recovery: Recovery | None) -> Mapping[str, str | None] | None:
    """Return when a GPU's checks began to pass, and the time of its return."""
    if recovery is None:
        return None
    returns_at = None if recovery.returns_at is None else iso_time(recovery.returns_at)
    return {"since": iso_time(recovery.since), "returnsAt": returns_at}


def _pause_report(it: Pause) -> Mapping[str, str | bool]:
    return {"reason": it.reason, "since": iso_time(it.since), "reset": it.until_reset}


def _nvlink_peers(snapshot: Snapshot, gpu: GpuId) -> list[int]:
    """Return the indices of GPUs reached over NVLink, directly or through NVSwitches."""
    return [
        state.gpu.index
        for other, state in snapshot.gpus.items()
        if other != gpu and snapshot.topology.between(gpu, other).nvlinks
    ]


def _topology(snapshot: Snapshot) -> list[list[str]]:
    """Return the connection of every two GPUs as a matrix, in the order of the GPUs."""
    return [
        ["X" if a == b else str(snapshot.topology.between(a, b)) for b in snapshot.gpus]
        for a in snapshot.gpus
    ]


def _shares_report(snapshot: Snapshot, gpu: GpuId) -> dict[ResourceName, dict[str, int]]:
    state = snapshot.gpus[gpu]

    return {
        resource: {
            "capacity": len(offer.by_gpu[gpu]),
            # A lease on a share that is not offered any more is in no capacity.
            "held": sum(share.id in state.leases for share in offer.by_gpu[gpu]),
            "free": count_free(state, resource),
        }
        for resource, offer in snapshot.offers.items()
        if gpu in offer.by_gpu
    }
