"""From shares to the answer that a container gets: claim, provision, grant."""

from collections.abc import Awaitable, Callable, Sequence

from metagpu.core.contracts.backend import Backend
from metagpu.core.contracts.capabilities import Provisions
from metagpu.core.grants import cdi
from metagpu.core.grants.grant import Grant
from metagpu.core.model.shares import Share
from metagpu.core.state.facts import SharesClaimed
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet.provisioning import wait_provisioned

EnsureCdiNames = Callable[[frozenset[str]], Awaitable[None]]
"""Makes devices of these CDI names known to the container runtime; raises an error if it cannot."""


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
    if names := cdi.device_names(grant):
        await ensure_cdi_names(names)
    return grant
