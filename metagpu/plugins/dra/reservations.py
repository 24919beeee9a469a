"""Leases of ResourceClaims of bound pods, before the kubelet asks to prepare them.

Only where a pool has both fronts: the kubelet asks for a claim a second after its pod is bound, and
the shares could be granted to another pod meanwhile. The pods are those that the API server lists.
"""

import structlog

from metagpu.core.errors import ClusterError
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.runtime.log_once import LogOnce
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.preparer import ClaimPreparer

log = structlog.get_logger()


class ClaimReservations:
    """Leases the shares of claims when their pods are bound, until the pods go.

    Args:
        registry: has the pods of the node.
        preparer: leases shares, and knows which claims the kubelet has not asked for.
    """

    def __init__(self, registry: Registry, preparer: ClaimPreparer) -> None:
        self._registry = registry
        self._preparer = preparer
        self._seen = frozenset[tuple[str, str]]()
        self._failures = LogOnce()

    async def run(self) -> None:
        """Follow the pods until cancelled."""
        async for named in self._registry.watch(_named_claims):
            await self._follow(named)

    async def _follow(self, named: frozenset[tuple[str, str]]) -> None:
        for claim in [it for it in self._preparer.reserved if (it.namespace, it.name) not in named]:
            await self._preparer.unprepare(claim)  # its pod is gone, and was never started
        reserved = set[tuple[str, str]]()
        for namespace, name in sorted(named - self._seen):
            try:
                await self._preparer.reserve(namespace, name)
            except ClusterError as error:
                if self._failures.is_new("claim", str(error)):
                    log.info("resource claim not reserved", claim=name, error=str(error))
            reserved.add((namespace, name))
        self._seen = named & (self._seen | reserved)


def _named_claims(snapshot: Snapshot) -> frozenset[tuple[str, str]]:
    """Return namespace and name of pods' claims; none without a pool of both fronts."""
    if not any(it.has_both_fronts for it in snapshot.gpus.values()):
        return frozenset()
    return frozenset(
        (pod.namespace, claim)
        for pod in snapshot.pods.by_uid.values()
        if not pod.ended and pod.claims
        for requests in pod.claims.values()
        for claim, _ in requests
    )
