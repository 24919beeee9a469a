"""Parts of a ResourceClaim: results of its allocation with chosen shares. Pure.

The claim's parameters may ask for a whole GPU to be shared; then a part has all shares that the
backend of this way of sharing has of the GPU.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from metagpu.core.contracts.backend import Backend
from metagpu.core.contracts.capabilities import SharesClaims
from metagpu.core.devices.devices import Device
from metagpu.core.grants.grant import Grant
from metagpu.core.model.claim_device import ClaimDevice
from metagpu.core.model.shares import ResourceName, Share
from metagpu.plugins.dra.resource_claim import AllocatedDevice


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
