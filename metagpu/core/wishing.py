"""Tells of pods whose annotations ask for what they do not get, once while it is so."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from time import time

import structlog

from metagpu.core.backend import Guard
from metagpu.core.enforcement import Enforcement
from metagpu.core.gpu import GpuId
from metagpu.core.model import Holder, Share
from metagpu.core.news import WishRefused
from metagpu.core.pods import KnownPod
from metagpu.core.registry import Registry
from metagpu.core.snapshot import Snapshot
from metagpu.core.usage import Usage
from metagpu.core.wishes import settle, wished_resources

log = structlog.get_logger()


class WishWatch:
    """Looks whenever pods, their annotations or what they hold have changed."""

    def __init__(
        self,
        registry: Registry,
        terms: Callable[[GpuId], Enforcement],
        guards: Mapping[str, Guard],
    ) -> None:
        self._registry = registry
        self._terms = terms
        self._guards = guards

    async def run(self) -> None:
        """Look until cancelled."""
        told: AbstractSet[tuple[str, str]] = frozenset()

        async for pods, _ in self._registry.watch(_view):
            refused = {
                (pod.uid, why): pod
                for pod in pods
                for why in refusals(pod, self._registry.snapshot, self._terms, self._guards)
            }
            for (uid, why), pod in refused.items():
                if (uid, why) not in told:
                    log.warning("a pod does not get what it wishes", pod=str(pod), why=why)
                    self._registry.news.publish(WishRefused(pod, why, at=time()))
            told = refused.keys()


def refusals(
    pod: KnownPod,
    snapshot: Snapshot,
    terms: Callable[[GpuId], Enforcement],
    guards: Mapping[str, Guard],
) -> tuple[str, ...]:
    """Say what of a pod's wishes it does not get, and why; nothing before it holds shares."""
    found: list[str] = []
    held: set[str] = set()

    for gpu, holder, shares in _held(pod, snapshot):
        resource, backend = shares[0].resource, shares[0].backend
        held.add(resource)
        if guards.get(backend) is Guard.ENFORCER:
            usage = Usage(gpu, holder, pod.uid, tuple(shares))
            found += settle(usage, snapshot, terms(gpu)).refused
        elif any(wished == resource for wished in wished_resources(pod.wishes).values()):
            found.append(f"{resource} is cut by {backend}, whose limits no annotation changes")

    for key, resource in wished_resources(pod.wishes).items():
        if held and resource not in held:
            found.append(f"{key}: the pod holds no {resource}")
    return tuple(dict.fromkeys(found))


def _held(pod: KnownPod, snapshot: Snapshot) -> Iterator[tuple[GpuId, Holder, list[Share]]]:
    for gpu, state in snapshot.gpus.items():
        shares: defaultdict[Holder, list[Share]] = defaultdict(list)
        for lease in state.leases.values():
            holder = lease.holder
            if holder is not None and (holder.namespace, holder.pod) == (pod.namespace, pod.name):
                shares[holder].append(lease.share)
        for holder, its in shares.items():
            yield gpu, holder, its


def _view(snapshot: Snapshot) -> tuple[tuple[KnownPod, ...], object]:
    """Give what may change an answer; next to nothing where no pod wishes anything."""
    pods = snapshot.pods.wishing
    return pods, tuple(state.leases for state in snapshot.gpus.values()) if pods else ()
