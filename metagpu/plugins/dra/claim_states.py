"""The states of this node's ResourceClaims, and a lock of each.

A claim is prepared once the kubelet has its answer. From then on only the kubelet ends it, by its
call or by its account.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from weakref import WeakValueDictionary

import anyio

from metagpu.core.model.shares import ResourceClaimRef
from metagpu.core.runtime.rate_limit import Backoff
from metagpu.plugins.dra.answer import PreparedDevice
from metagpu.plugins.dra.resource_claim import Allocation

PreparedClaims = Mapping[ResourceClaimRef, Sequence[PreparedDevice]]
"""The devices of each prepared claim."""


@dataclass
class FailedClaims:
    """Claims that failed for a reason whose end nothing reports: each has a back-off.

    Attributes:
        first: the delay after a claim's first failure, in seconds; each further one doubles it.
        longest: its limit. The kubelet repeats a call by itself after 60 to 90 s.
    """

    first: float = 1.0
    longest: float = 30.0
    _backoffs: dict[ResourceClaimRef, Backoff] = field(default_factory=dict)
    _due: dict[ResourceClaimRef, float] = field(default_factory=dict)
    _noted: anyio.Event = field(default_factory=anyio.Event)

    def __len__(self) -> int:
        """Return the number of claims that have neither been prepared nor left since."""
        return len(self._backoffs)

    def __contains__(self, claim: ResourceClaimRef) -> bool:
        """Return whether a claim has failed, and has neither been prepared nor left since."""
        return claim in self._backoffs

    def note(self, claim: ResourceClaimRef) -> None:
        """Note one more failure of a claim."""
        new = Backoff(self.first, self.longest, jitter=True)
        delay = self._backoffs.setdefault(claim, new).next()
        self._due[claim] = anyio.current_time() + delay
        self._noted.set()

    def forget(self, claim: ResourceClaimRef) -> None:
        """Forget a claim that is prepared, or needs no further attempt."""
        self._backoffs.pop(claim, None)
        self._due.pop(claim, None)

    async def wait_due(self) -> ResourceClaimRef:
        """Wait until the back-off of a claim has passed; return the claim, once."""
        while True:
            self._noted = anyio.Event()
            claim = min(self._due, key=self._due.__getitem__, default=None)
            wait = inf if claim is None else self._due[claim] - anyio.current_time()
            if claim is not None and wait <= 0:
                del self._due[claim]
                return claim
            with anyio.move_on_after(wait):
                await self._noted.wait()


@dataclass(frozen=True)
class ClaimStates:
    """The claims that the driver knows. A change of one is made under its lock.

    Attributes:
        prepared: the devices of each prepared claim; after a start, as the kubelet's account has
            them.
        refused: the allocations of claims that could not be prepared; changes of GPUs show when
            they can be.
        failed: the other claims that could not be prepared, and may be later.
    """

    prepared: dict[ResourceClaimRef, tuple[PreparedDevice, ...]] = field(default_factory=dict)
    refused: dict[ResourceClaimRef, Allocation] = field(default_factory=dict)
    failed: FailedClaims = field(default_factory=FailedClaims)
    _locks: WeakValueDictionary[ResourceClaimRef, anyio.Lock] = field(
        default_factory=WeakValueDictionary
    )

    def lock_of(self, claim: ResourceClaimRef) -> anyio.Lock:
        """Return the lock of a claim, the same one while anybody has it or waits for it.

        The kubelet repeats the calls that it gave up.
        """
        return self._locks.setdefault(claim, anyio.Lock())
