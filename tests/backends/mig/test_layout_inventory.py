"""The inventory under a fixed layout: missing instances, removals, and what blocks the layout."""

from metagpu.backends.mig.backend import MigBackend
from metagpu.backends.mig.inventory import InstanceSettings, MigTiming
from metagpu.backends.mig.layout_inventory import LayoutInventory
from metagpu.backends.mig.options import MigOptions
from metagpu.backends.mig.profiles import share_id
from metagpu.core.grants.injection import Injection
from metagpu.core.model.mig import MigInstance
from metagpu.core.model.shares import HardwareDevice, Holder, ProvisionedState, ShareId
from metagpu.core.model.snapshot import GpuState
from metagpu.core.state.facts import Fact, GpusFound, LeasesObserved, ProvisioningReported
from tests.backends.mig.gpus import instance, mig_gpu
from tests.backends.mig.inventories import report
from tests.rigs.build import after, offer

A = mig_gpu()
LAYOUT = frozenset(("3g.20gb@0", "3g.20gb@4"))
THREE, TWO, OTHER = (
    instance(A, "3g.20gb@4", 1),
    instance(A, "2g.10gb@4", 2),
    instance(A, "1g.5gb@0", 3),
)
POD = Holder("default", "pod", "main")
SHARES = MigBackend(MigOptions("mig", layout={"3g.20gb": 2}), Injection()).shares(A)
POLL, SCAN = MigTiming().poll, MigTiming().scan


def state(*facts: Fact) -> GpuState:
    """Return the GPU's state after some facts."""
    return after(GpusFound((A,), at=0), *facts).gpus[A.id]


def held(*slots: str, elsewhere: str = "") -> LeasesObserved:
    """Report pods that hold these instances, and a device of another plugin."""
    ids = [share_id(A.id, slot) for slot in slots] + [ShareId(elsewhere)] * bool(elsewhere)
    return LeasesObserved(dict.fromkeys(ids, POD), at=5)


IDLE = state(held())


def inventory(*allowed: str) -> LayoutInventory:
    """Create an inventory that was never scanned."""
    return LayoutInventory(InstanceSettings(frozenset(allowed), 30, 10, LAYOUT), "mig")


def scanned(
    *present: MigInstance, pids: dict[int | None, list[int]] | None = None
) -> LayoutInventory:
    """Create an inventory after a first scan, at 0 s, of a GPU without leases."""
    it = inventory("3g.20gb")
    scan(it, *present, pids=pids, at=0)
    return it


def scan(
    it: LayoutInventory,
    *present: MigInstance,
    pids: dict[int | None, list[int]] | None = None,
    at: float,
    now: GpuState = IDLE,
) -> None:
    """Scan the GPU at a time, in a state."""
    it.update_instances(now, present, at)
    it.update_processes(now, pids or {}, at)


def test_missing_instances_are_created() -> None:
    """An empty GPU gets all of the layout, and no missing instance is on offer."""
    it = scanned()

    assert it.missing_instances(IDLE, 0) == ["3g.20gb@0", "3g.20gb@4"]
    assert set(report(it, IDLE).blocked.values()) == {
        f"instance 3g.20gb@{n} of the layout is missing: it is about to be created" for n in (0, 4)
    }
    assert it.waiting_reason(IDLE) == ""


def test_an_instance_in_its_slot_is_ours_at_once() -> None:
    """An idle earlier instance in its slot is on offer without delay, and is not removed."""
    it = scanned(THREE)

    assert it.is_owned("3g.20gb@4")
    assert it.missing_instances(IDLE, 0) == ["3g.20gb@0"]
    assert it.removable(IDLE, 1000) == []
    assert report(it, IDLE).devices[share_id(A.id, "3g.20gb@4")].idle


def test_an_instance_in_use_is_not_taken_over() -> None:
    """An instance with a process, or of another plugin's pod, is not ours."""
    it = scanned(THREE, pids={THREE.number: [7]})
    assert not it.is_owned("3g.20gb@4")

    it, now = inventory("3g.20gb"), state(held(elsewhere=THREE.compute_instances[0].uuid))
    scan(it, THREE, at=0, now=now)
    assert not it.is_owned("3g.20gb@4")
    assert "not created by metagpu" in "".join(report(it, now).blocked.values())


def test_no_instance_is_taken_over_before_the_kubelet_has_reported() -> None:
    """An earlier instance is not offered before the pods' devices are known."""
    it = inventory()
    scan(it, THREE, at=0, now=state())

    assert not it.is_owned("3g.20gb@4")


def test_work_does_not_begin_while_an_instance_blocks_the_layout() -> None:
    """An idle instance of ours stays while another one is held."""
    it = scanned(TWO, OTHER)
    it.owned |= {device.uuid for one in (TWO, OTHER) for device in one.compute_instances}
    it.unclaimed.clear()
    now = state(held("2g.10gb@4"))
    scan(it, TWO, OTHER, at=1, now=now)

    assert it.missing_instances(now, 1) == []
    assert it.removable(now, 1000) == []
    assert it.seconds_to_check(now, 1) == SCAN
    assert it.blockers(now) == ["default/pod (main) holds instance 2g.10gb@4"]
    assert it.waiting_reason(now) == (
        "the layout waits: default/pod (main) holds instance 2g.10gb@4"
    )

    scan(it, TWO, OTHER, at=2)
    assert it.blockers(IDLE) == []
    assert sorted(it.removable(IDLE, 2)) == ["1g.5gb@0", "2g.10gb@4"]
    assert it.missing_instances(IDLE, 2) == []  # first they have to go


def test_an_instance_outside_the_layout_is_taken_over_after_a_while() -> None:
    """An instance of any other profile blocks the layout until it is taken over."""
    it = scanned(TWO)
    assert it.waiting_reason(IDLE) == (
        "the layout waits: instance 2g.10gb@4 existed before metagpu started; metagpu takes it "
        "over once it has been unused for a while"
    )

    scan(it, TWO, at=31)
    assert it.removable(IDLE, 31) == ["2g.10gb@4"]
    scan(it, at=32)
    late = instance(A, "1g.5gb@6", 9)
    scan(it, late, at=33)
    scan(it, late, at=99)
    assert not it.is_owned("1g.5gb@6")


def test_an_instance_of_an_earlier_configuration_is_ours() -> None:
    """Reported by this agent before a reload, it is removed without delay."""
    devices = {share_id(A.id, "2g.10gb@4"): HardwareDevice(TWO.compute_instances[0].uuid, 2, 0)}
    it = inventory()
    now = state(ProvisioningReported(A.id, "mig", ProvisionedState(devices), at=1))
    scan(it, TWO, OTHER, at=0, now=now)

    assert it.is_owned("2g.10gb@4")
    assert not it.is_owned("1g.5gb@0")


def test_a_failed_creation_is_tried_again_with_a_back_off() -> None:
    """The reason is reported; the other instance does not wait."""
    it = scanned()
    it.record_creation_failure("3g.20gb@0", "no", 10)

    assert it.missing_instances(IDLE, 10) == ["3g.20gb@4"]
    assert it.seconds_to_check(IDLE, 10) == POLL
    assert it.missing_instances(IDLE, 10 + POLL) == ["3g.20gb@0", "3g.20gb@4"]
    assert it.waiting_reason(IDLE) == "the layout waits: no"

    it.record_creation_failure("3g.20gb@0", "no", 20)
    assert it.seconds_to_check(IDLE, 20) == 2 * POLL
    it.owned.add(THREE.compute_instances[0].uuid)
    scan(it, THREE, at=21)
    assert it.waiting_reason(IDLE) == ""


def test_a_creation_that_cannot_be_tried_now_causes_no_busy_loop() -> None:
    """The next scan is not hastened by an instance that is blocked, being created, or lost."""
    it = scanned()
    it.record_creation_failure("3g.20gb@4", "no room", 10)
    scan(it, TWO, at=20)
    assert it.missing_instances(IDLE, 20) == []
    assert it.seconds_to_check(IDLE, 20) == SCAN

    scan(it, at=30)
    it.changing.add("3g.20gb@4")
    assert it.seconds_to_check(IDLE, 30) == SCAN
    it.changing.clear()
    assert it.seconds_to_check(IDLE, 30) == 0
    now = state(offer(*SHARES), held("3g.20gb@4"))
    scan(it, at=31, now=now)
    assert it.missing_instances(now, 31) == ["3g.20gb@0"]
    assert it.seconds_to_check(now, 31) == SCAN


def test_a_failed_removal_is_tried_again() -> None:
    """An idle instance that could not be removed keeps the layout waiting, with the reason."""
    it = scanned(TWO)
    scan(it, TWO, at=40)
    it.record_removal_failure("2g.10gb@4", "busy", 40)

    assert it.removable(IDLE, 40) == []
    assert it.removable(IDLE, 40 + POLL) == ["2g.10gb@4"]
    assert it.missing_instances(IDLE, 99) == ["3g.20gb@0"]
    assert "cannot be removed: busy" in it.waiting_reason(IDLE)


def test_an_unfinished_instance_is_created_again() -> None:
    """An instance without its compute instance is removed, and then missing."""
    it = scanned(instance(A, "3g.20gb@4", 1, computes=0))

    assert it.removable(IDLE, 0) == ["3g.20gb@4"]
    assert it.seconds_to_check(IDLE, 0) == 0


def test_a_lost_instance_is_not_created_for_its_pod() -> None:
    """After a reset the slot of the pod's instance waits for the pod's end; the other is filled."""
    leased = state(offer(*SHARES), held("3g.20gb@4"))
    it = inventory()
    scan(it, at=0, now=leased)

    assert it.missing_instances(leased, 0) == ["3g.20gb@0"]
