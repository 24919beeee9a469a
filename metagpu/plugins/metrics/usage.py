"""Metrics of GPU usage, from one collection; pure functions for a thread."""

from collections.abc import Iterator
from functools import cache

from msgspec.structs import replace

from metagpu.core.contracts.capabilities import Guard
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Holder
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.usage.accounting import ContainerUsage, GpuUsage
from metagpu.core.usage.annotations import effective_limit
from metagpu.core.usage.collector import NodeUsage
from metagpu.core.usage.enforcer import container_guard
from metagpu.core.usage.report import ReportRules
from metagpu.plugins.metrics import families as f
from metagpu.plugins.metrics.gpus import gpu_label_values
from metagpu.plugins.metrics.samples import Sample

_PERCENT = 100


def freeze_limits(rules: ReportRules, usage_now: NodeUsage) -> ReportRules:
    """Freeze the driver's limits for a thread, and keep settings once read."""
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
            yield from _gpu(state, gpu_usage, usage_now)
            for holder, usages in _by_holder(gpu_usage).items():
                yield from _container(snapshot, holder, usages, usage_now, rules)


def _gpu(state: GpuState, gpu_usage: GpuUsage, usage_now: NodeUsage) -> Iterator[Sample]:
    me, utilization = gpu_label_values(state.gpu), usage_now.utilization.get(state.gpu.id)
    unauthorized = sum(it.process.memory or 0 for it in gpu_usage.unauthorized)

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
    guard = container_guard(usages[-1], rules.guards)
    enforced = guard is Guard.ENFORCER
    if enforced and rules.is_driver_limited(usages[-1]):
        guard = Guard.DRIVER
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
