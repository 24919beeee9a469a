"""Watch on pod annotations: a rejected annotation is reported once."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from time import time

import structlog

from metagpu.core.config.memory import MemoryEnforcement
from metagpu.core.contracts.capabilities import Guard
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder, Share
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.events import AnnotationRejected
from metagpu.core.state.registry import Registry
from metagpu.core.usage.accounting import ContainerUsage
from metagpu.core.usage.annotations import effective_limit, limited_resources

log = structlog.get_logger()


class AnnotationWatch:
    """A watch on the pods, their annotations, and their leases."""

    def __init__(
        self,
        registry: Registry,
        settings: Callable[[GpuId], MemoryEnforcement],
        guards: Mapping[str, Guard],
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._guards = guards

    async def run(self) -> None:
        """Report every rejected annotation once while it is rejected, until cancelled."""
        reported: AbstractSet[tuple[str, str]] = frozenset()

        async for pods, _ in self._registry.watch(_relevant):
            rejected = {
                (pod.uid, reason): pod
                for pod in pods
                for reason in rejected_annotations(
                    pod, self._registry.snapshot, self._settings, self._guards
                )
            }
            for (uid, reason), pod in rejected.items():
                if (uid, reason) not in reported:
                    log.warning("annotation rejected", pod=str(pod), reason=reason)
                    self._registry.events.publish(AnnotationRejected(pod, reason, at=time()))
            reported = rejected.keys()


def rejected_annotations(
    pod: KnownPod,
    snapshot: Snapshot,
    settings: Callable[[GpuId], MemoryEnforcement],
    guards: Mapping[str, Guard],
) -> tuple[str, ...]:
    """Return a sentence for each rejected annotation; empty before the pod has shares."""
    found: list[str] = []
    held: set[str] = set()

    for gpu, holder, shares in _held_shares(pod, snapshot):
        resource, backend = shares[0].resource, shares[0].backend
        held.add(resource)
        if guards.get(backend) is Guard.ENFORCER:
            usage = ContainerUsage(gpu, holder, pod.uid, tuple(shares))
            found += effective_limit(usage, snapshot, settings(gpu)).rejected
        elif any(
            limited == resource for limited in limited_resources(pod.memory_annotations).values()
        ):
            found.append(f"{resource} is shared by {backend}, whose limits no annotation changes")

    for key, resource in limited_resources(pod.memory_annotations).items():
        if held and resource not in held:
            found.append(f"{key}: the pod holds no {resource}")
    return tuple(dict.fromkeys(found))


def _held_shares(pod: KnownPod, snapshot: Snapshot) -> Iterator[tuple[GpuId, Holder, list[Share]]]:
    for gpu, state in snapshot.gpus.items():
        shares: defaultdict[Holder, list[Share]] = defaultdict(list)
        for lease in state.leases.values():
            holder = lease.holder
            if holder is not None and (holder.namespace, holder.pod) == (pod.namespace, pod.name):
                shares[holder].append(lease.share)
        for holder, held in shares.items():
            yield gpu, holder, held


def _relevant(snapshot: Snapshot) -> tuple[tuple[KnownPod, ...], object]:
    """Return the data that a rejection depends on; no leases if no pod is annotated."""
    pods = snapshot.pods.annotated
    return pods, tuple(state.leases for state in snapshot.gpus.values()) if pods else ()
