"""Waiting for what shares stand for, where it has to be made in hardware first."""

from collections.abc import Callable, Sequence
from typing import Final

import anyio

from metagpu.core.errors import NotMade
from metagpu.core.facts import SharesAwaited
from metagpu.core.model import Failure, Share, Stock
from metagpu.core.registry import Registry
from metagpu.core.snapshot import Snapshot
from metagpu.core.standing import NOT_READY

GONE: Final = (
    "the configuration was changed meanwhile, and it is not on offer any more; "
    "a new pod gets what is on offer now"
)


async def made(registry: Registry, shares: Sequence[Share], patience: float) -> Snapshot:
    """Wait until its backend has made what stands for each share; give what is known then.

    Raises:
        NotMade: if it cannot, will not for now, or not within `patience` seconds.
    """

    def settled(now: Snapshot) -> Snapshot | None:
        over = all(is_made(it, now) or failure(it, now) for it in shares)
        return now if over or any(hindrance(it, now) for it in shares) else None

    with anyio.move_on_after(patience):
        async for snapshot in registry.watch(settled):
            if snapshot is not None:
                for share in shares:
                    failed = failure(share, snapshot)
                    if why := failed.reason if failed else hindrance(share, snapshot):
                        raise NotMade(share.resource, share.id, why)
                return snapshot

    raise _too_late(shares, patience)


async def made_anew(
    registry: Registry, shares: Sequence[Share], patience: float, clock: Callable[[], float]
) -> Snapshot:
    """Have made what is missing for containers that hold shares already; as `made` otherwise.

    What failed, or is gone, is tried again: once for each call, as the kubelet repeats it. Who
    holds a share may not be known yet, after a start of ours.

    Raises:
        NotMade: as `made`.
    """

    def known(now: Snapshot) -> bool:
        return all(
            is_made(it, now) or it.id in now.gpus[it.gpu].leases or hindrance(it, now)
            for it in shares
        )

    with anyio.move_on_after(patience):
        async for held in registry.watch(known):
            if held:
                now = registry.snapshot
                for share in shares:
                    if why := hindrance(share, now):
                        raise NotMade(share.resource, share.id, why)
                if unwished := tuple(it for it in shares if not _under_way(it, now)):
                    registry.apply(SharesAwaited(unwished, clock()))
                return await made(registry, shares, patience)

    raise _too_late(shares, patience)


def is_made(share: Share, now: Snapshot) -> bool:
    """Tell whether there is what stands for a share."""
    return share.id in now.gpus[share.gpu].stocks.get(share.backend, Stock()).made


def failure(share: Share, now: Snapshot) -> Failure | None:
    """Find out why a share could not be made for its present lease, if that is so."""
    state = now.gpus[share.gpu]
    found = state.stocks.get(share.backend, Stock()).failed.get(share.id)
    lease = state.leases.get(share.id)

    return found if found and lease and found.since == lease.since else None


def hindrance(share: Share, now: Snapshot) -> str:
    """Say why nothing will be made for a share by waiting; empty if it is there, or may come.

    A GPU that is being made ready is waited for: that takes moments, as after a reload.
    """
    if is_made(share, now):
        return ""
    offer = now.offers.get(share.resource)
    if offer is None or share.id not in offer.shares:
        return GONE
    pause = now.gpus[share.gpu].suspended.get(share.backend)
    return "" if pause is None or pause.reason == NOT_READY else pause.reason


def _under_way(share: Share, now: Snapshot) -> bool:
    """Tell whether what stands for a held share is there, or is being made."""
    if is_made(share, now):
        return True
    lease = now.gpus[share.gpu].leases[share.id]
    return lease.awaited and not failure(share, now)


def _too_late(shares: Sequence[Share], patience: float) -> NotMade:
    reason = f"that took longer than {patience:g} s; it may be tried again"
    return NotMade(shares[0].resource, shares[0].id, reason)
