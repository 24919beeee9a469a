"""What a container of a request claims, and whether it may have it: of ids and snapshots alone."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from metagpu.core import report
from metagpu.core.errors import GpuPaused, GpuUnhealthy, InstanceUnhealthy, ShareTaken, UnknownShare
from metagpu.core.model import ResourceName, Share
from metagpu.core.snapshot import GpuState, Snapshot


class Claim(NamedTuple):
    """Shares that a container is being granted, and what was known before."""

    shares: Sequence[Share]
    before: Snapshot

    @property
    def new(self) -> list[Share]:
        """Those that nobody held: they are free again if the request fails."""
        gpus = self.before.gpus
        return [share for share in self.shares if share.id not in gpus[share.gpu].leases]


def claimed(resource: ResourceName, ids: Iterable[str], snapshot: Snapshot) -> list[Share]:
    """Find the shares of a resource that have these ids.

    Raises:
        UnknownShare: if it has no such share.
    """
    offer = snapshot.offers.get(resource)
    known = cast("Mapping[str, Share]", offer.shares if offer else {})

    try:
        return [known[share_id] for share_id in ids]
    except KeyError as error:
        raise UnknownShare(resource, error.args[0]) from None


def refuse_unavailable(shares: Sequence[Share], snapshot: Snapshot) -> None:
    """Refuse shares of one resource that nobody may have now: the kubelet may not have heard yet.

    Raises:
        RequestError: saying which, and why.
    """
    for gpu in {share.gpu for share in shares}:
        resource, state = shares[0].resource, snapshot.gpus[gpu]
        if not state.verdict.healthy:
            raise GpuUnhealthy(resource, str(state.gpu), state.verdict.reason)
        if why := report.pause(state, shares[0].backend):
            raise GpuPaused(resource, str(state.gpu), why)
        if state.broken or state.withheld or state.paused:
            for share in shares:
                if share.gpu == gpu:
                    _refuse_if_shut(share, state)


def _refuse_if_shut(share: Share, state: GpuState) -> None:
    if (fault := state.fault_of(share.id)) is not None:
        slot = share.id.partition("::")[2]
        raise InstanceUnhealthy(share.resource, slot, str(state.gpu), fault.reason)
    if share.id in state.withheld:
        raise ShareTaken(share.id, report.hindrance(state, share))
    if (why := state.paused.get(share.id)) is not None:
        raise GpuPaused(share.resource, str(state.gpu), why)
