"""The provisioned state of a GPU: the devices of its instances, their names, blocked slots."""

from msgspec.structs import replace

from tests.backends.mig.inventories import (
    GPU,
    NO_PROCESSES,
    TWO,
    TWO_UUID,
    add_owned,
    empty_inventory,
    observed,
    report,
    state,
)


def test_every_device_has_a_uuid_name_and_ours_a_placement_name() -> None:
    """CDI names every device by its uuid, and ours by placement too."""
    now = state()
    it = empty_inventory(now)
    it.update_instances(now, [TWO], 1)
    assert list(report(it, now).named_devices) == [TWO_UUID]

    it.owned.add(TWO_UUID)
    named = report(it, now).named_devices
    assert list(named) == [TWO_UUID, f"{GPU.id}::2g.10gb:4"]
    assert {(device.device, device.gpu_instance) for device in named.values()} == {(TWO_UUID, 5)}

    it.changing.add("2g.10gb@4")  # it is about to go
    assert not report(it, now).named_devices


def test_a_pod_keeps_the_name_of_its_place_under_a_layout() -> None:
    """A pod admitted while instances were created on demand keeps the name of its instance."""
    held, released = state(observed("2g.10gb@4")), state(observed())
    it = empty_inventory(held)
    it.settings = replace(it.settings, layout=frozenset(("2g.10gb@4",)))
    add_owned(it, held)
    assert list(report(it, held).named_devices) == [TWO_UUID, f"{GPU.id}::2g.10gb:4"]
    assert list(report(it, released).named_devices) == [TWO_UUID]


def test_a_released_share_may_be_given_again_until_the_next_scan() -> None:
    """A released share is reusable before its lease ends, so that no list shows otherwise."""
    held, released = state(observed("2g.10gb@4")), state(observed())
    it = empty_inventory(held)
    add_owned(it, held)
    flags = [[(d.reusable, d.idle) for d in report(it, held).devices.values()]]
    flags.append([(d.reusable, d.idle) for d in report(it, released).devices.values()])
    it.update_processes(released, {5: [77]}, 10)
    flags.append([(d.reusable, d.idle) for d in report(it, released).devices.values()])
    it.update_processes(released, NO_PROCESSES, 20)
    flags.append([(d.reusable, d.idle) for d in report(it, released).devices.values()])

    assert flags == [[(True, False)], [(True, False)], [(False, False)], [(False, True)]]


def test_a_changing_instance_is_not_reported() -> None:
    """An instance in creation or removal is neither offered nor blocked: containers wait."""
    now = state(observed())
    it = empty_inventory(now)
    add_owned(it, now)
    it.update_processes(now, NO_PROCESSES, 0)
    it.changing.add("2g.10gb@4")

    reported = report(it, now)
    assert (dict(reported.devices), dict(reported.blocked)) == ({}, {})
    assert it.removable(now, 1e9) == []


def test_a_profile_that_is_not_known_blocks_its_slices() -> None:
    """An instance of a profile that NVML does not list is foreign, and its slices are blocked."""
    now = state(observed())
    it = empty_inventory(state())
    odd = type(TWO)(5, 99, TWO.placement, TWO.compute_instances)
    it.update_instances(now, [odd], 1)

    assert report(it, now).blocked.keys() == {"s4", "s5"}
