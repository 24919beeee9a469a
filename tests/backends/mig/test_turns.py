"""What has become free is on offer one profile after the other: turns alone, time given."""

from itertools import pairwise

from metagpu.backends.mig.turns import TURN, Turns
from metagpu.core.facts import Fact, GpusFound, SharesGranted, SharesReleased, StockTold
from metagpu.core.model import Made, Stock
from metagpu.core.report import hindrance
from metagpu.core.snapshot import GpuState
from tests.backends.mig.gpus import mig_gpu
from tests.backends.mig.test_mig import ALL, backend
from tests.build import after, offer

GPU = mig_gpu()
SHARES = {it.id.partition("::")[2]: it for it in backend().shares(GPU)}


class Node:
    """A GPU whose instances are made and left, and what is told of it at the times it is looked at.

    Attributes:
        idle: whether no program stays on what is left.
    """

    def __init__(self) -> None:
        self.turns = Turns()
        self.idle = True
        self._known = after(GpusFound((GPU,), at=0), offer(*SHARES.values()))
        self._there = set[str]()
        self.look(0)

    @property
    def state(self) -> GpuState:
        """The GPU as everybody knows it."""
        return self._known.gpus[GPU.id]

    def hold(self, slot: str) -> None:
        """Let a container have an instance, which is made."""
        self._there.add(slot)
        self._apply(SharesGranted((SHARES[slot],), at=1))

    def leave(self, slot: str) -> None:
        """Let the kubelet tell that nobody has it any more."""
        self._apply(SharesReleased((SHARES[slot],), at=2))

    def look(self, now: float) -> float:
        """Tell what there is; say how long until something has its turn."""
        held = {it.partition("::")[2] for it in self.state.leases}
        made = {
            SHARES[slot].id: Made(
                *("MIG", 1, 0), idle=slot not in held and self.idle, again=slot in held
            )
            for slot in self._there
        }
        told = self.turns.taken_in(Stock(made), self.state, "mig", now)
        self._apply(StockTold(GPU.id, "mig", told, at=now))
        return self.turns.pause(now)

    def offered(self) -> list[str]:
        """Say of which profiles somebody could have an instance now, the largest first."""
        shut = self.state.withheld | self.state.leases.keys()
        free = {slot.partition("@")[0] for slot, it in SHARES.items() if it.id not in shut}
        return sorted(free, key=lambda it: (-size(it), it))

    def _apply(self, fact: Fact) -> None:
        self._known = after(fact, since=self._known)


def size(profile: str) -> int:
    """Count what an instance of a profile occupies."""
    return next(len(it.footprint) for slot, it in SHARES.items() if slot.startswith(profile + "@"))


def test_at_the_first_look_everything_is_on_offer() -> None:
    """A daemon that starts on an idle GPU lets nobody wait."""
    assert set(Node().offered()) == set(ALL)


def test_freed_slices_are_offered_to_one_profile_after_the_other() -> None:
    """First to whoever wants what was left, then to the largest, and a turn later to the next."""
    node = Node()
    node.hold("3g.20gb@0")
    node.hold("3g.20gb@4")
    node.look(1)
    assert node.offered() == []

    node.leave("3g.20gb@0")
    node.leave("3g.20gb@4")
    seen, now = [], 10.0
    while (pause := node.look(now)) < TURN * 10:
        seen.append(node.offered())
        assert pause == TURN
        now += pause
    seen.append(node.offered())

    assert seen[:2] == [["3g.20gb"], ["7g.40gb", "3g.20gb"]]
    assert len(seen) == len(ALL)
    assert all(len(more) == len(less) + 1 for less, more in pairwise(seen))


def test_what_was_just_left_stays_on_offer() -> None:
    """The scheduler sends the next pod before the kubelet tells; nothing beside it is given yet."""
    node = Node()
    node.hold("2g.10gb@4")
    node.look(1)
    node.leave("2g.10gb@4")

    assert SHARES["2g.10gb@4"].id not in node.state.withheld
    for slot in ("1g.5gb@4", "3g.20gb@4", "7g.40gb@0"):
        assert SHARES[slot].id in node.state.withheld


def test_a_program_that_stays_keeps_all_of_it() -> None:
    """What was left and is used is nobody's once that is seen."""
    node = Node()
    node.hold("2g.10gb@4")
    node.look(1)
    node.leave("2g.10gb@4")
    node.idle = False
    node.look(10)

    assert SHARES["2g.10gb@4"].id in node.state.withheld
    node.idle = True
    node.look(20)
    node.look(20 + TURN)
    assert "2g.10gb" in node.offered()


def test_who_is_faster_ends_the_turns_of_others() -> None:
    """What overlaps a new instance is withheld, and has its turn only once that has gone too."""
    node = Node()
    node.hold("7g.40gb@0")
    node.look(1)
    node.leave("7g.40gb@0")
    node.look(10)
    node.look(10 + TURN)
    assert node.offered() == ["7g.40gb", "3g.20gb"]

    node.hold("3g.20gb@0")
    for turn in range(2, 10):
        node.look(10 + turn * TURN)
    assert "7g.40gb" not in node.offered()
    assert node.turns.pause(100) == float("inf")

    node.leave("3g.20gb@0")
    assert "7g.40gb" not in node.offered()
    node.look(100)
    assert "7g.40gb" not in node.offered()
    node.look(100 + TURN)
    assert "7g.40gb" in node.offered()


def test_what_is_freed_soon_after_waits_for_those_before() -> None:
    """A pod that was just sent for the one profile is not in a race with one for another."""
    node = Node()
    node.hold("1g.5gb@6")
    node.hold("3g.20gb@0")
    node.look(1)
    node.leave("3g.20gb@0")
    node.look(10)
    node.look(10 + TURN)
    before = node.offered()
    node.leave("1g.5gb@6")
    node.look(10 + TURN + TURN / 2)

    assert "7g.40gb" not in before
    assert "7g.40gb" not in node.offered()


def test_a_pod_that_asks_out_of_turn_is_told() -> None:
    """A refusal says that it is a matter of seconds, and not so of what a pod is in the way of."""
    node, share = Node(), SHARES["1g.5gb@0"]
    node.hold("7g.40gb@0")
    node.look(1)
    assert hindrance(node.state, share) == f"GPU {GPU} is in use by mig"
    node.leave("7g.40gb@0")
    node.look(10)

    assert hindrance(node.state, share) == (
        f"GPU {GPU}: {share.id} has just become free, and has its turn in some seconds"
    )
