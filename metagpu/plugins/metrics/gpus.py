"""Metrics of a snapshot: GPUs, resources and holders; pure functions for a thread."""

from collections import Counter
from collections.abc import Iterator

from metagpu.core.layout.layout import Layout
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.mig import profile_of
from metagpu.core.model.offers import RequestRule, largest_request
from metagpu.core.model.shares import Share
from metagpu.core.model.snapshot import GpuState, Snapshot, free_parts
from metagpu.plugins.metrics import families as f
from metagpu.plugins.metrics.families import backend_family
from metagpu.plugins.metrics.samples import Sample


def gpu_label_values(gpu: Gpu) -> tuple[str, str]:
    """Return a GPU's labels: its index, and its uuid, which never changes."""
    return str(gpu.index), gpu.id


def snapshot_samples(snapshot: Snapshot, layout: Layout) -> Iterator[Sample]:
    """Yield the samples of all GPUs, and those of their backends."""
    pools = {it.gpu.id: it.pool or "" for it in layout.pool_assignments}

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
    yield Sample(f.GPU_ORPHANED, me, len(state.orphaned_leases))
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
        for share, it in backend.devices.items():
            lease = state.leases.get(share)
            if lease is not None and (holder := lease.holder) is not None:
                who = (holder.namespace, holder.pod, holder.container)
                device = (it.device, str(it.gpu_instance), profile_of(share))
                found[(*who, *gpu_label_values(state.gpu), *device)] = None
    yield from (Sample(f.CONTAINER_MIG, labels, 1) for labels in found)


def _resources(snapshot: Snapshot) -> Iterator[Sample]:
    held = Counter(
        lease.share.resource for state in snapshot.gpus.values() for lease in state.leases.values()
    )
    unhealthy = {gpu: state.unhealthy_shares for gpu, state in snapshot.gpus.items()}

    for resource, offer in snapshot.offers.items():
        parts = {part.gpu: part for part in free_parts(snapshot, offer)}
        may_hold_back = offer.rule.requests is not RequestRule.ANY
        listed = free = held_back = 0
        for gpu, shares in offer.by_gpu.items():
            state, left = snapshot.gpus[gpu], parts[gpu].free
            me = (*gpu_label_values(state.gpu), resource)
            kept = left if resource in state.held_back else 0
            listed += len(_healthy(state, shares, unhealthy[gpu]))
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


def _healthy(state: GpuState, shares: tuple[Share, ...], unhealthy: frozenset[str]) -> list[Share]:
    """Return the shares that are listed as healthy."""
    return [it for it in shares if it.id not in unhealthy] if state.verdict.healthy else []
