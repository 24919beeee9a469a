"""Shares, memory and time of namespaces, for showback."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

import anyio

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Lease, ResourceName, Share, ShareId
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.registry import Registry
from metagpu.core.usage.collector import NodeUsage
from metagpu.plugins.metrics import families as f
from metagpu.plugins.metrics.samples import Sample

KEPT: Final = 3600.0
"""Seconds for which a namespace without shares keeps its counters: short-lived ones add up."""


class _Held(NamedTuple):
    """Holdings of namespaces on one GPU: shares of a resource, and parts of the GPU."""

    leases: Mapping[ShareId, Lease]
    shares: Mapping[tuple[str, ResourceName], int]
    parts: Mapping[str, float]


_Holdings: TypeAlias = dict[GpuId, _Held]


class NamespaceMeter:
    """Share-seconds and GPU-seconds of each namespace since the start of the daemon.

    Time is counted from lease to lease, and not from scrape to scrape: a container that comes and
    goes between two scrapes counts. It begins when the kubelet names the container.
    """

    def __init__(self) -> None:
        self._held: _Holdings = {}
        self._share_seconds: dict[tuple[str, ResourceName], float] = {}
        self._gpu_seconds: dict[str, float] = {}
        self._held_at: dict[str, float] = {}
        self._published: Collection[tuple[str, tuple[str, ...]]] = ()
        self._at = 0.0

    async def run(self, registry: Registry) -> None:
        """Count from each change of the leases to the next, until cancelled."""
        view = lambda now: tuple(state.leases for state in now.gpus.values())  # noqa: E731
        async for _ in registry.watch(view):
            self.observe(registry.snapshot, anyio.current_time())

    def observe(self, snapshot: Snapshot, now: float) -> None:
        """Count the time since the last change, then take over the leases that changed."""
        self.advance(now)
        before, held = self._held, _Holdings()
        for gpu, state in snapshot.gpus.items():
            known = before.get(gpu)
            # The kubelet may wait for its next answer: a GPU without a change costs nothing.
            held[gpu] = known if known and known.leases is state.leases else _held_of(state)
        self._held = held

    def advance(self, now: float) -> None:
        """Count the time until now; drop namespaces that have had no share for long."""
        elapsed, self._at = max(0.0, now - self._at), now
        for held in self._held.values():
            for key, count in held.shares.items():
                self._share_seconds[key] = self._share_seconds.get(key, 0.0) + count * elapsed
            for namespace, part in held.parts.items():
                self._gpu_seconds[namespace] = (
                    self._gpu_seconds.get(namespace, 0.0) + part * elapsed
                )
                self._held_at[namespace] = now
        for namespace in [it for it, at in self._held_at.items() if now - at > KEPT]:
            del self._held_at[namespace], self._gpu_seconds[namespace]
            for key in [it for it in self._share_seconds if it[0] == namespace]:
                del self._share_seconds[key]

    def samples(self) -> list[Sample]:
        """Return the counters for a page; a new one is 0 on its first page.

        Prometheus counts what is added to the first value that it sees.
        """
        shares = (Sample(f.NAMESPACE_SHARE_SECONDS, k, v) for k, v in self._share_seconds.items())
        gpus = (Sample(f.NAMESPACE_GPU_SECONDS, (k,), v) for k, v in self._gpu_seconds.items())
        present = {(it.family.name, it.labels): it for it in (*shares, *gpus)}
        before, self._published = self._published, present.keys()
        return [it if key in before else it._replace(value=0) for key, it in present.items()]


def _held_of(state: GpuState) -> _Held:
    shares: Counter[tuple[str, ResourceName]] = Counter()
    parts: dict[str, float] = {}
    for namespace, lease in _named_leases(state):
        shares[namespace, lease.share.resource] += 1
        parts[namespace] = parts.get(namespace, 0.0) + part_of_gpu(state, lease.share)
    return _Held(state.leases, shares, parts)


def part_of_gpu(state: GpuState, share: Share) -> float:
    """Return the part of its GPU that a share stands for, by memory or by number."""
    if state.gpu.memory and share.memory:
        return min(1.0, share.memory / state.gpu.memory)
    return 1 / max(1, sum(it.resource == share.resource for it in state.shares))


def namespace_samples(snapshot: Snapshot, usage: NodeUsage | None) -> Iterator[Sample]:
    """Yield what each namespace holds now, and the memory that its containers use."""
    shares: Counter[tuple[str, ResourceName]] = Counter()
    held: Counter[str] = Counter()
    for state in snapshot.gpus.values():
        for namespace, lease in _named_leases(state):
            shares[namespace, lease.share.resource] += 1
            held[namespace] += lease.share.memory
    for (namespace, resource), count in shares.items():
        yield Sample(f.NAMESPACE_SHARES, (namespace, resource), count)
    for namespace, memory in held.items():
        yield Sample(f.NAMESPACE_HELD_MEMORY, (namespace,), memory)

    used: Counter[str] = Counter()
    for gpu, gpu_usage in (usage.gpus if usage else {}).items():
        if usage and gpu not in usage.failures:
            for it in gpu_usage.containers:
                used[it.holder.namespace] += it.memory
    for namespace, memory in used.items():
        yield Sample(f.NAMESPACE_USED_MEMORY, (namespace,), memory)


def _named_leases(state: GpuState) -> Iterator[tuple[str, Lease]]:
    """Yield the leases of a GPU whose holder is known, each with its namespace."""
    for lease in state.leases.values():
        if lease.holder is not None:
            yield lease.holder.namespace, lease
