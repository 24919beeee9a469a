"""The staggered offer of freed slices: one profile after the other. Pure.

Freed slices have room for an instance of any profile, and pods of several profiles may wait for
them. A scheduler that reads of all profiles at once sends one pod for each at the same moment, and
all but one of these pods fail.
"""

from dataclasses import dataclass, field

from msgspec.structs import replace

from metagpu.backends.mig.inventory import MigTiming
from metagpu.core.model.mig import profile_of
from metagpu.core.model.offers import Api
from metagpu.core.model.shares import ProvisionedState, Share, ShareId
from metagpu.core.model.sharing import unavailable_shares
from metagpu.core.model.snapshot import GpuState


@dataclass(slots=True)
class OfferStagger:
    """The shares of one GPU that are on offer again since their slices became free.

    At the first report all shares are. Times are those of the event loop.

    Attributes:
        timing: its `stagger` is the time between two profiles.
        offered: the free shares on offer, the held ones, and those just released.
        next_at: when the next profile is offered.
        waiting: whether a profile waits for that.
    """

    timing: MigTiming = field(default_factory=MigTiming)
    offered: frozenset[ShareId] | None = None
    next_at: float = 0.0
    waiting: bool = False

    def apply(
        self, provisioned: ProvisionedState, state: GpuState, backend: str, now: float
    ) -> ProvisionedState:
        """Add the shares not on offer yet; held and just released ones always are.

        The scheduler sends a pod for a share that was just released before the kubelet reports
        its end. The largest profile comes first: smaller ones find room more often. By DRA
        nothing is delayed: the scheduler itself allocates the places one by one.
        """
        if state.api is Api.DRA:
            return provisioned
        mine = [share for share in state.shares if share.backend == backend]
        leases = state.leases
        unavailable = unavailable_shares(
            state.shares, leases, state.cleaning, {**state.provisioned, backend: provisioned}
        )
        free = {share.id: share for share in mine if share.id not in leases.keys() | unavailable}
        released = {share for share, device in provisioned.devices.items() if device.reusable}
        always = {share.id for share in mine if share.id in leases or share.id in released}
        if self.offered is None:
            self.offered = frozenset(free)

        offered = (self.offered & free.keys()) | always
        delayed = free.keys() - offered
        if delayed and not self.waiting:
            self.next_at = max(self.next_at, now + self.timing.stagger)
        while delayed and now >= self.next_at:
            profile = profile_of(max(delayed, key=lambda it: _size(free[it])))
            offered |= {it for it in delayed if profile_of(it) == profile}
            delayed = free.keys() - offered
            self.next_at = now + self.timing.stagger
        self.offered, self.waiting = frozenset(offered), bool(delayed)
        return replace(provisioned, delayed=frozenset(it.id for it in mine) - self.offered)

    def seconds_to_next(self, now: float) -> float:
        """Return the seconds until the next profile is offered, infinite if none waits."""
        return max(0.0, self.next_at - now) if self.waiting else float("inf")


def _size(share: Share) -> tuple[int, str]:
    return len(share.footprint), share.id
