"""Waiting for what shares stand for, where it has to be made in hardware first."""

from collections.abc import Sequence

import anyio

from metagpu.core.errors import NotMade
from metagpu.core.model import Failure, Share, Stock
from metagpu.core.registry import Registry
from metagpu.core.snapshot import Snapshot


async def made(registry: Registry, shares: Sequence[Share], patience: float) -> Snapshot:
    """Wait until its backend has made what stands for each share; give what is known then.

    Raises:
        NotMade: if it cannot, or not within `patience` seconds.
    """
    with anyio.move_on_after(patience):
        async for snapshot in registry.watch(lambda now: _settled(shares, now)):
            if snapshot is not None:
                for share in shares:
                    if why := failure(share, snapshot):
                        raise NotMade(share.resource, share.id, why.reason)
                return snapshot

    reason = f"that took longer than {patience:g} s; it may be tried again"
    raise NotMade(shares[0].resource, shares[0].id, reason)


def is_made(share: Share, now: Snapshot) -> bool:
    """Tell whether there is what stands for a share."""
    return share.id in now.gpus[share.gpu].stocks.get(share.backend, Stock()).made


def failure(share: Share, now: Snapshot) -> Failure | None:
    """Find out why a share could not be made for its present lease, if that is so."""
    state = now.gpus[share.gpu]
    found = state.stocks.get(share.backend, Stock()).failed.get(share.id)
    lease = state.leases.get(share.id)

    return found if found and lease and found.since == lease.since else None


def _settled(shares: Sequence[Share], now: Snapshot) -> Snapshot | None:
    """Give the snapshot once each share is made in it, or has failed."""
    return now if all(is_made(it, now) or failure(it, now) for it in shares) else None
