"""Reports of GPU usage as plain data, for `mgctl`.

Memory is in MiB, utilization in percent; `None` where the driver does not report the value.
"""

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from metagpu.core.config.memory import MemoryEnforcement
from metagpu.core.contracts.capabilities import MemoryGuard
from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.mig import profile_of
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.quantities import iso_time
from metagpu.core.model.shares import HardwareDevice, Holder, ResourceName, Share, ShareId
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.usage.accounting import (
    ContainerUsage,
    GpuUsage,
    ProcessUsage,
    UnauthorizedProcess,
)
from metagpu.core.usage.annotations import effective_limit
from metagpu.core.usage.collector import NodeUsage
from metagpu.core.usage.enforcer import memory_guard_of


class ReportRules(msgspec.Struct, frozen=True):
    """Memory settings and guards of this node.

    Attributes:
        settings: returns the memory settings of a GPU's pool.
        guards: the guard of each backend's containers, by the backend's name.
        is_driver_limited: returns whether the driver limits a container on a GPU.
    """

    settings: Callable[[GpuId], MemoryEnforcement]
    guards: Mapping[str, MemoryGuard]
    is_driver_limited: Callable[[ContainerUsage], bool] = lambda _: False


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


def usage_report(snapshot: Snapshot, node_usage: NodeUsage, rules: ReportRules) -> dict[str, Any]:
    """Return the usage of all containers and GPUs, and the unauthorized processes."""
    usages = [usage for account in node_usage.gpus.values() for usage in account.containers]
    unauthorized = [it for account in node_usage.gpus.values() for it in account.unauthorized]

    return {
        "gpus": [
            _gpu_report(state, _gpu_totals(state, node_usage), node_usage, rules)
            for state in snapshot.gpus.values()
        ],
        "containers": _containers_report(snapshot, usages, node_usage, rules),
        "unauthorized": [_unauthorized_report(it, snapshot, node_usage) for it in unauthorized],
        "warnings": list(node_usage.warnings),
    }


def pod_report(
    snapshot: Snapshot, node_usage: NodeUsage, rules: ReportRules, pod: RequestingPod
) -> dict[str, Any]:
    """Return the usage of one pod, in the shape of `usage_report`.

    The report has the GPUs of which the pod holds shares, with the pod's own usage and shares. The
    pids are those of the pod's containers.
    """
    usages = [
        usage for it in node_usage.gpus.values() for usage in it.containers if pod.owns(usage)
    ]
    containers = _containers_report(snapshot, usages, node_usage, rules)

    for container in containers:
        for part in container["gpus"]:
            for process in part["processes"]:
                process["pid"] = process["containerPid"]
    return {
        "gpus": [
            _gpu_report_for_pod(state, its, node_usage, rules)
            for gpu, state in snapshot.gpus.items()
            if (its := [usage for usage in usages if usage.gpu == gpu])
        ],
        "containers": containers,
        "unauthorized": [],
        "warnings": [],
    }


def without_processes(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `usage_report` with the number of processes in place of the processes."""
    return {
        **report,
        "containers": [
            {
                **container,
                "gpus": [{**it, "processes": len(it["processes"])} for it in container["gpus"]],
            }
            for container in report["containers"]
        ],
        "unauthorized": len(report["unauthorized"]),
    }


class _GpuTotals(msgspec.Struct, frozen=True):
    """Totals of a GPU, or of one pod on it: shares, memory, and utilization by pid."""

    held: Container[ShareId]
    memory: int
    utilization: Mapping[int, int] | None


def _gpu_totals(state: GpuState, node_usage: NodeUsage) -> _GpuTotals:
    """Return the totals of a GPU."""
    account = node_usage.gpus.get(state.gpu.id, GpuUsage(state.gpu.id))
    unauthorized = sum(
        unauthorized_process.process.memory or 0 for unauthorized_process in account.unauthorized
    )
    memory = sum(usage.memory for usage in account.containers) + unauthorized
    return _GpuTotals(state.leases, memory, node_usage.utilization.get(state.gpu.id))


def _pod_totals(
    state: GpuState, usages: Sequence[ContainerUsage], node_usage: NodeUsage
) -> _GpuTotals:
    """Return the totals of one pod on a GPU."""
    held = {share.id for usage in usages for share in usage.shares}
    busy = node_usage.utilization.get(state.gpu.id)
    pids = [process.pid for usage in usages for process in usage.processes]
    own = None if busy is None else {pid: busy.get(pid, 0) for pid in pids}
    return _GpuTotals(held, sum(usage.memory for usage in usages), own)


def _gpu_report(
    state: GpuState, use: _GpuTotals, node_usage: NodeUsage, rules: ReportRules
) -> dict[str, Any]:
    gpu, busy = state.gpu, use.utilization
    failure = node_usage.failures.get(gpu.id)

    return {
        "index": gpu.index,
        "uuid": gpu.id,
        "product": gpu.name,
        "memoryMiB": None if gpu.memory is None else _mib(gpu.memory),
        "usableMiB": None if gpu.memory is None else _mib(gpu.memory - (gpu.reserved or 0)),
        "usedMiB": None if failure else _mib(use.memory),
        "utilization": None if busy is None else min(100, sum(busy.values())),
        "shares": _resources_report(state, use.held),
        "healthy": state.verdict.healthy,
        "reason": state.verdict.reason,
        "since": iso_time(state.verdict.since),
        "faults": {device: verdict.reason for device, verdict in state.mig_faults.items()},
        "cordon": state.cordon and state.cordon.reason,
        "policy": str(rules.settings(gpu.id).policy),
        "failure": failure,
    }


def _gpu_report_for_pod(
    state: GpuState, usages: Sequence[ContainerUsage], node_usage: NodeUsage, rules: ReportRules
) -> dict[str, Any]:
    """Return a GPU's report for a pod, without cordon and without other pods' devices."""
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
    names = {it["device"] for it in devices}
    details = _gpu_report(state, _pod_totals(state, usages, node_usage), node_usage, rules)
    faults = {device: reason for device, reason in details["faults"].items() if device in names}
    ends = [it.start + it.size for profile in state.gpu.mig_profiles for it in profile.placements]
    slices = max(ends, default=0) if devices else 0
    return {**details, "cordon": None, "faults": faults, "devices": devices, "slices": slices}


def _device_report(
    state: GpuState, share: ShareId, holder: Holder, it: HardwareDevice
) -> dict[str, Any]:
    """Return a MIG device that a container holds, or holds a part of."""
    place, fault = it.placement, state.mig_faults.get(it.device)
    return {
        "share": share,
        "container": holder.container,
        "device": it.device,
        "profile": profile_of(share),
        "placement": {"start": place.start, "size": place.size} if place else None,
        "fault": {"reason": fault.reason, "since": iso_time(fault.since)} if fault else None,
    }


def _resources_report(state: GpuState, held: Container[ShareId]) -> list[dict[str, Any]]:
    by_resource: dict[str, list[Share]] = {}
    for share in state.shares:
        by_resource.setdefault(share.resource, []).append(share)

    return [
        {
            "resource": resource,
            "capacity": len(shares),
            "held": sum(share.id in held for share in shares),
            "shareMiB": _mib(shares[0].memory),
        }
        for resource, shares in by_resource.items()
    ]


def _containers_report(
    snapshot: Snapshot, usages: Sequence[ContainerUsage], node_usage: NodeUsage, rules: ReportRules
) -> list[dict[str, Any]]:
    found: dict[tuple[Holder, str | None], list[ContainerUsage]] = {}
    details = {usage.holder: usage.pod_uid for usage in usages if usage.pod_uid}
    for usage in usages:
        # The uid is known on GPUs that the container uses, and is the same on its other GPUs.
        uid = usage.pod_uid or details.get(usage.holder)
        if uid is None and (pod := snapshot.pods.find(usage.holder, None)) is not None:
            uid = pod.uid
        found.setdefault((usage.holder, uid), []).append(usage)
    capacity = {
        gpu: Counter(share.resource for share in snapshot.gpus[gpu].shares)
        for gpu in {usage.gpu for usage in usages}
    }

    return [
        {
            "namespace": holder.namespace,
            "pod": holder.pod,
            "container": holder.container,
            "podUid": uid,
            **_pod_details(snapshot.pods.find(holder, uid)),
            "gpus": [
                _container_gpu_report(snapshot, its, node_usage, rules, capacity[its.gpu])
                for its in parts
            ],
        }
        for (holder, uid), parts in sorted(found.items(), key=lambda item: str(item[0]))
    ]


def _pod_details(pod: KnownPod | None) -> dict[str, Any]:
    """Return the API server's data of a pod; `None` values for an unknown pod."""
    return {"podOwner": pod and (pod.owner or None), "podPhase": pod and (pod.phase or None)}


def _container_gpu_report(
    snapshot: Snapshot,
    usage: ContainerUsage,
    node_usage: NodeUsage,
    rules: ReportRules,
    capacities: Mapping[ResourceName, int],
) -> dict[str, Any]:
    """Return the usage of one container on one GPU.

    `capacities` are the shares of each resource of the GPU.
    """
    state, guard = snapshot.gpus[usage.gpu], memory_guard_of(usage, rules.guards)
    effective = effective_limit(usage, snapshot, rules.settings(usage.gpu))
    enforced = guard is MemoryGuard.ENFORCER
    limit = effective.limit if enforced else None
    if enforced and rules.is_driver_limited(usage):
        guard = MemoryGuard.DRIVER
    resource = usage.shares[0].resource
    capacity = capacities.get(resource, 0)
    busy = node_usage.utilization.get(usage.gpu)
    own = None if busy is None else sum(busy.get(p.pid, 0) for p in usage.processes)

    return {
        "index": state.gpu.index,
        "uuid": usage.gpu,
        "resource": resource,
        "shares": len(usage.shares),
        "capacity": capacity,
        "shareMiB": None if usage.share_memory is None else _mib(usage.share_memory),
        "limitMiB": None if limit is None else _mib(limit),
        "usedMiB": None if usage.gpu in node_usage.failures else _mib(usage.memory),
        "overLimit": limit is not None and usage.memory > limit,
        "utilization": own,
        # In percent of the container's part of the GPU: above 100 where others leave time.
        "relativeUtilization": (
            None if own is None else round(own * max(capacity, 1) / len(usage.shares))
        ),
        "guard": guard and str(guard),
        "policy": str(effective.settings.policy) if enforced else None,
        "processes": [_process_report(p, busy, node_usage) for p in usage.processes],
    }


def _unauthorized_report(
    unauthorized_process: UnauthorizedProcess, snapshot: Snapshot, node_usage: NodeUsage
) -> dict[str, Any]:
    holder = unauthorized_process.holder

    return {
        "index": snapshot.gpus[unauthorized_process.gpu].gpu.index,
        "uuid": unauthorized_process.gpu,
        "namespace": holder and holder.namespace,
        "pod": holder and holder.pod,
        "container": holder and holder.container,
        "reason": unauthorized_process.reason,
        **_process_report(
            unauthorized_process.process,
            node_usage.utilization.get(unauthorized_process.gpu),
            node_usage,
        ),
    }


def _process_report(
    process: ProcessUsage, busy: Mapping[int, int] | None, node_usage: NodeUsage
) -> dict[str, Any]:
    details = node_usage.process_details.get(process.identity) if process.identity else None

    return {
        "pid": process.pid,
        "containerPid": details and details.inner_pid,
        "memoryMiB": None if process.memory is None else _mib(process.memory),
        "utilization": None if busy is None else busy.get(process.pid, 0),
        "user": details and ("root" if details.uid == 0 else str(details.uid)),
        "command": details and list(details.command),
        "startedAt": details
        and datetime.fromtimestamp(details.started_at, UTC).isoformat("T", "seconds"),
        "hostMemoryMiB": details and _mib(details.memory),
        "cpuSeconds": details and round(details.cpu, 2),
    }


def _mib(amount: int) -> int:
    return amount // MIB
