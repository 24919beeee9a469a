"""From shares to the answer that a container gets: claim, provision, grant."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, cast

import anyio

from metagpu.core.contracts.backend import Backend
from metagpu.core.contracts.capabilities import Provisions
from metagpu.core.grants import cdi
from metagpu.core.grants.grant import Grant
from metagpu.core.model.request_errors import ProvisioningFailed, ProvisioningLasts, UnknownShare
from metagpu.core.model.shares import ProvisionedState, ProvisionFailure, ResourceName, Share
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import SharesClaimed, SharesPending
from metagpu.core.state.gpu_state import NOT_READY
from metagpu.core.state.registry import Registry

EnsureCdiNames = Callable[[frozenset[str]], Awaitable[None]]
"""Makes devices of these CDI names known to the container runtime; raises an error if it cannot."""


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


async def no_cdi(_: frozenset[str]) -> None:
    """Do nothing: without a CDI specification of ours, others write the names."""


async def grant_shares(
    shares: Sequence[Share],
    backend: Backend,
    registry: Registry,
    ensure_cdi_names: EnsureCdiNames,
    clock: Callable[[], float],
    *,
    longest: float | None = None,
    claimed: bool = False,
) -> Grant:
    """Claim shares that may be granted, create their hardware devices, and grant them.

    The shares stay claimed after an error: the caller knows which it has to release.

    Args:
        shares: shares of one resource, which may be granted together.
        backend: the backend of the resource.
        registry: receives the claim.
        ensure_cdi_names: makes CDI names known to the container runtime.
        clock: returns the event loop's time.
        longest: the longest wait for hardware devices in seconds; the backend's by default.
        claimed: whether the shares are claimed already, and stay so without the kubelet's list.

    Raises:
        RequestError: the shares cannot be granted.
    """
    snapshot = registry.snapshot
    if not claimed:
        waits = isinstance(backend, Provisions)
        registry.apply(SharesClaimed(tuple(shares), clock(), unanswered=waits))
    if isinstance(backend, Provisions):
        timeout = backend.provision_timeout
        deadline = timeout if longest is None else min(timeout, longest)
        snapshot = await wait_provisioned(registry, shares, deadline)
        if not claimed:  # that took a while: the kubelet has from now on to list the pod
            registry.apply(SharesClaimed(tuple(shares), clock()))
    grant = await backend.grant(shares, snapshot)
    if (grant.cdi_names or grant.annotations) and (names := cdi.device_names(grant)):
        await ensure_cdi_names(names)
    return grant


NOT_OFFERED: Final = (
    "the configuration was changed meanwhile, and it is not on offer any more; "
    "a new pod gets what is on offer now"
)


async def wait_provisioned(
    registry: Registry, shares: Sequence[Share], deadline: float
) -> Snapshot:
    """Wait until all shares are provisioned; return the snapshot with them.

    Raises:
        ProvisioningFailed: the backend failed, is suspended, or takes longer than `deadline`
            seconds.
    """

    def finished(now: Snapshot) -> Snapshot | None:
        over = all(
            is_provisioned(share, now) or provisioning_failure(share, now) for share in shares
        )
        return now if over or any(provisioning_blocker(share, now) for share in shares) else None

    with anyio.move_on_after(deadline):
        async for snapshot in registry.watch(finished):
            if snapshot is not None:
                for share in shares:
                    failed = provisioning_failure(share, snapshot)
                    if reason := failed.reason if failed else provisioning_blocker(share, snapshot):
                        raise ProvisioningFailed(share.resource, share.id, reason)
                return snapshot

    raise _timed_out(shares, deadline)


async def wait_reprovisioned(
    registry: Registry, shares: Sequence[Share], deadline: float, clock: Callable[[], float]
) -> Snapshot:
    """Provision what held shares lack, and wait for it like `wait_provisioned`.

    A device that failed or is gone is tried again: once for each call, as the kubelet repeats it.
    After a start of the daemon a share's lease may not be known yet.

    Raises:
        ProvisioningFailed: as `wait_provisioned`.
    """

    def is_known(now: Snapshot) -> bool:
        return all(
            is_provisioned(share, now)
            or share.id in now.gpus[share.gpu].leases
            or provisioning_blocker(share, now)
            for share in shares
        )

    with anyio.move_on_after(deadline):
        async for held in registry.watch(is_known):
            if held:
                now = registry.snapshot
                for share in shares:
                    if reason := provisioning_blocker(share, now):
                        raise ProvisioningFailed(share.resource, share.id, reason)
                if missing := tuple(share for share in shares if not _is_under_way(share, now)):
                    registry.apply(SharesPending(missing, clock()))
                return await wait_provisioned(registry, shares, deadline)

    raise _timed_out(shares, deadline)


def is_provisioned(share: Share, now: Snapshot) -> bool:
    """Return whether the hardware device behind a share exists."""
    return (
        share.id in now.gpus[share.gpu].provisioned.get(share.backend, ProvisionedState()).devices
    )


def provisioning_failure(share: Share, now: Snapshot) -> ProvisionFailure | None:
    """Return why provisioning failed for a share's lease; `None` if it did not."""
    state = now.gpus[share.gpu]
    found = state.provisioned.get(share.backend, ProvisionedState()).failed.get(share.id)
    lease = state.leases.get(share.id)

    return found if found and lease and found.since == lease.since else None


def provisioning_blocker(share: Share, now: Snapshot) -> str:
    """Return why waiting cannot provision a share; empty if it can or it exists.

    A GPU that is being set up does not count: its setup takes moments, as after a reload.
    """
    if is_provisioned(share, now):
        return ""
    offer = now.offers.get(share.resource)
    if offer is None or share.id not in offer.shares:
        return NOT_OFFERED
    suspended = now.gpus[share.gpu].suspended.get(share.backend)
    return "" if suspended is None or suspended.reason == NOT_READY else suspended.reason


def _is_under_way(share: Share, now: Snapshot) -> bool:
    """Return whether the device of a held share exists or is being provisioned."""
    if is_provisioned(share, now):
        return True
    lease = now.gpus[share.gpu].leases[share.id]
    return lease.provisioned_at_start and not provisioning_failure(share, now)


def _timed_out(shares: Sequence[Share], deadline: float) -> ProvisioningLasts:
    reason = f"that took longer than {deadline:g} s; it may be tried again"
    return ProvisioningLasts(shares[0].resource, shares[0].id, reason)
