"""What there is beside what a layout wants: what is missing, what goes, what is in the way."""

from metagpu.backends.mig import MigBackend
from metagpu.backends.mig.board import share_id
from metagpu.backends.mig.ledger import LOOK, POLL, Terms
from metagpu.backends.mig.options import MigOptions
from metagpu.backends.mig.standing import Standing
from metagpu.backends.mig.telling import stock
from metagpu.core.facts import Fact, GpusFound, LeasesObserved, StockTold
from metagpu.core.injection import Injection
from metagpu.core.mig import MigInstance
from metagpu.core.model import Holder, Made, ShareId, Stock
from metagpu.core.snapshot import GpuState
from tests.backends.mig.gpus import instance, mig_gpu
from tests.build import after, offer

A = mig_gpu()
FIXED = frozenset(("3g.20gb@0", "3g.20gb@4"))
THREE, TWO, OTHER = (
    instance(A, "3g.20gb@4", 1),
    instance(A, "2g.10gb@4", 2),
    instance(A, "1g.5gb@0", 3),
)
POD = Holder("default", "pod", "main")
SHARES = MigBackend(MigOptions("mig", layout={"3g.20gb": 2}), Injection()).shares(A)


def state(*facts: Fact) -> GpuState:
    """Give what is known of the GPU after some facts."""
    return after(GpusFound((A,), at=0), *facts).gpus[A.id]


def held(*slots: str, elsewhere: str = "") -> LeasesObserved:
    """Let the kubelet tell of pods."""
    ids = [share_id(A.id, slot) for slot in slots] + [ShareId(elsewhere)] * bool(elsewhere)
    return LeasesObserved(dict.fromkeys(ids, POD), at=5)


def seen(
    *present: MigInstance, pids: dict[int | None, list[int]] | None = None, at: float = 0
) -> Standing:
    """Look at a GPU where these are and nobody holds any, for the first time."""
    it = Standing(Terms(frozenset(("3g.20gb",)), 30, 10, FIXED), "mig", state(held()))
    look(it, *present, pids=pids, at=at)
    return it


def look(
    it: Standing,
    *present: MigInstance,
    pids: dict[int | None, list[int]] | None = None,
    at: float,
) -> None:
    """Look at the GPU."""
    it.take_in(present, at)
    it.see(pids or {}, at)


def test_what_is_missing_is_made() -> None:
    """Of an empty GPU all, and what is not there is given to nobody."""
    it = seen()

    assert it.absent(0) == ["3g.20gb@0", "3g.20gb@4"]
    assert set(stock(it, alone=True).blocked.values()) == {
        f"instance 3g.20gb@{n} of the layout is not there: it is about to be made" for n in (0, 4)
    }
    assert it.why_none() == ""


def test_an_instance_in_its_place_is_ours_at_once() -> None:
    """Found idle at a start it is given without delay, and is not removed."""
    it = seen(THREE)

    assert it.is_ours("3g.20gb@4")
    assert it.absent(0) == ["3g.20gb@0"]
    assert it.unwanted(1000) == []
    assert stock(it, alone=True).made[share_id(A.id, "3g.20gb@4")].idle


def test_an_instance_in_use_is_not_taken() -> None:
    """One on which a program runs is not ours; neither is one that another plugin gave."""
    it = seen(THREE, pids={THREE.number: [7]})
    assert not it.is_ours("3g.20gb@4")

    it = Standing(it.terms, "mig", state(held(elsewhere=THREE.computes[0].uuid)))
    look(it, THREE, at=0)
    assert not it.is_ours("3g.20gb@4")
    assert "which metagpu did not make" in "".join(stock(it, alone=True).blocked.values())


def test_nobody_is_told_before_the_kubelet_has_told() -> None:
    """Until it is known what pods hold, what is found is not given."""
    it = Standing(Terms(frozenset(), 30, 10, FIXED), "mig", state())
    look(it, THREE, at=0)

    assert not it.is_ours("3g.20gb@4")


def test_nothing_is_begun_while_something_is_in_the_way() -> None:
    """An idle instance of ours stays if another one is held: what there is stays as it is."""
    it = seen(TWO, OTHER)
    it.ours |= {device.uuid for one in (TWO, OTHER) for device in one.computes}
    it.found.clear()
    it.state = state(held("2g.10gb@4"))
    look(it, TWO, OTHER, at=1)

    assert it.absent(1) == []
    assert it.unwanted(1000) == []
    assert it.pause(1) == LOOK
    assert it.hindrances() == ["default/pod (main) holds instance 2g.10gb@4"]
    assert it.why_none() == "the layout waits: default/pod (main) holds instance 2g.10gb@4"

    it.state = state(held())
    look(it, TWO, OTHER, at=2)
    assert it.hindrances() == []
    assert sorted(it.unwanted(2)) == ["1g.5gb@0", "2g.10gb@4"]
    assert it.absent(2) == []  # first they have to go


def test_what_is_not_of_the_layout_is_taken_over_after_a_while() -> None:
    """Whatever its profile: the layout is all that shall be there. Until then it is in the way."""
    it = seen(TWO)
    assert it.why_none() == (
        "the layout waits: instance 2g.10gb@4 was found here; it is taken over if nobody uses it "
        "for a while"
    )

    look(it, TWO, at=31)
    assert it.unwanted(31) == ["2g.10gb@4"]
    look(it, at=32)
    late = instance(A, "1g.5gb@6", 9)
    look(it, late, at=33)
    look(it, late, at=99)
    assert not it.is_ours("1g.5gb@6")


def test_what_this_daemon_made_is_ours_after_a_change() -> None:
    """Told under an earlier configuration, it goes without delay."""
    made = {share_id(A.id, "2g.10gb@4"): Made(TWO.computes[0].uuid, 2, 0)}
    it = Standing(
        Terms(frozenset(), 30, 10, FIXED), "mig", state(StockTold(A.id, "mig", Stock(made), at=1))
    )
    look(it, TWO, OTHER, at=0)

    assert it.is_ours("2g.10gb@4")
    assert not it.is_ours("1g.5gb@0")


def test_what_could_not_be_made_is_tried_again_later_and_later() -> None:
    """The reason is told; the other instance does not wait."""
    it = seen()
    it.note_unmade("3g.20gb@0", "no", 10)

    assert it.absent(10) == ["3g.20gb@4"]
    assert it.pause(10) == POLL
    assert it.absent(10 + POLL) == ["3g.20gb@0", "3g.20gb@4"]
    assert it.why_none() == "the layout waits: no"

    it.note_unmade("3g.20gb@0", "no", 20)
    assert it.pause(20) == 2 * POLL
    it.ours.add(THREE.computes[0].uuid)
    look(it, THREE, at=21)
    assert it.why_none() == ""


def test_what_cannot_be_tried_again_now_is_waited_for() -> None:
    """Nobody looks at a GPU without a pause because of what is held up, or is being made anew."""
    it = seen()
    it.note_unmade("3g.20gb@4", "no room", 10)
    look(it, TWO, at=20)
    assert it.absent(20) == []
    assert it.pause(20) == LOOK

    look(it, at=30)
    it.busy.add("3g.20gb@4")
    assert it.pause(30) == LOOK
    it.busy.clear()
    assert it.pause(30) == 0
    it.state = state(offer(*SHARES), held("3g.20gb@4"))
    look(it, at=31)
    assert it.absent(31) == ["3g.20gb@0"]
    assert it.pause(31) == LOOK


def test_what_stays_is_tried_again() -> None:
    """An idle instance that could not be removed keeps the layout waiting, and says why."""
    it = seen(TWO)
    look(it, TWO, at=40)
    it.note_stuck("2g.10gb@4", "busy", 40)

    assert it.unwanted(40) == []
    assert it.unwanted(40 + POLL) == ["2g.10gb@4"]
    assert it.absent(99) == ["3g.20gb@0"]
    assert "cannot be removed: busy" in it.why_none()


def test_half_an_instance_is_made_anew() -> None:
    """One without its compute instance is removed, and then missing."""
    half = instance(A, "3g.20gb@4", 1, computes=0)
    it = seen(half)

    assert it.unwanted(0) == ["3g.20gb@4"]
    assert it.pause(0) == 0


def test_what_a_pod_lost_is_not_made_for_it() -> None:
    """After a reset the pod's instance waits for its end; the other one is made."""
    leased = state(offer(*SHARES), held("3g.20gb@4"))
    it = Standing(Terms(frozenset(), 30, 10, FIXED), "mig", leased)
    look(it, at=0)

    assert it.absent(0) == ["3g.20gb@0"]
