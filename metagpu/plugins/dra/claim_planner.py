"""The choice of shares for the devices that a ResourceClaim was allocated. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from metagpu.core.availability.reasons import availability_of, refuse
from metagpu.core.contracts.backend import Backend
from metagpu.core.contracts.capabilities import SharesClaims
from metagpu.core.devices.devices import Device, find_device, shared_device
from metagpu.core.model.request_errors import DeviceOccupied, FractionSplit, RequestError
from metagpu.core.model.shares import ResourceClaimRef, ResourceName, Share, ShareId
from metagpu.core.model.snapshot import Snapshot
from metagpu.plugins.dra.parts import Part, by_request, is_shared
from metagpu.plugins.dra.resource_claim import AllocatedDevice
from metagpu.plugins.dra.waiting import becomes_free_soon


def leased_shares(uid: str, snapshot: Snapshot) -> list[Share]:
    """Return the shares that a claim holds."""
    return [
        lease.share
        for state in snapshot.gpus.values()
        for lease in state.leases.values()
        if lease.resource_claim is not None and lease.resource_claim.uid == uid
    ]


class ClaimPlanner:
    """Chooses the shares of claims on this node; it leases none.

    Args:
        node: the name of this node, which the pools of devices begin with.
        backend: finds the backend of a resource.
    """

    def __init__(self, node: str, backend: Callable[[ResourceName], Backend]) -> None:
        self._node = node
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
        device = find_device(snapshot, self._node, result.pool, result.device)
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
        left = [it for it in device.shares if it.id not in taken]
        kept = [it for it in left if it.id in own][:wanted]
        # Before a reload to this API, init containers may have got some that have no lease.
        taken_by_others = state.leases.keys() | state.allocated
        free = [it for it in left if it.id not in taken_by_others]
        open_shares = [it for it in free if it.id not in availability_of(state).refused]
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
        return Part(result, device, tuple(sorted(shares, key=lambda it: it.number)))

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
            devices = [(self._device(it, now), it.consumed) for it in results]
        except RequestError:
            return False
        wanted = [(it, it.count_shares(consumed(it.capacity_name))) for it, consumed in devices]
        return becomes_free_soon(claim, wanted, now)
