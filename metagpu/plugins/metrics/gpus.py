"""Metrics of what a snapshot knows: GPUs, resources, who holds what. Pure, for a thread."""

from collections import Counter
from collections.abc import Iterator

from metagpu.core.gpu import Gpu
from metagpu.core.layout import Layout
from metagpu.core.model import Fault, Share
from metagpu.core.snapshot import GpuState, Snapshot
from metagpu.plugins.metrics import families as f
from metagpu.plugins.metrics.families import family_of
from metagpu.plugins.metrics.samples import Sample


def gpu_labels(gpu: Gpu) -> tuple[str, str]:
    """Name a GPU: by its index, as people do, and by its uuid, which is its own for good."""
    return str(gpu.index), gpu.id


def of_snapshot(snapshot: Snapshot, layout: Layout) -> Iterator[Sample]:
    """Measure all that is known of the GPUs, and what backends tell of theirs."""
    pools = {it.gpu.id: it.pool or "" for it in layout.assignments}

    for state in snapshot.gpus.values():
        yield from _gpu(state, pools.get(state.gpu.id, ""))
        yield from _holders(state)
    yield from _resources(snapshot)
    for figure in layout.figures(snapshot):
        gpu = gpu_labels(snapshot.gpus[figure.gpu].gpu)
        yield Sample(family_of(figure.kind), (*gpu, *figure.labels), figure.value)


def _gpu(state: GpuState, pool: str) -> Iterator[Sample]:
    gpu, me = state.gpu, gpu_labels(state.gpu)
    backends = dict.fromkeys([*(share.backend for share in state.shares), *state.suspended])

    yield Sample(f.GPU_INFO, (*me, gpu.name, gpu.pci_bus_id, pool), 1)
    yield Sample(f.GPU_MEMORY, me, gpu.memory)
    if gpu.reserved is not None:
        yield Sample(f.GPU_RESERVED, me, gpu.reserved)
    yield Sample(f.GPU_HEALTHY, me, state.verdict.healthy)
    for fault in Fault:
        yield Sample(f.GPU_FAULT, (*me, fault), state.verdict.fault is fault)
    yield Sample(f.GPU_BROKEN, me, len(state.faults))
    yield Sample(f.GPU_PAUSED, me, len(state.paused))
    yield Sample(f.GPU_CORDONED, me, state.cordon is not None)
    yield Sample(f.GPU_STRAY, me, len(state.waits_for))
    for backend in backends:
        yield Sample(f.GPU_OWNED, (*me, backend), state.owner == backend)
        yield Sample(f.GPU_READY, (*me, backend), backend not in state.suspended)


def _holders(state: GpuState) -> Iterator[Sample]:
    """Count the shares of each container; a lease whose holder is not told yet is nobody's."""
    held = Counter(
        (lease.holder, lease.share.resource)
        for lease in state.leases.values()
        if lease.holder is not None
    )
    for (holder, resource), count in held.items():
        who = (holder.namespace, holder.pod, holder.container)
        yield Sample(f.CONTAINER_SHARES, (*who, *gpu_labels(state.gpu), resource), count)


def _resources(snapshot: Snapshot) -> Iterator[Sample]:
    held = Counter(
        (lease.share.resource, gpu)
        for gpu, state in snapshot.gpus.items()
        for lease in state.leases.values()
    )
    shut = {gpu: state.shut for gpu, state in snapshot.gpus.items()}

    for resource, offer in snapshot.offers.items():
        listed = free = 0
        for gpu, shares in offer.by_gpu.items():
            state = snapshot.gpus[gpu]
            me = (*gpu_labels(state.gpu), resource)
            open_ = _open(state, shares, shut[gpu])
            left = sum(share.id not in state.leases for share in open_)
            listed, free = listed + len(open_), free + left

            yield Sample(f.GPU_CAPACITY, me, len(shares))
            yield Sample(f.GPU_HELD, me, held[resource, gpu])
            yield Sample(f.GPU_FREE, me, left)
        yield Sample(f.RESOURCE_CAPACITY, (resource,), len(offer.shares))
        yield Sample(f.RESOURCE_ALLOCATABLE, (resource,), listed)
        yield Sample(
            f.RESOURCE_HELD, (resource,), sum(held[resource, gpu] for gpu in snapshot.gpus)
        )
        yield Sample(f.RESOURCE_FREE, (resource,), free)
        yield Sample(f.RESOURCE_RIVALLED, (resource,), resource in snapshot.rivals)


def _open(state: GpuState, shares: tuple[Share, ...], shut: frozenset[str]) -> list[Share]:
    """Give the shares that are listed as healthy."""
    return [it for it in shares if it.id not in shut] if state.verdict.healthy else []
