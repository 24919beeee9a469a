"""The staggered offer of freed slices, one profile after the other. The test gives the time."""

from itertools import pairwise

import pytest
from msgspec.structs import replace

from metagpu.backends.mig.inventory import MigTiming
from metagpu.backends.mig.reconciler import OfferStagger
from metagpu.core.availability.conflict import conflicting_shares
from metagpu.core.model.offers import Api
from metagpu.core.model.shares import HardwareDevice, ProvisionedState
from metagpu.core.model.snapshot import GpuState
from metagpu.core.state.facts import (
    Fact,
    GpusFound,
    ProvisioningReported,
    SharesClaimed,
    SharesReleased,
)
from tests.backends.mig.gpus import mig_gpu
from tests.backends.mig.test_backend import ALL, backend
from tests.rigs.build import after, offer, refusal

GPU = mig_gpu()
STAGGER = MigTiming().stagger
SHARES = {share.id.partition("::")[2]: share for share in backend().shares(GPU)}


class Node:
    """A GPU whose instances are held and released, with a report at given times.

    Attributes:
        idle: whether no process stays on a released instance.
    """

    def __init__(self, *, dra: bool = False) -> None:
        self.stagger = OfferStagger()
        self.idle = True
        offered = offer(*SHARES.values())
        if dra:
            offered = replace(offered, apis=dict.fromkeys(offered.resources, Api.DRA))
        self._known = after(GpusFound((GPU,), at=0), offered)
        self._there = set[str]()
        self.report(0)

    @property
    def state(self) -> GpuState:
        """The GPU's state."""
        return self._known.gpus[GPU.id]

    def hold(self, slot: str) -> None:
        """Create an instance and its lease."""
        self._there.add(slot)
        self._apply(SharesClaimed((SHARES[slot],), at=1))

    def release(self, slot: str) -> None:
        """Report the end of the lease, as the kubelet does."""
        self._apply(SharesReleased((SHARES[slot],), at=2))

    def report(self, now: float) -> float:
        """Report the instances; return the seconds until the next profile is offered."""
        held = {lease.partition("::")[2] for lease in self.state.leases}
        made = {
            SHARES[slot].id: HardwareDevice(
                *("MIG", 1, 0), idle=slot not in held and self.idle, reusable=slot in held
            )
            for slot in self._there
        }
        provisioned = self.stagger.apply(ProvisionedState(made), self.state, "mig", now)
        self._apply(ProvisioningReported(GPU.id, "mig", provisioned, at=now))
        return self.stagger.seconds_to_next(now)

    def offered(self) -> list[str]:
        """List the profiles of which an instance could be granted now, the largest first."""
        shut = conflicting_shares(self.state) | self.state.leases.keys()
        free = {slot.partition("@")[0] for slot, share in SHARES.items() if share.id not in shut}
        return sorted(free, key=lambda text: (-size(text), text))

    def _apply(self, fact: Fact) -> None:
        self._known = after(fact, since=self._known)


def size(profile: str) -> int:
    """Count what an instance of a profile occupies."""
    return next(
        len(share.footprint) for slot, share in SHARES.items() if slot.startswith(profile + "@")
    )


def test_at_the_first_report_everything_is_on_offer() -> None:
    """An agent that starts on an idle GPU delays no profile."""
    assert set(Node().offered()) == set(ALL)


def test_freed_slices_are_offered_to_one_profile_after_the_other() -> None:
    """The released profile stays on offer; the largest follows, then the next, in steps."""
    node = Node()
    node.hold("3g.20gb@0")
    node.hold("3g.20gb@4")
    node.report(1)
    assert node.offered() == []

    node.release("3g.20gb@0")
    node.release("3g.20gb@4")
    seen, now = [], 10.0
    while (pause := node.report(now)) < STAGGER * 10:
        seen.append(node.offered())
        assert pause == STAGGER
        now += pause
    seen.append(node.offered())

    assert seen[:2] == [["3g.20gb"], ["7g.40gb", "3g.20gb"]]
    assert len(seen) == len(ALL)
    assert all(len(more) == len(less) + 1 for less, more in pairwise(seen))


def test_with_dra_freed_slices_are_offered_at_once() -> None:
    """The scheduler allocates places one by one: no two pods are sent for the same slices."""
    node = Node(dra=True)
    node.hold("3g.20gb@0")
    node.report(1)
    node.release("3g.20gb@0")

    assert node.report(2) == float("inf")
    assert set(node.offered()) == set(ALL)


def test_a_share_that_was_just_released_stays_on_offer() -> None:
    """The scheduler sends the next pod before the kubelet reports; nothing beside it is given."""
    node = Node()
    node.hold("2g.10gb@4")
    node.report(1)
    node.release("2g.10gb@4")

    assert SHARES["2g.10gb@4"].id not in conflicting_shares(node.state)
    for slot in ("1g.5gb@4", "3g.20gb@4", "7g.40gb@0"):
        assert SHARES[slot].id in conflicting_shares(node.state)


def test_a_process_that_stays_keeps_all_slices() -> None:
    """A released instance with a process is off the list once a scan has found the process."""
    node = Node()
    node.hold("2g.10gb@4")
    node.report(1)
    node.release("2g.10gb@4")
    node.idle = False
    node.report(10)

    assert SHARES["2g.10gb@4"].id in conflicting_shares(node.state)
    node.idle = True
    node.report(20)
    node.report(20 + STAGGER)
    assert "2g.10gb" in node.offered()


def test_a_new_instance_ends_the_stagger_of_profiles_that_overlap_it() -> None:
    """The profiles are offered again only after this instance has gone too."""
    node = Node()
    node.hold("7g.40gb@0")
    node.report(1)
    node.release("7g.40gb@0")
    node.report(10)
    node.report(10 + STAGGER)
    assert node.offered() == ["7g.40gb", "3g.20gb"]

    node.hold("3g.20gb@0")
    for turn in range(2, 10):
        node.report(10 + turn * STAGGER)
    assert "7g.40gb" not in node.offered()
    assert node.stagger.seconds_to_next(100) == float("inf")

    node.release("3g.20gb@0")
    assert "7g.40gb" not in node.offered()
    node.report(100)
    assert "7g.40gb" not in node.offered()
    node.report(100 + STAGGER)
    assert "7g.40gb" in node.offered()


def test_slices_freed_soon_after_wait_their_time() -> None:
    """A pod that was just sent for one profile is not in a race with a pod for another."""
    node = Node()
    node.hold("1g.5gb@6")
    node.hold("3g.20gb@0")
    node.report(1)
    node.release("3g.20gb@0")
    node.report(10)
    node.report(10 + STAGGER)
    before = node.offered()
    node.release("1g.5gb@6")
    node.report(10 + STAGGER + STAGGER / 2)

    assert "7g.40gb" not in before
    assert "7g.40gb" not in node.offered()


def test_a_pod_that_asks_too_early_is_refused_with_the_reason() -> None:
    """The refusal mentions seconds, except while a pod holds the slices."""
    node, share = Node(), SHARES["1g.5gb@0"]
    node.hold("7g.40gb@0")
    node.report(1)
    assert refusal(node.state, share).endswith(f": GPU {GPU} is in use by mig")
    node.release("7g.40gb@0")
    node.report(10)

    assert refusal(node.state, share).endswith(
        f": GPU {GPU}: {share.id} has just become free and is offered again in a few seconds"
    )


def test_the_next_profile_is_offered_exactly_after_the_stagger() -> None:
    """Not a moment before the time is over, and at the moment when it is; the next one later."""
    node = Node()
    node.hold("3g.20gb@0")
    node.hold("3g.20gb@4")
    node.report(1)
    node.release("3g.20gb@0")
    node.release("3g.20gb@4")

    assert node.report(10) == STAGGER
    assert node.report(10 + STAGGER - 0.001) == pytest.approx(0.001)
    assert node.offered() == ["3g.20gb"]
    assert node.report(10 + STAGGER) == STAGGER
    assert node.offered() == ["7g.40gb", "3g.20gb"]
    assert node.stagger.next_at == 10 + 2 * STAGGER
    node.report(10 + 2 * STAGGER - 0.001)
    assert node.offered() == ["7g.40gb", "3g.20gb"]


def test_a_late_report_offers_one_profile_and_not_all_that_are_due() -> None:
    """The time to the next profile counts from the report, not from when it was due."""
    node = Node()
    node.hold("7g.40gb@0")
    node.report(1)
    node.release("7g.40gb@0")
    node.report(10)
    node.report(10 + 5 * STAGGER)

    assert node.offered() == ["7g.40gb", "3g.20gb"]
    assert node.stagger.next_at == 10 + 6 * STAGGER


def test_freed_slices_wait_for_the_profile_offered_last() -> None:
    """A release within the time of an offer is delayed to its end, and not to a new one."""
    node = Node()
    node.hold("1g.5gb@6")
    node.hold("3g.20gb@0")
    node.report(1)
    node.release("3g.20gb@0")
    now = 10.0
    while (delay := node.report(now)) != float("inf"):
        now += delay
    due = node.stagger.next_at
    assert due == now + STAGGER

    node.release("1g.5gb@6")
    assert node.report(now + STAGGER / 2) == STAGGER
    assert node.stagger.next_at == now + STAGGER / 2 + STAGGER > due
