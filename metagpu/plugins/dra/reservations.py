"""Leases of ResourceClaims of bound pods, before the kubelet asks to prepare them.

Only where a pool has both fronts: the kubelet asks for a claim a second after its pod is bound, and
the shares could be granted to another pod meanwhile. The pods are those that the API server lists.
"""

from typing import Final

import anyio
import structlog

from metagpu.core.devices.devices import gpu_of_pool
from metagpu.core.errors import describe_error
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import ResourceClaimRef
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.preparer import ClaimPreparer
from metagpu.plugins.dra.resource_claim import Allocation

_AT_ONCE: Final = 8
"""Claims that are read at once: one slow answer keeps no other claim waiting."""

log = structlog.get_logger()


class ClaimReservations:
    """Leases the shares of claims when their pods are bound, until the pods go.

    What cannot be leased is left to the kubelet's call, which says why.

    Args:
        registry: has the pods of the node.
        preparer: reads claims, and has their states and leases.
    """

    def __init__(self, registry: Registry, preparer: ClaimPreparer) -> None:
        self._registry = registry
        self._preparer = preparer
        self._states = preparer.states
        self._ended: dict[tuple[str, str], anyio.Event] = {}
        self._reads = anyio.Semaphore(_AT_ONCE)
        self._failures = LogOnce()

    async def run(self) -> None:
        """Follow the pods until cancelled; then no claim is reserved.

        What is being prepared then keeps its leases: its call is answered yet.
        """
        try:
            async with anyio.create_task_group() as group:
                async for named in self._registry.watch(_named_claims):
                    for gone in self._ended.keys() - named:
                        self._ended.pop(gone).set()
                    for namespace, name in sorted(named - self._ended.keys()):
                        self._ended[namespace, name] = ended = anyio.Event()
                        group.start_soon(self._keep, namespace, name, ended)
        finally:
            for claim in list(self._states.reserved):
                if not self._states.lock_of(claim).locked():
                    self._release(claim)

    async def _keep(self, namespace: str, name: str, ended: anyio.Event) -> None:
        """Lease the shares of a claim until the kubelet asks for it, or its pods are gone."""
        claim = await self._reserve(namespace, name)
        if claim is not None:
            await ended.wait()
            async with self._states.lock_of(claim):
                self._release(claim)

    async def _reserve(self, namespace: str, name: str) -> ResourceClaimRef | None:
        """Lease what a claim was allocated; return the claim if that was done.

        Only of GPUs with both fronts: nobody else could be granted the shares of others.
        """
        try:
            async with self._reads:
                claim, allocation = await self._preparer.read_allocation(namespace, name)
            if not self._is_of_both_fronts(allocation):
                return None
            async with self._states.lock_of(claim):
                if claim in self._states.prepared:
                    return None
                self._preparer.leases.lease(claim, allocation.results)
                self._states.reserved.add(claim)
        except RequestError:
            return None
        except Exception as error:  # noqa: BLE001 - one claim's error is its own
            if self._failures.is_new("claim", problem := describe_error(error)):
                log.warning(
                    "resource claim not reserved",
                    claim=f"{namespace}/{name}",
                    error=problem,
                    effect="its shares may be granted to another pod until the kubelet asks",
                )
            return None
        self._failures.clear("claim")
        return claim

    def _release(self, claim: ResourceClaimRef) -> None:
        """End the leases of a claim that the kubelet has not asked for."""
        if claim in self._states.reserved:
            self._states.reserved.discard(claim)
            self._preparer.leases.release_all(claim)

    def _is_of_both_fronts(self, allocation: Allocation) -> bool:
        gpus = self._registry.snapshot.gpus
        found = (gpus.get(gpu_of_pool(it.pool)) for it in allocation.results)
        return any(it is not None and it.has_both_fronts for it in found)


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
