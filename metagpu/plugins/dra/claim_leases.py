"""The leases of ResourceClaims: all shares of a claim at once, or none."""

from collections.abc import Callable, Sequence
from contextlib import aclosing

import anyio

from metagpu.core.devices.devices import pool_name
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import ResourceClaimRef, Share
from metagpu.core.state.facts import SharesClaimed, SharesReleased
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.claim_planner import ClaimPlanner, leased_shares
from metagpu.plugins.dra.parts import Part
from metagpu.plugins.dra.resource_claim import AllocatedDevice


class ClaimLeases:
    """Begins and ends the leases of claims on this node.

    Args:
        registry: has the leases.
        planner: chooses the shares.
        node: the name of this node, which the pools of devices begin with.
        clock: returns the event loop's time.
    """

    def __init__(
        self,
        registry: Registry,
        planner: ClaimPlanner,
        node: str,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._registry = registry
        self._planner = planner
        self._node = node
        self._clock = clock

    def lease(
        self, claim: ResourceClaimRef, results: Sequence[AllocatedDevice]
    ) -> tuple[list[Part], list[Share]]:
        """Choose shares for all results and claim them; return those newly claimed too.

        Nothing waits in between, so that no other request can get them.

        Raises:
            RequestError: some of them cannot be had now; then none is claimed.
        """
        parts, own = self._planner.plan(claim, results, self._registry.snapshot)
        chosen = tuple(share for part in parts for share in part.shares)
        settings = {share.id: part.settings for part in parts for share in part.shares}
        settings = {share: its for share, its in settings.items() if its}
        fact = SharesClaimed(chosen, self._clock(), resource_claim=claim, settings=settings)
        self._registry.apply(fact)
        return parts, [share for share in chosen if share.id not in own]

    async def lease_soon(
        self, claim: ResourceClaimRef, results: Sequence[AllocatedDevice], longest: float
    ) -> tuple[list[Part], list[Share]]:
        """Lease shares as `lease` does, once what ends by itself has ended.

        The scheduler has a device back as soon as its claim is unprepared: its GPU may still be
        cleaned. The kubelet repeats a refused call only a minute later.
        """
        found = self._lease_or_wait(claim, results)
        if not isinstance(found, RequestError):
            return found
        pools = {it.pool for it in results}
        first = self._registry.snapshot
        gpus = [gpu for gpu in first.gpus if pool_name(self._node, gpu) in pools]
        changes = self._registry.watch(
            lambda now: (now.offers, *(now.gpus.get(gpu) for gpu in gpus))
        )
        with anyio.move_on_after(longest):
            async with aclosing(changes):
                async for _ in changes:
                    again = self._lease_or_wait(claim, results)
                    if not isinstance(again, RequestError):
                        return again
                    found = again
        raise found

    def _lease_or_wait(
        self, claim: ResourceClaimRef, results: Sequence[AllocatedDevice]
    ) -> tuple[list[Part], list[Share]] | RequestError:
        """Lease shares as `lease` does, or return a refusal whose reason ends by itself."""
        try:
            return self.lease(claim, results)
        except RequestError as error:
            if not self._planner.ends_soon(claim, results, self._registry.snapshot):
                raise
            return error

    def release(self, shares: Sequence[Share]) -> None:
        """End the leases of shares."""
        if shares:
            self._registry.apply(SharesReleased(tuple(shares), self._clock()))

    def release_all(self, claim: ResourceClaimRef) -> None:
        """End all leases of a claim."""
        self.release(leased_shares(claim.uid, self._registry.snapshot))
