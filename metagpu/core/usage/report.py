"""Reports of GPU usage, for `mgctl`.

Memory is in MiB, utilization in percent; `None` where the driver does not report the value.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET
from msgspec.structs import asdict, replace

from metagpu.core.config.memory import MemoryEnforcement
from metagpu.core.contracts.capabilities import MemoryGuard
from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.mig import profile_of
from metagpu.core.model.quantities import iso_time
from metagpu.core.model.shares import HardwareDevice, Holder, Share, ShareId
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.reports.schema.gpus import (
    DatedReason,
    HeldDeviceReport,
    OfferedSharesReport,
    PlacementReport,
    UsedGpuReport,
)
from metagpu.core.reports.schema.usage import (
    ContainerGpuReport,
    ContainerReport,
    ProcessReport,
    UnauthorizedReport,
    UsageReport,
)
from metagpu.core.usage.accounting import (
    ContainerUsage,
    GpuUsage,
    HeldParts,
    ProcessUsage,
    UnauthorizedProcess,
)
from metagpu.core.usage.annotations import effective_limit
from metagpu.core.usage.collector import NodeUsage
from metagpu.core.usage.compute import Overuse
from metagpu.core.usage.enforcer import memory_guard_of
from metagpu.core.usage.policy import borrowed_memory


class ReportRules(msgspec.Struct, frozen=True):
    """Memory settings and guards of this node.

    Attributes:
        settings: returns the memory settings of a GPU's pool.
        guards: the guard of each backend's containers, by the backend's name.
        is_driver_limited: returns whether the driver limits a container on a GPU.
        overuse: returns how a container's use of a GPU's time compares with its shares, `None`
            where its pool does not ask for that.
    """

    settings: Callable[[GpuId], MemoryEnforcement]
    guards: Mapping[str, MemoryGuard]
    is_driver_limited: Callable[[ContainerUsage], bool] = lambda _: False
    overuse: Callable[[GpuId, Holder], Overuse | None] = lambda *_: None


class RequestingPod(msgspec.Struct, frozen=True):
    """The pod that a report is for; the uid distinguishes it from an earlier one."""

    namespace: str
    name: str
    uid: str

    def owns(self, usage: ContainerUsage) -> bool:
        """Return whether a usage is this pod's: by uid, or by name if no uid is known."""
        holder = usage.holder
        return (holder.namespace, holder.pod) == (self.namespace, self.name) and (
            usage.pod_uid in (None, self.uid)
        )


def usage_report(snapshot: Snapshot, node_usage: NodeUsage, rules: ReportRules) -> UsageReport:
    """Return the usage of all containers and GPUs, and the unauthorized processes."""
    usages = [usage for account in node_usage.gpus.values() for usage in account.containers]
    unauthorized = [
        process for account in node_usage.gpus.values() for process in account.unauthorized
    ]

    return UsageReport(
        at=node_usage.at,
        gpus=[
            _gpu_report(state, _gpu_totals(state, node_usage), node_usage, rules)
            for state in snapshot.gpus.values()
        ],
        containers=_containers_report(snapshot, usages, node_usage, rules),
        unauthorized=[
            _unauthorized_report(process, snapshot, node_usage) for process in unauthorized
        ],
        warnings=list(node_usage.warnings),
    )


def pod_report(
    snapshot: Snapshot, node_usage: NodeUsage, rules: ReportRules, pod: RequestingPod
) -> UsageReport:
    """Return the usage of one pod, in the shape of `usage_report`.

    The report has the GPUs of which the pod holds shares, with the pod's own usage and shares. The
    pids are those of the pod's containers.
    """
    usages = [
        usage for gpu in node_usage.gpus.values() for usage in gpu.containers if pod.owns(usage)
    ]

    return UsageReport(
        at=node_usage.at,
        gpus=[
            _gpu_report_for_pod(state, its, node_usage, rules)
            for gpu, state in snapshot.gpus.items()
            if (its := [usage for usage in usages if usage.gpu == gpu])
        ],
        containers=[
            replace(report, gpus=list(map(_with_own_pids, report.gpus)))
            for report in _containers_report(snapshot, usages, node_usage, rules)
        ],
        unauthorized=[],
        warnings=[],
    )


def _with_own_pids(part: ContainerGpuReport) -> ContainerGpuReport:
    """Return a part with the pids of the container's namespace, never the host's."""
    own = [replace(process, pid=process.container_pid) for process in part.known_processes]
    return replace(part, processes=own)


def without_processes(report: UsageReport) -> UsageReport:
    """Return a `usage_report` with the number of processes in place of the processes."""
    return replace(
        report,
        containers=[
            replace(
                container,
                gpus=[replace(gpu, processes=len(gpu.known_processes)) for gpu in container.gpus],
            )
            for container in report.containers
        ],
        unauthorized=len(report.known_unauthorized),
    )


class _GpuTotals(msgspec.Struct, frozen=True):
    """Totals of a GPU, or of one pod on it: shares, memory, utilization by pid."""

    held: Container[ShareId]
    part: float
    memory: int
    utilization: Mapping[int, int] | None


def _gpu_totals(state: GpuState, node_usage: NodeUsage) -> _GpuTotals:
    """Return the totals of a GPU."""
    account = node_usage.gpus.get(state.gpu.id, GpuUsage(state.gpu.id))
    unauthorized = sum(
        unauthorized_process.process.memory or 0 for unauthorized_process in account.unauthorized
    )
    memory = sum(usage.memory for usage in account.containers) + unauthorized
    return _GpuTotals(
        state.leases, HeldParts(state).of_leases(), memory, node_usage.utilization.get(state.gpu.id)
    )


def _pod_totals(
    state: GpuState, usages: Sequence[ContainerUsage], node_usage: NodeUsage
) -> _GpuTotals:
    """Return the totals of one pod on a GPU."""
    held = {share.id for usage in usages for share in usage.shares}
    busy = node_usage.utilization.get(state.gpu.id)
    pids = [process.pid for usage in usages for process in usage.processes]
    own = None if busy is None else {pid: busy.get(pid, 0) for pid in pids}
    part = sum(map(HeldParts(state).of_container, usages))
    return _GpuTotals(held, part, sum(usage.memory for usage in usages), own)


def _gpu_report(
    state: GpuState, use: _GpuTotals, node_usage: NodeUsage, rules: ReportRules
) -> UsedGpuReport:
    gpu, busy = state.gpu, use.utilization
    failure = node_usage.failures.get(gpu.id)

    return UsedGpuReport(
        index=gpu.index,
        uuid=gpu.id,
        product=gpu.name,
        memory_mib=None if gpu.memory is None else _mib(gpu.memory),
        usable_mib=None if gpu.memory is None else _mib(gpu.memory - (gpu.reserved or 0)),
        used_mib=None if failure else _mib(use.memory),
        utilization=None if busy is None else min(100, sum(busy.values())),
        shares=_resources_report(state, use.held),
        held_part=round(use.part, 4),
        healthy=state.verdict.healthy,
        reason=state.verdict.reason,
        since=iso_time(state.verdict.since),
        faults={device: verdict.reason for device, verdict in state.mig_faults.items()},
        cordon=state.cordon.reason if state.cordon else None,
        suspended={backend: pause.reason for backend, pause in state.suspended.items()},
        policy=str(rules.settings(gpu.id).policy),
        failure=failure,
    )


def _gpu_report_for_pod(
    state: GpuState, usages: Sequence[ContainerUsage], node_usage: NodeUsage, rules: ReportRules
) -> UsedGpuReport:
    """Return a GPU's report for a pod, without what concerns other pods."""
    provisioned = {
        share: device
        for backend in state.provisioned.values()
        for share, device in backend.devices.items()
    }
    own = {
        share.id: (usage.holder, provisioned[share.id])
        for usage in usages
        for share in usage.shares
        if share.id in provisioned
    }
    devices = [_device_report(state, share, *of_share) for share, of_share in own.items()]
    names = {device.device for device in devices}
    details = _gpu_report(state, _pod_totals(state, usages, node_usage), node_usage, rules)
    faults = {device: reason for device, reason in details.faults.items() if device in names}
    ends = [placement.end for profile in state.gpu.mig_profiles for placement in profile.placements]
    slices = max(ends, default=0) if devices else 0
    return replace(
        details, cordon=None, suspended={}, faults=faults, devices=devices, slices=slices
    )


def _device_report(
    state: GpuState, share: ShareId, holder: Holder, device: HardwareDevice
) -> HeldDeviceReport:
    """Return a MIG device that a container holds, or holds a part of."""
    place, fault = device.placement, state.mig_faults.get(device.device)
    return HeldDeviceReport(
        share=share,
        container=holder.container,
        device=device.device,
        profile=profile_of(share),
        placement=PlacementReport(place.start, place.size) if place else None,
        fault=DatedReason(fault.reason, iso_time(fault.since)) if fault else None,
    )


def _resources_report(state: GpuState, held: Container[ShareId]) -> list[OfferedSharesReport]:
    by_resource: dict[str, list[Share]] = {}
    for share in state.shares:
        by_resource.setdefault(share.resource, []).append(share)

    return [
        OfferedSharesReport(
            resource=resource,
            capacity=len(shares),
            held=sum(share.id in held for share in shares),
            share_mib=_mib(shares[0].memory),
        )
        for resource, shares in by_resource.items()
    ]


def _containers_report(
    snapshot: Snapshot, usages: Sequence[ContainerUsage], node_usage: NodeUsage, rules: ReportRules
) -> list[ContainerReport]:
    found: dict[tuple[Holder, str | None], list[ContainerUsage]] = {}
    details = {usage.holder: usage.pod_uid for usage in usages if usage.pod_uid}
    for usage in usages:
        # The uid is known on GPUs that the container uses, and is the same on its other GPUs.
        uid = usage.pod_uid or details.get(usage.holder)
        if uid is None and (pod := snapshot.pods.find(usage.holder, None)) is not None:
            uid = pod.uid
        found.setdefault((usage.holder, uid), []).append(usage)
    measures = {gpu: HeldParts(snapshot.gpus[gpu]) for gpu in {usage.gpu for usage in usages}}

    reports = []
    for (holder, uid), parts in sorted(found.items(), key=lambda item: str(item[0])):
        known = snapshot.pods.find(holder, uid)
        reports.append(
            ContainerReport(
                namespace=holder.namespace,
                pod=holder.pod,
                container=holder.container,
                pod_uid=uid,
                pod_owner=(known.owner or None) if known else None,
                pod_phase=(known.phase or None) if known else None,
                gpus=[
                    _container_gpu_report(snapshot, its, node_usage, rules, measures[its.gpu])
                    for its in parts
                ],
            )
        )
    return reports


def _container_gpu_report(
    snapshot: Snapshot,
    usage: ContainerUsage,
    node_usage: NodeUsage,
    rules: ReportRules,
    measure: HeldParts,
) -> ContainerGpuReport:
    """Return the usage of one container on one GPU."""
    state, guard = snapshot.gpus[usage.gpu], memory_guard_of(usage, rules.guards)
    effective = effective_limit(usage, snapshot, rules.settings(usage.gpu))
    enforced = guard is MemoryGuard.ENFORCER
    limit = effective.limit if enforced else None
    lends = effective.settings.burst is not None
    if enforced and rules.is_driver_limited(usage):
        guard = MemoryGuard.DRIVER
    resource, part = usage.shares[0].resource, measure.of_container(usage)
    busy = node_usage.utilization.get(usage.gpu)
    own = None if busy is None else sum(busy.get(p.pid, 0) for p in usage.processes)
    overuse = rules.overuse(usage.gpu, usage.holder)

    return ContainerGpuReport(
        index=state.gpu.index,
        uuid=usage.gpu,
        resource=resource,
        shares=len(usage.shares),
        capacity=measure.numbers[resource],
        part=round(part, 4),
        share_mib=None if usage.share_memory is None else _mib(usage.share_memory),
        limit_mib=None if limit is None else _mib(limit),
        used_mib=None if usage.gpu in node_usage.failures else _mib(usage.memory),
        over_limit=limit is not None and usage.memory > limit,
        utilization=own,
        # In percent of the container's part of the GPU: above 100 where others leave time.
        relative_utilization=(None if own is None else round(own / part) if part else own),
        guard=str(guard) if guard else None,
        policy=str(effective.settings.policy) if enforced else None,
        processes=[_process_report(process, busy, node_usage) for process in usage.processes],
        borrowed_mib=_mib(borrowed_memory((usage, effective))) if enforced and lends else UNSET,
        over_share_seconds=round(overuse.lasting) if overuse and overuse.lasting else None,
    )


def _unauthorized_report(
    unauthorized_process: UnauthorizedProcess, snapshot: Snapshot, node_usage: NodeUsage
) -> UnauthorizedReport:
    holder, gpu = unauthorized_process.holder, unauthorized_process.gpu
    busy = node_usage.utilization.get(gpu)

    return UnauthorizedReport(
        **asdict(_process_report(unauthorized_process.process, busy, node_usage)),
        index=snapshot.gpus[gpu].gpu.index,
        uuid=gpu,
        namespace=holder.namespace if holder else None,
        pod=holder.pod if holder else None,
        container=holder.container if holder else None,
        reason=unauthorized_process.reason,
    )


def _process_report(
    process: ProcessUsage, busy: Mapping[int, int] | None, node_usage: NodeUsage
) -> ProcessReport:
    details = node_usage.process_details.get(process.identity) if process.identity else None
    started = datetime.fromtimestamp(details.started_at, UTC) if details else None

    return ProcessReport(
        pid=process.pid,
        container_pid=details.inner_pid if details else None,
        memory_mib=None if process.memory is None else _mib(process.memory),
        utilization=None if busy is None else busy.get(process.pid, 0),
        user=("root" if details.uid == 0 else str(details.uid)) if details else None,
        command=list(details.command) if details else None,
        started_at=started.isoformat("T", "seconds") if started else None,
        host_memory_mib=_mib(details.memory) if details else None,
        cpu_seconds=round(details.cpu, 2) if details else None,
    )


def _mib(amount: int) -> int:
    return amount // MIB
