"""Reports of a snapshot: of `metagpu explain`, and the leases of `metagpu status`."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress

from metagpu.core.availability.exact import free_parts, held_back_of, largest_request
from metagpu.core.availability.reasons import (
    availability_of,
    count_free,
    reason_for_none,
    waits_for,
)
from metagpu.core.devices.devices import devices_of
from metagpu.core.errors import UnknownGpu
from metagpu.core.layout.layout import Layout, PoolAssignment
from metagpu.core.model.driver_roots import DriverRoots
from metagpu.core.model.gpu import MIB, Gpu, GpuId, parse_bus_id
from metagpu.core.model.mig import profile_of
from metagpu.core.model.offers import Api
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
from metagpu.core.reports.remarks import (
    capacity_report,
    describe_capacity,
    describe_empty,
    describe_held_back,
)
from metagpu.core.reports.schema.daemon import DriverRootsReport
from metagpu.core.reports.schema.gpus import (
    FaultReport,
    FreeCapacityReport,
    GpuReport,
    MigDeviceReport,
    PauseReport,
    PlacementReport,
    RecoveryReport,
    SharesReport,
    TurnReport,
)
from metagpu.core.reports.schema.status import (
    DeviceTypeReport,
    Explanation,
    LeaseReport,
    OfferReport,
    ResourceReport,
    UnreadableGpuReport,
)

_Held = tuple[str, GpuId, Holder | None, ResourceClaimRef | None, tuple[Holder, ...]]
"""One entry of the leases: resource, GPU, holder, ResourceClaim and the claim's other holders."""


def explain_report(snapshot: Snapshot, layout: Layout) -> Explanation:
    """Return the offers to the kubelet, and why each GPU is in its pool or in none."""
    assignments = {assignment.gpu.id: assignment for assignment in layout.pool_assignments}
    capacities = layout.free_capacity(snapshot)
    free = {each.gpu.id: capacity_report(each) for each in capacities}

    return Explanation(
        resources={
            resource: ResourceReport(
                capacity=len(offer.shares),
                allocatable=sum(
                    len(shares) - sum(share.id in unhealthy for share in shares)
                    for gpu, shares in offer.by_gpu.items()
                    for unhealthy in (availability_of(snapshot.gpus[gpu]).unlisted,)
                ),
            )
            for resource, offer in snapshot.offers.items()
        },
        gpus=[
            _gpu_report(snapshot, state, assignments.get(gpu), free.get(gpu))
            for gpu, state in snapshot.gpus.items()
        ],
        unreadable_gpus=[
            UnreadableGpuReport(index, verdict.reason, iso_time(verdict.since))
            for index, verdict in snapshot.unreadable_gpus.items()
        ],
        unused_pools=dict(layout.unused_pools),
        memory_policies=dict(layout.memory_policies),
        topology=_topology(snapshot),
        offers={
            resource: _offer_report(snapshot, offer) for resource, offer in snapshot.offers.items()
        },
        devices=_devices_report(snapshot),
        remarks=[
            remark.report()
            for remark in (
                *describe_empty(snapshot, layout),
                *describe_held_back(snapshot),
                *describe_capacity(capacities),
            )
        ],
        competing_plugins={str(name): by for name, by in snapshot.competing_plugins.items()},
        registration_problems={
            str(name): why for name, why in snapshot.registration_problems.items()
        },
    )


def lease_reports(snapshot: Snapshot) -> list[LeaseReport]:
    """Return the shares that containers hold, once for each holder, resource and GPU."""
    held = defaultdict[_Held, list[Share]](list)
    for state in snapshot.gpus.values():
        for lease in state.leases.values():
            key = (
                str(lease.share.resource),
                lease.share.gpu,
                lease.holder,
                lease.resource_claim,
                lease.sharers,
            )
            held[key].append(lease.share)
    capacity = {
        gpu: Counter(share.resource for share in state.shares)
        for gpu, state in snapshot.gpus.items()
    }

    found = []
    for (resource, gpu, holder, claim, sharers), shares in held.items():
        known = snapshot.pods.find(holder, None) if holder else None
        found.append(
            LeaseReport(
                resource=resource,
                gpu=snapshot.gpus[gpu].gpu.index,
                uuid=gpu,
                shares=len(shares),
                part=_part(snapshot.gpus[gpu].gpu, shares, capacity[gpu]),
                holder=str(holder) if holder else None,
                resource_claim=str(claim) if claim else None,
                sharers=[str(sharer) for sharer in sharers],
                pod_uid=known.uid if known else None,
                pod_owner=known.owner if known else None,
                pod_phase=known.phase if known else None,
            )
        )
    return found


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


def _offer_report(snapshot: Snapshot, offer: Offer) -> OfferReport:
    """Return what is free of a resource, and of that what is held back.

    The free devices are those of DRA: a number in `limits` counts devices there.
    """
    parts, resource = free_parts(snapshot, offer), offer.resource
    return OfferReport(
        free=sum(part.free for part in parts),
        held_back=sum(
            part.free for part in parts if resource in held_back_of(snapshot.gpus[part.gpu])
        ),
        largest_request=largest_request(offer.rule.requests, parts),
        request_rule=offer.rule.requests,
        free_devices=_free_devices(snapshot, offer) if offer.api is Api.DRA else None,
    )


def _free_devices(snapshot: Snapshot, offer: Offer) -> int:
    """Return the devices of DRA that a pod could still get a part of."""
    return sum(
        any(share.id not in taken for share in device.shares)
        for gpu in offer.by_gpu
        for state in (snapshot.gpus[gpu],)
        for taken in (availability_of(state).refused | state.leases.keys(),)
        for device in devices_of(state)
        if device.resource == offer.resource
    )


def _devices_report(snapshot: Snapshot) -> dict[str, DeviceTypeReport]:
    """Return how many devices of each type DRA has, and what is free of them."""
    devices, open_devices = Counter[str](), Counter[str]()
    largest: dict[str, dict[str, int]] = {}
    for state in snapshot.gpus.values():
        taken = availability_of(state).refused | state.leases.keys()
        for device in devices_of(state):
            free = sum(share.id not in taken for share in device.shares)
            devices[device.type] += 1
            open_devices[device.type] += free > 0
            of_type = largest.setdefault(device.type, {})
            if device.capacity_name is not None:
                known = of_type.get(device.capacity_name, 0)
                of_type[device.capacity_name] = max(known, free * device.unit)
    return {
        kind: DeviceTypeReport(count, open_devices[kind], largest[kind])
        for kind, count in devices.items()
    }


def roots_report(roots: DriverRoots) -> DriverRootsReport:
    """Return the folders of the driver as a report has them."""
    return DriverRootsReport(
        driver_root=roots.driver.host,
        container_driver_root=roots.driver.here,
        dev_root=roots.dev.host,
        container_dev_root=roots.dev.here,
        container_host_root=roots.host.here,
        library=roots.library,
        reason=roots.reason,
    )


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


def _gpu_report(
    snapshot: Snapshot,
    state: GpuState,
    assignment: PoolAssignment | None,
    free_capacity: FreeCapacityReport | None,
) -> GpuReport:
    gpu, verdict, provisioned = state.gpu, state.verdict, state.provisioned.values()
    paused = sorted(set(state.paused_shares.values()))
    blocked = {reason for backend in provisioned for reason in backend.blocked.values()}
    return GpuReport(
        index=gpu.index,
        uuid=gpu.id,
        product=gpu.name,
        memory_mib=None if gpu.memory is None else gpu.memory // MIB,
        pci_bus_id=gpu.pci_bus_id or None,
        numa_node=gpu.numa_node,
        healthy=verdict.healthy,
        reason=verdict.reason,
        since=iso_time(verdict.since),
        recovery=_recovery_report(verdict.recovery),
        backends=list(dict.fromkeys(share.backend for share in state.shares)),
        owner=state.owner,
        api=str(state.api),
        turn=_turn_report(state.present_turn) if state.present_turn else None,
        cleaning={
            backend: iso_time(_time_of_day(at)) for backend, at in state.cleanup.since.items()
        },
        suspended={backend: _pause_report(pause) for backend, pause in state.suspended.items()},
        cordon=_pause_report(state.cordon) if state.cordon else None,
        unheard=_pause_report(state.unheard) if state.unheard else None,
        faults=[_fault_report(state, device) for device in state.mig_faults],
        devices=[
            _device_report(state, share, device)
            for backend in provisioned
            for share, device in backend.devices.items()
        ],
        blocked=sorted({*blocked, *paused}),
        paused=paused,
        waits_for=waits_for(state),
        nvlink_peers=_nvlink_peers(snapshot, gpu.id),
        pool=assignment.pool if assignment else None,
        pool_reason=assignment.reason if assignment else "not assigned yet",
        shares=_shares_report(snapshot, gpu.id),
        free_capacity=free_capacity,
    )


def _turn_report(turn: OfferTurn) -> TurnReport:
    next_in = round(max(0.0, turn.until - time.monotonic()), 1)
    return TurnReport(turn.backend, turn.withdrawn, turn.next, next_in)


def _device_report(state: GpuState, share: ShareId, device: HardwareDevice) -> MigDeviceReport:
    lease, place = state.leases.get(share), device.placement
    return MigDeviceReport(
        share=share,
        holder=str(lease.holder) if lease and lease.holder else None,
        device=device.device,
        profile=profile_of(share),
        placement=PlacementReport(place.start, place.size) if place else None,
        gpu_instance=device.gpu_instance,
        compute_instance=device.compute_instance,
        idle=device.idle,
    )


def _fault_report(state: GpuState, device: str) -> FaultReport:
    """Return the fault of a MIG device, with shares if metagpu created the device."""
    verdict = state.mig_faults[device]
    shares = sorted(
        share
        for backend in state.provisioned.values()
        for share, hardware_device in backend.devices.items()
        if hardware_device.device == device
    )
    return FaultReport(device, list(shares), verdict.reason, iso_time(verdict.since))


def _recovery_report(recovery: Recovery | None) -> RecoveryReport | None:
    """Return when a GPU's checks began to pass, and the time of its return."""
    if recovery is None:
        return None
    returns_at = None if recovery.returns_at is None else iso_time(recovery.returns_at)
    return RecoveryReport(iso_time(recovery.since), returns_at)


def _pause_report(pause: Pause) -> PauseReport:
    return PauseReport(pause.reason, iso_time(pause.since), pause.until_reset)


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


def _shares_report(snapshot: Snapshot, gpu: GpuId) -> dict[str, SharesReport]:
    state = snapshot.gpus[gpu]

    return {
        resource: SharesReport(
            capacity=len(offer.by_gpu[gpu]),
            # A lease on a share that is not offered any more is in no capacity.
            held=sum(share.id in state.leases for share in offer.by_gpu[gpu]),
            free=count_free(state, resource),
            reason=reason_for_none(state, offer.ids[gpu]),
        )
        for resource, offer in snapshot.offers.items()
        if gpu in offer.by_gpu
    }
