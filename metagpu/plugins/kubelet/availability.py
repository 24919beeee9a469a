"""Availability checks of a request's shares: pure functions of ids and snapshots."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from metagpu.core.model import reasons
from metagpu.core.model.offers import Api
from metagpu.core.model.request_errors import (
    GpuPaused,
    GpuUnhealthy,
    InstanceUnhealthy,
    ShareTaken,
    UnknownShare,
)
from metagpu.core.model.shares import ResourceName, Share
from metagpu.core.model.snapshot import GpuState, Snapshot


class Claim(NamedTuple):
    """The shares that a container is being granted, and the snapshot before."""

    shares: Sequence[Share]
    before: Snapshot

    @property
    def newly_claimed(self) -> list[Share]:
        """The shares that had no lease before: a failing request releases them."""
        gpus = self.before.gpus
        return [share for share in self.shares if share.id not in gpus[share.gpu].leases]


def find_shares(resource: ResourceName, ids: Iterable[str], snapshot: Snapshot) -> list[Share]:
    """Return the shares of a resource that have these ids.

    Raises:
        UnknownShare: the resource has no such share.
    """
    offer = snapshot.plugin_offer(resource)
    known = cast("Mapping[str, Share]", offer.shares if offer else {})

    try:
        return [known[share_id] for share_id in ids]
    except KeyError as error:
        raise UnknownShare(resource, error.args[0]) from None


def refuse_unavailable(
    shares: Sequence[Share], snapshot: Snapshot, api: Api = Api.DEVICE_PLUGIN
) -> None:
    """Refuse unavailable shares of one resource; the kubelet may have an older list.

    Args:
        shares: those that are asked for.
        snapshot: everything known.
        api: the API that asks for them.

    Raises:
        RequestError: the message names the share or GPU, and the reason.
    """
    for gpu in {share.gpu for share in shares}:
        resource, state = shares[0].resource, snapshot.gpus[gpu]
        if not state.verdict.healthy:
            raise GpuUnhealthy(resource, str(state.gpu), state.verdict.reason)
        if reason := reasons.pause_reason(state, shares[0].backend):
            raise GpuPaused(resource, str(state.gpu), reason)
        for share in shares:
            lease = state.leases.get(share.id)
            if lease is not None and lease.unconfirmed:
                raise ShareTaken(share.id, reasons.unconfirmed_reason(lease))
            if api is Api.DEVICE_PLUGIN and share.id in state.shares_of_resource_claims:
                holder = state.leases[share.id].resource_claim
                raise ShareTaken(share.id, f"the ResourceClaim {holder} holds it")
        if state.faulty_shares or state.unavailable_shares or state.paused_shares:
            for share in shares:
                if share.gpu == gpu:
                    _refuse_share(share, state)


def _refuse_share(share: Share, state: GpuState) -> None:
    if (fault := state.device_fault(share.id)) is not None:
        slot = share.id.partition("::")[2]
        raise InstanceUnhealthy(share.resource, slot, str(state.gpu), fault.reason)
    if share.id in state.unavailable_shares:
        raise ShareTaken(share.id, reasons.unavailable_reason(state, share))
    if (reason := state.paused_shares.get(share.id)) is not None:
        raise GpuPaused(share.resource, str(state.gpu), reason)
