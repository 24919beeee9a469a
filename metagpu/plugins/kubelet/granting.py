"""From shares to the answer that a container gets: claim, provision, grant."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from metagpu.core.contracts.backend import Backend
from metagpu.core.contracts.capabilities import Provisions
from metagpu.core.grants import cdi
from metagpu.core.grants.grant import Grant
from metagpu.core.model.request_errors import UnknownShare
from metagpu.core.model.shares import ResourceName, Share
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import SharesClaimed
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet.provisioning import wait_provisioned

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
