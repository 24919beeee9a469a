"""The shares of ResourceClaims: chosen for devices, leased all at once or none.

The claim's parameters may ask for a whole GPU to be shared; then a part has all shares that the
backend of this way of sharing has of the GPU.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress

import anyio
import msgspec

from metagpu.core.availability.conflict import without_conflict
from metagpu.core.availability.reasons import availability_of, refuse
from metagpu.core.contracts.backend import Backend
from metagpu.core.contracts.capabilities import SharesClaims
from metagpu.core.devices.devices import Device, find_device, gpu_of_device, shared_device
from metagpu.core.grants.grant import Grant
from metagpu.core.model.request_errors import (
    DeviceOccupied,
    FractionSplit,
    RequestError,
    UnknownDevice,
)
from metagpu.core.model.resource_claims import ClaimDevice
from metagpu.core.model.shares import ResourceClaimRef, ResourceName, Share, ShareId
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.facts import SharesClaimed, SharesReleased
from metagpu.core.state.gpu_state import NOT_READY
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.allocation import AllocatedDevice


class Part(msgspec.Struct, frozen=True):
    """One result of an allocation, with the shares that were chosen for it."""

    result: AllocatedDevice
    device: Device
    shares: tuple[Share, ...]

    @property
    def settings(self) -> str:
        """Settings of the backend by the claim's parameters; empty without them."""
        return self.result.sharing.settings if self.result.sharing and self.is_shared else ""

    @property
    def is_shared(self) -> bool:
        """True for a whole GPU that a backend shares as the parameters say."""
        return is_shared(self.result, self.device)

    def claim_device(self, claim: str) -> ClaimDevice:
        """Return the meaning of this part's CDI name."""
        device, ids = self.device, (share.id for share in self.shares)
        return ClaimDevice.of_shares(claim, device.gpu, device.backend, ids, self.settings)


def is_shared(result: AllocatedDevice, device: Device) -> bool:
    """Return whether a device is of the backend that the parameters of its claim name."""
    return result.sharing is not None and result.sharing.backend == device.backend


def by_request(
    parts: Iterable[Part],
) -> Mapping[tuple[str, ResourceName], Sequence[Part]]:
    """Return parts by their request and resource: a container gets those together."""
    found = defaultdict[tuple[str, ResourceName], list[Part]](list)
    for part in parts:
        found[part.result.main_request, part.device.resource].append(part)
    return found


def with_settings(grant: Grant, backend: Backend, settings: str) -> Grant:
    """Return a grant with what the parameters of its claim ask of the backend."""
    if settings and isinstance(backend, SharesClaims):
        return backend.with_settings(grant, settings)
    return grant


def becomes_free_soon(
    claim: ResourceClaimRef, wanted: Iterable[tuple[Device, int]], now: Snapshot
) -> bool:
    """Return whether all devices have so many shares soon that no other lease is on."""
    soon = False
    for device, count in wanted:
        state = now.gpus[device.gpu]
        others = (lease.share for lease in state.leases.values() if lease.resource_claim != claim)
        if len(without_conflict(device.shares, others)) < count:
            return False
        soon = soon or _changes_soon(state)
    return soon


def _changes_soon(state: GpuState) -> bool:
    """Return whether a GPU is being cleaned, made ready, or checked."""
    if not state.verdict.healthy or state.cordon is not None:
        return False
    return (
        bool(state.cleanup.since)
        or any(pause.reason == NOT_READY for pause in state.suspended.values())
        or any(provisioned_state.delayed for provisioned_state in state.provisioned.values())
        or any(
            not device.idle and share not in state.leases
            for provisioned_state in state.provisioned.values()
            for share, device in provisioned_state.devices.items()
        )
    )


def leased_shares(uid: str, snapshot: Snapshot) -> list[Share]:
    """Return the shares that a claim holds."""
    return [lease.share for claim, lease in snapshot.claim_leases if claim.uid == uid]


class ClaimPlanner:
    """Chooses the shares of claims on this node; it leases none.

    Args:
        backend: finds the backend of a resource.
    """

    def __init__(self, backend: Callable[[ResourceName], Backend]) -> None:
        self._backend = backend

    def plan(
        self, claim: ResourceClaimRef, results: Sequence[AllocatedDevice], snapshot: Snapshot
    ) -> tuple[list[Part], Mapping[ShareId, Share]]:
        """Choose shares for all results; return those that the claim has already too.

        Raises:
            RequestError: some of them cannot be had now, or not by one container together.
        """
        own = {share.id: share for share in leased_shares(claim.uid, snapshot)}
        parts: list[Part] = []
        for result in results:
            taken = {share.id for part in parts for share in part.shares}
            parts.append(self._choose(result, snapshot, own, taken))
        self._check_together(parts, snapshot)
        return parts, own

    def _device(self, result: AllocatedDevice, snapshot: Snapshot) -> Device:
        """Find the device of a result, as the backend has it that its parameters name.

        Raises:
            RequestError: it is not on offer, or not in that way.
        """
        device = find_device(snapshot, result.pool, result.device)
        counted, consumed = device.capacity_name, result.consumed_capacity
        if counted is not None and consumed and counted not in consumed:
            reason = f"it counts {counted} now; delete the ResourceClaim to get another device"
            raise UnknownDevice(result.pool, result.device, reason)
        if result.sharing is None:
            return device
        return shared_device(device, snapshot.gpus[device.gpu], result.sharing)

    def _choose(
        self,
        result: AllocatedDevice,
        snapshot: Snapshot,
        own: Mapping[ShareId, Share],
        taken: Iterable[ShareId],
    ) -> Part:
        """Choose the shares of one result: first those that the claim has already."""
        device = self._device(result, snapshot)
        state, taken = snapshot.gpus[device.gpu], frozenset(taken)
        wanted = device.count_shares(result.consumed(device.capacity_name))
        left = [share for share in device.shares if share.id not in taken]
        kept = [share for share in left if share.id in own][:wanted]
        # Before a reload to this API, init containers may have got some that have no lease.
        taken_by_others = state.leases.keys() | state.allocated.keys()
        free = [share for share in left if share.id not in taken_by_others]
        open_shares = [share for share in free if share.id not in availability_of(state).refused]
        if len(kept) + len(open_shares) < wanted:
            refuse((free or device.shares)[:wanted], snapshot)
            free_count = len(kept) + len(open_shares)
            raise DeviceOccupied(str(state.gpu), device.name, wanted, free_count)

        backend = self._backend(device.resource)
        shares = tuple(backend.prefer([*kept, *open_shares], kept, wanted, snapshot))
        refuse(shares, snapshot)
        if result.sharing is None or not is_shared(result, device):
            backend.check(shares, snapshot)
        elif isinstance(backend, SharesClaims):
            backend.check_settings(result.sharing.settings, result.sharing.field)
        return Part(result, device, tuple(sorted(shares, key=lambda share: share.number)))

    def _check_together(self, parts: Iterable[Part], snapshot: Snapshot) -> None:
        """Refuse devices of one request that one container cannot have together.

        A fraction of several GPUs is no mistake here: the claim asked for several devices.
        """
        for (_, resource), together in by_request(parts).items():
            if len(together) > 1 and not together[0].is_shared:
                shares = [share for part in together for share in part.shares]
                with suppress(FractionSplit):
                    self._backend(resource).check(shares, snapshot)

    def ends_soon(
        self, claim: ResourceClaimRef, results: Sequence[AllocatedDevice], now: Snapshot
    ) -> bool:
        """Return whether the reason of a refusal ends by itself: no lease is in the way."""
        try:
            devices = [(self._device(device, now), device.consumed) for device in results]
        except RequestError:
            return False
        wanted = [
            (device, device.count_shares(consumed(device.capacity_name)))
            for device, consumed in devices
        ]
        return becomes_free_soon(claim, wanted, now)


class ClaimLeases:
    """Begins and ends the leases of claims on this node.

    Args:
        registry: has the leases.
        planner: chooses the shares.
        clock: returns the event loop's time.
    """

    def __init__(
        self,
        registry: Registry,
        planner: ClaimPlanner,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._registry = registry
        self._planner = planner
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
        pools = {
            share.id: f"{part.result.driver}/{part.result.pool}"
            for part in parts
            for share in part.shares
        }
        fact = SharesClaimed(
            chosen, self._clock(), resource_claim=claim, settings=settings, pools=pools
        )
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
        gpus = {gpu_of_device(device.device) for device in results}
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
