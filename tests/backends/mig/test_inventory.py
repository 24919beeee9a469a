"""The inventory of a GPU's instances: their owners, and actions. The test gives the time."""

import pytest

from metagpu.backends.mig.inventory import MigTiming, identity
from metagpu.core.model.mig import MigInstance
from metagpu.core.state.facts import (
    LeasesObserved,
    ProvisioningReported,
    SharesClaimed,
    SharesPending,
)
from tests.backends.mig.gpus import instance
from tests.backends.mig.inventories import (
    GPU,
    NO_PROCESSES,
    POD,
    TWO,
    TWO_UUID,
    add_owned,
    empty_inventory,
    observed,
    report,
    share,
    state,
)

TIMING = MigTiming()
GRACE, POLL, SCAN = TIMING.grace, TIMING.poll, TIMING.scan


def test_an_instance_that_appears_later_is_foreign() -> None:
    """After the first scan, an instance that metagpu did not create blocks its slots for good."""
    now = state(observed())
    inventory = empty_inventory(now)
    inventory.update_instances(now, [TWO], 100)
    inventory.update_processes(now, NO_PROCESSES, 100 + 10 * GRACE)

    assert report(inventory, now).devices == {}
    assert report(inventory, now).blocked == dict.fromkeys(
        ("s4", "s5"), "instance 2g.10gb@4 was not created by metagpu"
    )
    assert not inventory.unleased(now)
    assert not inventory.removable(now, 1e9)


def test_a_pod_whose_instance_is_gone_waits_when_it_starts_again() -> None:
    """The lost instance is created again at the pod's next start, after a failure too."""
    now = state(observed("2g.10gb@4"))
    inventory = empty_inventory(now)
    inventory.update_instances(now, [], 6)
    assert not list(inventory.pending_leases(now))

    for at in (7, 8):
        now = state(observed("2g.10gb@4"), SharesPending((share("2g.10gb@4"),), at=at))
        [lease] = inventory.pending_leases(now)
        assert (lease.holder, lease.since) == (POD, at)
        inventory.record_lease_failure(lease, "no")
        assert not list(inventory.pending_leases(now))


def test_an_instance_of_before_is_taken_over_after_a_while() -> None:
    """An earlier instance is blocked, then idle; the kubelet must have reported all pods before."""
    now = state()
    inventory = empty_inventory(now, scanned=False)
    inventory.update_instances(now, [TWO], 0)
    inventory.update_processes(now, NO_PROCESSES, 2 * GRACE)
    assert inventory.unclaimed == {"2g.10gb@4": 2 * GRACE}
    assert "may be of another program" in report(inventory, now).blocked["s4"]

    now = state(observed())
    inventory.update_processes(now, NO_PROCESSES, 3 * GRACE - 1)
    assert inventory.unclaimed
    inventory.update_processes(now, NO_PROCESSES, 3 * GRACE)
    assert [device.idle for device in report(inventory, now).devices.values()] == [True]


def test_a_process_keeps_an_instance_from_being_taken_over() -> None:
    """The process may belong to its creator: the grace time begins again with the process's end."""
    now = state(observed())
    inventory = empty_inventory(now, scanned=False)
    inventory.update_instances(now, [TWO], 0)
    inventory.update_processes(now, {5: [77]}, GRACE)
    inventory.update_processes(now, NO_PROCESSES, 2 * GRACE - 1)

    assert inventory.unclaimed
    inventory.update_processes(now, NO_PROCESSES, 2 * GRACE)
    assert not inventory.unclaimed


@pytest.mark.parametrize(
    "found",
    [
        instance(GPU, "4g.20gb@0"),
        instance(GPU, "2g.10gb@4", computes=2),
    ],
    ids=["a profile that is not allowed", "several compute instances"],
)
def test_an_instance_that_metagpu_never_creates_is_foreign(found: MigInstance) -> None:
    """An instance of another profile, or with two compute instances, is foreign from the start."""
    now = state(observed())
    inventory = empty_inventory(now, scanned=False)
    inventory.update_instances(now, [found], 0)
    inventory.update_processes(now, NO_PROCESSES, 10 * GRACE)

    assert not inventory.owned
    assert report(inventory, now).blocked


def test_an_instance_of_another_plugin_is_foreign() -> None:
    """An instance that a pod holds by its uuid belongs to its plugin, even while it is idle."""
    now = state(observed(others=[TWO_UUID]))
    inventory = empty_inventory(now, scanned=False)
    inventory.update_instances(now, [TWO], 0)
    inventory.update_processes(now, NO_PROCESSES, 10 * GRACE)

    assert not inventory.owned
    assert "not created by metagpu" in report(inventory, now).blocked["s4"]


def test_the_share_of_a_pod_proves_that_an_instance_is_ours() -> None:
    """After a restart the id of the share is enough: the instance is the pod's, and stays."""
    now = state(observed("2g.10gb@4"))
    inventory = empty_inventory(now, scanned=False)
    inventory.update_instances(now, [TWO], 0)
    inventory.update_processes(now, NO_PROCESSES, 0)

    [device] = report(inventory, now).devices.values()
    assert (device.device, device.gpu_instance, device.idle) == (TWO_UUID, 5, False)
    assert not report(inventory, now).blocked
    assert not inventory.removable(now, 1e9)


def test_a_claim_is_no_proof() -> None:
    """A container in admission has no instance yet: the present one is not its own."""
    now = state(SharesClaimed((share("2g.10gb@4"),), at=1))
    inventory = empty_inventory(now)
    inventory.update_instances(now, [TWO], 2)

    assert not inventory.owned
    assert [lease.share.id for lease in inventory.pending_leases(now)] == [share("2g.10gb@4").id]


def test_an_instance_created_after_its_deadline_is_ours() -> None:
    """The slot of a late instance identifies it, at the next scan and no later."""
    now = state()
    inventory = empty_inventory(now)
    inventory.unsettled.add("2g.10gb@4")
    inventory.update_instances(now, [TWO], 1)
    assert inventory.owned

    other = empty_inventory(now)
    other.unsettled.add("2g.10gb@4")
    other.update_instances(now, [], 1)
    other.update_instances(now, [TWO], 2)
    assert not other.owned


@pytest.mark.parametrize(
    ("found", "ours"),
    [
        (instance(GPU, "2g.10gb@4", 5, computes=0), True),
        (instance(GPU, "2g.10gb@4", 6, computes=0), False),
        (TWO, False),
    ],
    ids=["without its compute instance", "another GPU instance", "with a compute instance"],
)
def test_a_failed_removal_leaves_the_same_instance_or_nothing(
    found: MigInstance, *, ours: bool
) -> None:
    """Another program created what else is in the slot of a failed removal."""
    now = state(observed())
    inventory = empty_inventory(now)
    inventory.half_removed["2g.10gb@4"] = 5
    inventory.update_instances(now, [found], 1)
    assert inventory.is_owned("2g.10gb@4") is ours


def test_a_number_without_a_compute_instance_is_ours_in_its_place_alone() -> None:
    """A half-removed instance has no uuid: another program may get its number elsewhere."""
    now = state(observed())
    inventory = empty_inventory(now)
    inventory.half_removed["2g.10gb@4"] = 5
    inventory.update_instances(now, [instance(GPU, "2g.10gb@4", 5, computes=0)], 1)
    inventory.update_instances(now, [instance(GPU, "2g.10gb@2", 5, computes=0)], 2)
    assert not inventory.is_owned("2g.10gb@2")
    assert not inventory.owned


def test_an_instance_that_appears_in_an_outage_is_taken_over_like_one_of_before() -> None:
    """After a creation that failed in an outage, the instance in its slot may be anybody's."""
    now = state(observed())
    inventory = empty_inventory(now)
    inventory.unsettled.add("2g.10gb@4")
    inventory.outage = True
    inventory.update_instances(now, [TWO], 100)
    inventory.update_processes(now, {5: [77]}, 100 + GRACE)
    assert not inventory.owned
    inventory.update_processes(now, NO_PROCESSES, 100 + 2 * GRACE)
    assert inventory.owned


def test_after_an_outage_the_wait_of_an_instance_of_before_begins_again() -> None:
    """Another instance may be in its slot since."""
    now = state(observed())
    inventory = empty_inventory(now, scanned=False)
    inventory.update_instances(now, [TWO], 0)
    inventory.outage = True
    inventory.update_instances(now, [TWO], 2 * GRACE)
    inventory.update_processes(now, NO_PROCESSES, 2 * GRACE)
    assert not inventory.owned


def test_a_late_instance_that_another_plugin_gave_is_foreign() -> None:
    """The failed call of ours did not create what a pod holds by its uuid."""
    now = state(observed(others=[TWO_UUID]))
    inventory = empty_inventory(now)
    inventory.unsettled.add("2g.10gb@4")
    inventory.update_instances(now, [TWO], 1)
    assert not inventory.owned


def test_an_instance_requested_under_another_configuration_is_ours() -> None:
    """The report hands open requests on: the next owner of the GPU recognises their instances."""
    claimed = SharesClaimed((share("2g.10gb@4"),), at=1)
    before = empty_inventory(state(claimed))
    before.creating.add("2g.10gb@4")
    reported = ProvisioningReported(GPU.id, "mig", report(before, state(claimed)), at=2)
    assert reported.provisioned.pending == {"2g.10gb@4"}

    now = state(claimed, reported)
    inventory = empty_inventory(now, scanned=False)
    inventory.update_instances(now, [TWO, instance(GPU, "1g.5gb@0", 7)], 3)
    assert inventory.is_owned("2g.10gb@4")
    assert not list(inventory.pending_leases(now))
    assert not inventory.is_owned("1g.5gb@0")
    assert report(inventory, now).pending == frozenset()


def test_idle_instances_are_removed_after_a_while() -> None:
    """Instances stay warm for the pool's time; an unfinished one is removed at once."""
    now = state(observed())
    inventory = empty_inventory(now, keep_warm=10)
    add_owned(inventory, now)
    inventory.update_processes(now, NO_PROCESSES, 100)

    assert inventory.removable(now, 109.9) == []
    assert inventory.seconds_to_check(now, 101) == 9
    assert inventory.removable(now, 110) == ["2g.10gb@4"]

    half = empty_inventory(now)
    unfinished = instance(GPU, "2g.10gb@4", computes=0)
    half.owned.add(identity(unfinished))
    half.update_instances(now, [unfinished], 1)
    half.update_processes(now, NO_PROCESSES, 100)
    assert half.removable(now, 100) == ["2g.10gb@4"]
    assert not report(half, now).devices


def test_a_process_keeps_an_instance() -> None:
    """An instance with a process is not idle; its slots are blocked with the process named."""
    now = state(observed())
    inventory = empty_inventory(now)
    add_owned(inventory, now)
    inventory.update_processes(now, {5: [9, 7]}, 100)

    assert inventory.removable(now, 1e9) == []
    assert inventory.seconds_to_check(now, 100) == POLL
    assert report(inventory, now).blocked["s5"] == (
        "instance 2g.10gb@4 was released, and process 7, process 9 still runs on it"
    )
    inventory.update_processes(now, NO_PROCESSES, 200)
    assert inventory.idle == {"2g.10gb@4": 200}


def test_a_failed_removal_is_tried_again_with_a_back_off() -> None:
    """The delay doubles up to the time between two scans; the reason is reported meanwhile."""
    state_now = state(observed())
    inventory = empty_inventory(state_now, keep_warm=0)
    add_owned(inventory, state_now)
    inventory.update_processes(state_now, NO_PROCESSES, 0)
    delays = []
    now = 0.0
    for first in (True, False, False, False, False, False):
        assert inventory.record_removal_failure("2g.10gb@4", "In use", now) == first
        delays.append(inventory.seconds_to_check(state_now, now))
        assert inventory.removable(state_now, now) == []
        now += delays[-1]
        assert inventory.removable(state_now, now) == ["2g.10gb@4"]

    assert delays == [POLL, 2 * POLL, 4 * POLL, 8 * POLL, SCAN, SCAN]
    assert report(inventory, state_now).blocked["s4"].endswith("cannot be removed: In use")


def test_a_failure_concerns_one_lease() -> None:
    """A later lease of the share does not inherit the failure of an earlier one."""
    now = state(SharesClaimed((share("2g.10gb@4"),), at=1))
    inventory = empty_inventory(now)
    [lease] = inventory.pending_leases(now)
    inventory.record_lease_failure(lease, "no")
    assert [*inventory.pending_leases(now)] == []
    assert [failure.reason for failure in report(inventory, now).failed.values()] == ["no"]

    now = state(SharesClaimed((share("2g.10gb@4"),), at=2))
    assert len([*inventory.pending_leases(now)]) == 1
    assert report(inventory, now).failed == {}


def test_a_lost_instance_is_not_created_for_its_pod_again() -> None:
    """A pod that knows the old uuid could not use another instance; its share counts as lost."""
    now = state(observed("2g.10gb@4"))
    inventory = empty_inventory(now)
    inventory.update_instances(now, [], 1)

    assert inventory.lost == {share("2g.10gb@4").id}
    assert [*inventory.pending_leases(now)] == []


def test_a_quiet_gpu_is_scanned_now_and_then() -> None:
    """The next scan is after `scan` seconds; while instances are unclaimed, after `poll`."""
    now = state()
    assert empty_inventory(now).seconds_to_check(now, 0) == SCAN
    inventory = empty_inventory(now, scanned=False)
    inventory.update_instances(now, [TWO], 0)
    assert inventory.seconds_to_check(now, 0) == POLL


def test_a_lease_of_the_checkpoint_creates_nothing() -> None:
    """No instance is created for it: its container knows the uuid of an earlier one."""
    held = share("2g.10gb@4")
    fact = LeasesObserved(
        {}, at=1, kubelet_ready=False, allocated={held.id: held.resource}, begins=True
    )
    now = state(fact)
    assert held.id in now.leases
    assert [*empty_inventory(now).pending_leases(now)] == []
