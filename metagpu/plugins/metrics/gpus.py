"""Metrics of GPUs, resources, holders, sensors and usage; pure, for a thread."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache

from msgspec.structs import replace

from metagpu.core.availability.conflict import orphaned_leases
from metagpu.core.availability.exact import free_parts, held_back_of, largest_request
from metagpu.core.availability.reasons import availability_of
from metagpu.core.contracts.capabilities import MemoryGuard
from metagpu.core.contracts.sensors import GpuSensors, ThrottleReason
from metagpu.core.layout.layout import Layout
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.mig import profile_of
from metagpu.core.model.offers import RequestRule
from metagpu.core.model.shares import Holder
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.usage.accounting import ContainerUsage, GpuUsage
from metagpu.core.usage.annotations import effective_limit
from metagpu.core.usage.collector import NodeUsage
from metagpu.core.usage.enforcer import memory_guard_of
from metagpu.core.usage.report import ReportRules
from metagpu.plugins.metrics import families as f
from metagpu.plugins.metrics.families import backend_family
from metagpu.plugins.metrics.samples import MetricFamily, Sample


def gpu_label_values(gpu: Gpu) -> tuple[str, str]:
    """Return a GPU's labels: its index, and its uuid, which never changes."""
    return str(gpu.index), gpu.id


def snapshot_samples(snapshot: Snapshot, layout: Layout) -> Iterator[Sample]:
    """Yield the samples of all GPUs, and those of their backends."""
    pools = {assignment.gpu.id: assignment.pool or "" for assignment in layout.pool_assignments}

    for state in snapshot.gpus.values():
        yield from _gpu(state, pools.get(state.gpu.id, ""))
        yield from _holders(state)
        yield from _mig_devices(state)
    yield Sample(f.UNREADABLE_GPUS, (), len(snapshot.unreadable_gpus))
    yield from _resources(snapshot)
    for metric in layout.metrics(snapshot):
        gpu = gpu_label_values(snapshot.gpus[metric.gpu].gpu)
        yield Sample(backend_family(metric.kind), (*gpu, *metric.labels), metric.value)


def _gpu(state: GpuState, pool: str) -> Iterator[Sample]:
    gpu, me = state.gpu, gpu_label_values(state.gpu)
    backends = dict.fromkeys([*(share.backend for share in state.shares), *state.suspended])

    yield Sample(f.GPU_INFO, (*me, gpu.name, gpu.pci_bus_id, pool), 1)
    if gpu.memory is not None:
        yield Sample(f.GPU_MEMORY, me, gpu.memory)
    if gpu.reserved is not None:
        yield Sample(f.GPU_MEMORY_RESERVED, me, gpu.reserved)
    yield Sample(f.GPU_HEALTHY, me, state.verdict.healthy)
    if (fault := state.verdict.fault) is not None:
        yield Sample(f.GPU_FAULT, (*me, fault), 1)
    yield Sample(f.GPU_REPORTS_XIDS, me, state.unheard is None)
    if gpu.mig_enabled or state.mig_faults:
        yield Sample(f.GPU_UNHEALTHY_MIG_DEVICES, me, len(state.mig_faults))
    yield Sample(f.GPU_PAUSED, me, len(state.paused_shares))
    yield Sample(f.GPU_CORDONED, me, state.cordon is not None)
    yield Sample(f.GPU_ORPHANED, me, len(orphaned_leases(state.shares, state.leases)))
    if state.owner:
        yield Sample(f.GPU_OWNED, (*me, state.owner), 1)
    for backend in backends:
        yield Sample(f.GPU_READY, (*me, backend), backend not in state.suspended)


def _holders(state: GpuState) -> Iterator[Sample]:
    """Count the shares of each container, without leases of a holder unknown yet."""
    held = Counter(
        (lease.holder, lease.share.resource)
        for lease in state.leases.values()
        if lease.holder is not None
    )
    for (holder, resource), count in held.items():
        who = (holder.namespace, holder.pod, holder.container)
        yield Sample(f.CONTAINER_SHARES, (*who, *gpu_label_values(state.gpu), resource), count)


def _mig_devices(state: GpuState) -> Iterator[Sample]:
    """Yield the MIG device of each container that holds one, or a part of one."""
    found: dict[tuple[str, ...], None] = {}
    for backend in state.provisioned.values():
        for share, hardware_device in backend.devices.items():
            lease = state.leases.get(share)
            if lease is not None and (holder := lease.holder) is not None:
                who = (holder.namespace, holder.pod, holder.container)
                device = (
                    hardware_device.device,
                    str(hardware_device.gpu_instance),
                    profile_of(share),
                )
                found[(*who, *gpu_label_values(state.gpu), *device)] = None
    yield from (Sample(f.CONTAINER_MIG, labels, 1) for labels in found)


def _resources(snapshot: Snapshot) -> Iterator[Sample]:
    held = Counter(
        lease.share.resource for state in snapshot.gpus.values() for lease in state.leases.values()
    )

    for resource, offer in snapshot.offers.items():
        parts = {part.gpu: part for part in free_parts(snapshot, offer)}
        may_hold_back = offer.rule.requests is not RequestRule.ANY
        listed = free = held_back = 0
        for gpu, shares in offer.by_gpu.items():
            state, left = snapshot.gpus[gpu], parts[gpu].free
            me = (*gpu_label_values(state.gpu), resource)
            kept = left if resource in held_back_of(state) else 0
            unlisted = availability_of(state).unlisted
            listed += sum(share.id not in unlisted for share in shares)
            free, held_back = free + left, held_back + kept

            yield Sample(f.GPU_FREE, me, left)
            if may_hold_back:
                yield Sample(f.GPU_HELD_BACK, me, kept)
        yield Sample(f.RESOURCE_CAPACITY, (resource,), len(offer.shares))
        yield Sample(f.RESOURCE_ALLOCATABLE, (resource,), listed)
        yield Sample(f.RESOURCE_HELD, (resource,), held[resource])
        yield Sample(f.RESOURCE_FREE, (resource,), free)
        if may_hold_back:
            yield Sample(f.RESOURCE_HELD_BACK, (resource,), held_back)
        largest = largest_request(offer.rule.requests, list(parts.values()))
        yield Sample(f.RESOURCE_LARGEST_REQUEST, (resource,), largest)
        if resource in snapshot.competing_plugins:
            yield Sample(f.RESOURCE_OF_OTHER_PLUGIN, (resource,), 1)
        if resource in snapshot.registration_problems:
            yield Sample(f.RESOURCE_REGISTRATION_PROBLEM, (resource,), 1)


def sensor_samples(snapshot: Snapshot, readings: Mapping[GpuId, GpuSensors]) -> Iterator[Sample]:
    """Yield what each GPU reports: what it does not report is absent, and not zero."""
    for gpu, reading in readings.items():
        if (state := snapshot.gpus.get(gpu)) is not None:
            me = gpu_label_values(state.gpu)
            for family, labels, value in _values(reading):
                if value is not None:
                    yield Sample(family, (*me, *labels), value)


def _values(sensors: GpuSensors) -> Iterator[tuple[MetricFamily, tuple[str, ...], float | None]]:
    yield f.TEMPERATURE, (), sensors.temperature
    yield f.MEMORY_TEMPERATURE, (), sensors.memory_temperature
    yield f.POWER, (), sensors.power
    yield f.POWER_LIMIT, (), sensors.power_limit
    yield f.ENERGY, (), sensors.energy
    yield f.CLOCK, ("sm",), sensors.sm_clock
    yield f.CLOCK, ("memory",), sensors.memory_clock
    for reason in ThrottleReason if sensors.throttled is not None else ():
        yield f.THROTTLED, (reason,), reason in (sensors.throttled or ())
    yield f.ECC_ERRORS, ("corrected",), sensors.ecc_corrected
    yield f.ECC_ERRORS, ("uncorrected",), sensors.ecc_uncorrected
    for kind, count in sensors.nvlink_errors.items():
        yield f.NVLINK_ERRORS, (kind,), count
    yield f.PCIE_REPLAYS, (), sensors.pcie_replays


_PERCENT = 100


def rules_for_thread(rules: ReportRules, usage_now: NodeUsage) -> ReportRules:
    """Return rules for a thread: the driver's present limits, settings read once."""
    usages = (usage for gpu_usage in usage_now.gpus.values() for usage in gpu_usage.containers)
    limited = frozenset(map(_key, filter(rules.is_driver_limited, usages)))
    return replace(
        rules,
        settings=cache(rules.settings),
        is_driver_limited=lambda usage: _key(usage) in limited,
    )


def _key(usage: ContainerUsage) -> tuple[GpuId, Holder, str | None]:
    return usage.gpu, usage.holder, usage.pod_uid


def usage_samples(snapshot: Snapshot, usage_now: NodeUsage, rules: ReportRules) -> Iterator[Sample]:
    """Yield the usage of each container and GPU, zero where it uses nothing.

    A GPU that NVML could not read has no usage: unknown is not zero.
    """
    yield Sample(f.USAGE_TIME, (), usage_now.at)

    for gpu, gpu_usage in usage_now.gpus.items():
        if (state := snapshot.gpus.get(gpu)) is None:
            continue
        known = gpu not in usage_now.failures
        yield Sample(f.GPU_USAGE_KNOWN, gpu_label_values(state.gpu), known)
        if known:
            yield from _usage_of(state, gpu_usage, usage_now)
            for holder, usages in _by_holder(gpu_usage).items():
                yield from _container(snapshot, holder, usages, usage_now, rules)


def _usage_of(state: GpuState, gpu_usage: GpuUsage, usage_now: NodeUsage) -> Iterator[Sample]:
    me, utilization = gpu_label_values(state.gpu), usage_now.utilization.get(state.gpu.id)
    unauthorized = sum(process.process.memory or 0 for process in gpu_usage.unauthorized)

    authorized = sum(usage.memory for usage in gpu_usage.containers)
    yield Sample(f.GPU_MEMORY_USED, me, authorized + unauthorized)
    yield Sample(f.GPU_UNAUTHORIZED, me, len(gpu_usage.unauthorized))
    yield Sample(f.GPU_UNAUTHORIZED_MEMORY, me, unauthorized)
    if utilization is not None:
        yield Sample(f.GPU_UTILIZATION, me, min(1.0, sum(utilization.values()) / _PERCENT))


def _by_holder(gpu_usage: GpuUsage) -> dict[Holder, list[ContainerUsage]]:
    """Group usage by holder: a pod and its predecessor have the same name."""
    found: dict[Holder, list[ContainerUsage]] = {}
    for usage in gpu_usage.containers:
        found.setdefault(usage.holder, []).append(usage)
    return found


def _container(
    snapshot: Snapshot,
    holder: Holder,
    usages: list[ContainerUsage],
    usage_now: NodeUsage,
    rules: ReportRules,
) -> Iterator[Sample]:
    state = snapshot.gpus[usages[-1].gpu]
    me = (holder.namespace, holder.pod, holder.container, *gpu_label_values(state.gpu))
    processes = [process for usage in usages for process in usage.processes]
    in_force = effective_limit(usages[-1], snapshot, rules.settings(state.gpu.id))
    guard = memory_guard_of(usages[-1], rules.guards)
    enforced = guard is MemoryGuard.ENFORCER
    if enforced and rules.is_driver_limited(usages[-1]):
        guard = MemoryGuard.DRIVER
    backends = ",".join(sorted({share.backend for share in usages[-1].shares}))
    policy = str(in_force.settings.policy) if enforced else ""

    yield Sample(f.CONTAINER_INFO, (*me, backends, str(guard or ""), policy), 1)
    yield Sample(f.CONTAINER_PROCESSES, me, len(processes))
    yield Sample(f.CONTAINER_USED, me, sum(usage.memory for usage in usages))
    if (share := usages[-1].share_memory) is not None:
        yield Sample(f.CONTAINER_SHARE, me, share)
    if enforced and in_force.limit is not None:
        yield Sample(f.CONTAINER_LIMIT, me, in_force.limit)
    if (utilization := usage_now.utilization.get(state.gpu.id)) is not None:
        own = sum(utilization.get(process.pid, 0) for process in processes)
        yield Sample(f.CONTAINER_UTILIZATION, me, min(1.0, own / _PERCENT))
    if (overuse := rules.overuse(state.gpu.id, holder)) is not None:
        yield Sample(f.CONTAINER_OVER_SHARE, me, overuse.seconds)
