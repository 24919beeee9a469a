"""The states of this node's ResourceClaims, and a lock of each.

A claim is reserved once its pod is bound, and prepared once the kubelet has its answer. From then
on only the kubelet ends it, by its call or by its account.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import anyio

from metagpu.core.model.shares import ResourceClaimRef
from metagpu.plugins.dra.answer import PreparedDevice
from metagpu.plugins.dra.resource_claim import Allocation

PreparedClaims = Mapping[ResourceClaimRef, Sequence[PreparedDevice]]
"""The devices of each prepared claim."""


@dataclass(frozen=True)
class ClaimStates:
    """The claims that the front knows. A change of one is made under its lock.

    Attributes:
        reserved: the claims with leases that the kubelet has not asked for yet.
        prepared: the devices of each prepared claim; after a start, as the kubelet's account has
            them.
        refused: the allocations of claims that could not be prepared for a reason that may end.
    """

    reserved: set[ResourceClaimRef] = field(default_factory=set)
    prepared: dict[ResourceClaimRef, tuple[PreparedDevice, ...]] = field(default_factory=dict)
    refused: dict[ResourceClaimRef, Allocation] = field(default_factory=dict)
    _locks: WeakValueDictionary[ResourceClaimRef, anyio.Lock] = field(
        default_factory=WeakValueDictionary
    )

    def lock_of(self, claim: ResourceClaimRef) -> anyio.Lock:
        """Return the lock of a claim, the same one while anybody has it or waits for it.

        The kubelet repeats the calls that it gave up.
        """
        return self._locks.setdefault(claim, anyio.Lock())
