"""What has become free on a GPU is on offer again one profile after the other. Pure.

Free slices could be an instance of any profile, and pods of several may wait for them. A scheduler
that reads of all at once sends one pod for each in the same moment, and all but one of them fail.
"""

from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from metagpu.core.mig import profile_of
from metagpu.core.model import Share, ShareId, Stock
from metagpu.core.sharing import withheld
from metagpu.core.snapshot import GpuState

TURN: Final = 1.5
"""Seconds that a profile is ahead of the next: longer than it takes until the Node shows it
(`cluster.telling.RISE`), and a pod that waits for it is bound and admitted."""


@dataclass(slots=True)
class Turns:
    """Which shares of one GPU have had their turn since their slices became free.

    At the first look all have. Times are those of the event loop.

    Attributes:
        open: those that have: they are free, or held, or were just left.
        next: when the next profile has its turn.
        waiting: whether one waits for that.
    """

    open: frozenset[ShareId] | None = None
    next: float = 0.0
    waiting: bool = False

    def taken_in(self, stock: Stock, state: GpuState, backend: str, now: float) -> Stock:
        """Add to a stock the shares that are not on offer yet; what is held or just left is.

        Whoever wants a share that was just left is sent before the kubelet says that it is free.
        The largest profile comes first: smaller ones have room more often.
        """
        mine = [share for share in state.shares if share.backend == backend]
        leases = state.leases
        shut = withheld(state.shares, leases, state.cleaning, {**state.stocks, backend: stock})
        free = {share.id: share for share in mine if share.id not in leases.keys() | shut}
        just_left = {share for share, made in stock.made.items() if made.again}
        kept = {share.id for share in mine if share.id in leases or share.id in just_left}
        if self.open is None:
            self.open = frozenset(free)

        had = (self.open & free.keys()) | kept
        closed = free.keys() - had
        if closed and not self.waiting:
            self.next = max(self.next, now + TURN)
        while closed and now >= self.next:
            first = profile_of(max(closed, key=lambda it: _size(free[it])))
            had |= {it for it in closed if profile_of(it) == first}
            closed = free.keys() - had
            self.next = now + TURN
        self.open, self.waiting = frozenset(had), bool(closed)
        return replace(stock, late=frozenset(it.id for it in mine) - self.open)

    def pause(self, now: float) -> float:
        """Say after how many seconds the next profile has its turn; for long if none waits."""
        return max(0.0, self.next - now) if self.waiting else float("inf")


def _size(share: Share) -> tuple[int, str]:
    return len(share.footprint), share.id
