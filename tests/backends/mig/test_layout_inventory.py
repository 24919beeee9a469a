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
    layout_inventory = inventory("3g.20gb")
    scan(layout_inventory, *present, pids=pids, at=0)
    return layout_inventory


def scan(
    layout_inventory: LayoutInventory,
    *present: MigInstance,
    pids: dict[int | None, list[int]] | None = None,
    at: float,
    now: GpuState = IDLE,
) -> None:
    """Scan the GPU at a time, in a state."""
    layout_inventory.update_instances(now, present, at)
    layout_inventory.update_processes(now, pids or {}, at)


def test_missing_instances_are_created() -> None:
    """An empty GPU gets all of the layout, and no missing instance is on offer."""
    layout_inventory = scanned()

    assert layout_inventory.missing_instances(IDLE, 0) == ["3g.20gb@0", "3g.20gb@4"]
    assert set(report(layout_inventory, IDLE).blocked.values()) == {
        f"instance 3g.20gb@{n} of the layout is missing: it is about to be created" for n in (0, 4)
    }
    assert layout_inventory.waiting_reason(IDLE) == ""


def test_an_instance_in_its_slot_is_ours_at_once() -> None:
    """An idle earlier instance in its slot is on offer without delay, and is not removed."""
    layout_inventory = scanned(THREE)

    assert layout_inventory.is_owned("3g.20gb@4")
    assert layout_inventory.missing_instances(IDLE, 0) == ["3g.20gb@0"]
    assert layout_inventory.removable(IDLE, 1000) == []
    assert report(layout_inventory, IDLE).devices[share_id(A.id, "3g.20gb@4")].idle


def test_an_instance_in_use_is_not_taken_over() -> None:
    """An instance with a process, or of another plugin's pod, is not ours."""
    layout_inventory = scanned(THREE, pids={THREE.number: [7]})
    assert not layout_inventory.is_owned("3g.20gb@4")

    layout_inventory, now = (
        inventory("3g.20gb"),
        state(held(elsewhere=THREE.compute_instances[0].uuid)),
    )
    scan(layout_inventory, THREE, at=0, now=now)
    assert not layout_inventory.is_owned("3g.20gb@4")
    assert "not created by metagpu" in "".join(report(layout_inventory, now).blocked.values())


def test_no_instance_is_taken_over_before_the_kubelet_has_reported() -> None:
    """An earlier instance is not offered before the pods' devices are known."""
    layout_inventory = inventory()
    scan(layout_inventory, THREE, at=0, now=state())

    assert not layout_inventory.is_owned("3g.20gb@4")


def test_work_does_not_begin_while_an_instance_blocks_the_layout() -> None:
    """An idle instance of ours stays while another one is held."""
    layout_inventory = scanned(TWO, OTHER)
    layout_inventory.owned |= {
        device.uuid for one in (TWO, OTHER) for device in one.compute_instances
    }
    layout_inventory.unclaimed.clear()
    now = state(held("2g.10gb@4"))
    scan(layout_inventory, TWO, OTHER, at=1, now=now)

    assert layout_inventory.missing_instances(now, 1) == []
    assert layout_inventory.removable(now, 1000) == []
    assert layout_inventory.seconds_to_check(now, 1) == SCAN
    assert layout_inventory.blockers(now) == ["default/pod (main) holds instance 2g.10gb@4"]
    assert layout_inventory.waiting_reason(now) == (
        "the layout waits: default/pod (main) holds instance 2g.10gb@4"
    )

    scan(layout_inventory, TWO, OTHER, at=2)
    assert layout_inventory.blockers(IDLE) == []
    assert sorted(layout_inventory.removable(IDLE, 2)) == ["1g.5gb@0", "2g.10gb@4"]
    assert layout_inventory.missing_instances(IDLE, 2) == []  # first they have to go


def test_an_instance_outside_the_layout_is_taken_over_after_a_while() -> None:
    """An instance of any other profile blocks the layout until it is taken over."""
    layout_inventory = scanned(TWO)
    assert layout_inventory.waiting_reason(IDLE) == (
        "the layout waits: instance 2g.10gb@4 may be of another program; metagpu takes it "
        "over once it has been unused for a while"
    )

    scan(layout_inventory, TWO, at=31)
    assert layout_inventory.removable(IDLE, 31) == ["2g.10gb@4"]
    scan(layout_inventory, at=32)
    late = instance(A, "1g.5gb@6", 9)
    scan(layout_inventory, late, at=33)
    scan(layout_inventory, late, at=99)
    assert not layout_inventory.is_owned("1g.5gb@6")


def test_an_instance_of_an_earlier_configuration_is_ours() -> None:
    """Reported by this agent before a reload, it is removed without delay."""
    devices = {share_id(A.id, "2g.10gb@4"): HardwareDevice(TWO.compute_instances[0].uuid, 2, 0)}
    layout_inventory = inventory()
    now = state(ProvisioningReported(A.id, "mig", ProvisionedState(devices), at=1))
    scan(layout_inventory, TWO, OTHER, at=0, now=now)

    assert layout_inventory.is_owned("2g.10gb@4")
    assert not layout_inventory.is_owned("1g.5gb@0")


def test_a_failed_creation_is_tried_again_with_a_back_off() -> None:
    """The reason is reported; the other instance does not wait."""
    layout_inventory = scanned()
    layout_inventory.record_creation_failure("3g.20gb@0", "no", 10)

    assert layout_inventory.missing_instances(IDLE, 10) == ["3g.20gb@4"]
    assert layout_inventory.seconds_to_check(IDLE, 10) == POLL
    assert layout_inventory.missing_instances(IDLE, 10 + POLL) == ["3g.20gb@0", "3g.20gb@4"]
    assert layout_inventory.waiting_reason(IDLE) == "the layout waits: no"

    layout_inventory.record_creation_failure("3g.20gb@0", "no", 20)
    assert layout_inventory.seconds_to_check(IDLE, 20) == 2 * POLL
    layout_inventory.owned.add(THREE.compute_instances[0].uuid)
    scan(layout_inventory, THREE, at=21)
    assert layout_inventory.waiting_reason(IDLE) == ""


def test_a_creation_that_cannot_be_tried_now_causes_no_busy_loop() -> None:
    """The next scan is not hastened by an instance that is blocked, being created, or lost."""
    layout_inventory = scanned()
    layout_inventory.record_creation_failure("3g.20gb@4", "no room", 10)
    scan(layout_inventory, TWO, at=20)
    assert layout_inventory.missing_instances(IDLE, 20) == []
    assert layout_inventory.seconds_to_check(IDLE, 20) == SCAN

    scan(layout_inventory, at=30)
    layout_inventory.changing.add("3g.20gb@4")
    assert layout_inventory.seconds_to_check(IDLE, 30) == SCAN
    layout_inventory.changing.clear()
    assert layout_inventory.seconds_to_check(IDLE, 30) == 0
    now = state(offer(*SHARES), held("3g.20gb@4"))
    scan(layout_inventory, at=31, now=now)
    assert layout_inventory.missing_instances(now, 31) == ["3g.20gb@0"]
    assert layout_inventory.seconds_to_check(now, 31) == SCAN


def test_a_failed_removal_is_tried_again() -> None:
    """An idle instance that could not be removed keeps the layout waiting, with the reason."""
    layout_inventory = scanned(TWO)
    scan(layout_inventory, TWO, at=40)
    layout_inventory.record_removal_failure("2g.10gb@4", "busy", 40)

    assert layout_inventory.removable(IDLE, 40) == []
    assert layout_inventory.removable(IDLE, 40 + POLL) == ["2g.10gb@4"]
    assert layout_inventory.missing_instances(IDLE, 99) == ["3g.20gb@0"]
    assert "cannot be removed: busy" in layout_inventory.waiting_reason(IDLE)


def test_an_unfinished_instance_is_created_again() -> None:
    """An instance without its compute instance is removed, and then missing."""
    layout_inventory = scanned(instance(A, "3g.20gb@4", 1, computes=0))

    assert layout_inventory.removable(IDLE, 0) == ["3g.20gb@4"]
    assert layout_inventory.seconds_to_check(IDLE, 0) == 0


def test_a_lost_instance_is_not_created_for_its_pod() -> None:
    """After a reset the slot of the pod's instance waits for the pod's end; the other is filled."""
    leased = state(offer(*SHARES), held("3g.20gb@4"))
    layout_inventory = inventory()
    scan(layout_inventory, at=0, now=leased)

    assert layout_inventory.missing_instances(leased, 0) == ["3g.20gb@0"]
