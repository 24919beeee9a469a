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
    inventory = empty_inventory(now)
    inventory.update_instances(now, [TWO], 1)
    assert list(report(inventory, now).named_devices) == [TWO_UUID]

    inventory.owned.add(TWO_UUID)
    named = report(inventory, now).named_devices
    assert list(named) == [TWO_UUID, f"{GPU.id}::2g.10gb:4"]
    assert {(device.device, device.gpu_instance) for device in named.values()} == {(TWO_UUID, 5)}

    inventory.changing.add("2g.10gb@4")  # it is about to go
    assert not report(inventory, now).named_devices


def test_a_pod_keeps_the_name_of_its_place_under_a_layout() -> None:
    """A pod admitted while instances were created on demand keeps the name of its instance."""
    held, released = state(observed("2g.10gb@4")), state(observed())
    inventory = empty_inventory(held)
    inventory.settings = replace(inventory.settings, layout=frozenset(("2g.10gb@4",)))
    add_owned(inventory, held)
    assert list(report(inventory, held).named_devices) == [TWO_UUID, f"{GPU.id}::2g.10gb:4"]
    assert list(report(inventory, released).named_devices) == [TWO_UUID]


def test_a_released_share_may_be_given_again_until_the_next_scan() -> None:
    """A released share is reusable before its lease ends, so that no list shows otherwise."""
    held, released = state(observed("2g.10gb@4")), state(observed())
    inventory = empty_inventory(held)
    add_owned(inventory, held)
    flags = [[(d.reusable, d.idle) for d in report(inventory, held).devices.values()]]
    flags.append([(d.reusable, d.idle) for d in report(inventory, released).devices.values()])
    inventory.update_processes(released, {5: [77]}, 10)
    flags.append([(d.reusable, d.idle) for d in report(inventory, released).devices.values()])
    inventory.update_processes(released, NO_PROCESSES, 20)
    flags.append([(d.reusable, d.idle) for d in report(inventory, released).devices.values()])

    assert flags == [[(True, False)], [(True, False)], [(False, False)], [(False, True)]]


def test_a_changing_instance_is_not_reported() -> None:
    """An instance in creation or removal is neither offered nor blocked: containers wait."""
    now = state(observed())
    inventory = empty_inventory(now)
    add_owned(inventory, now)
    inventory.update_processes(now, NO_PROCESSES, 0)
    inventory.changing.add("2g.10gb@4")

    reported = report(inventory, now)
    assert (dict(reported.devices), dict(reported.blocked)) == ({}, {})
    assert inventory.removable(now, 1e9) == []


def test_a_profile_that_is_not_known_blocks_its_slices() -> None:
    """An instance of a profile that NVML does not list is foreign, and its slices are blocked."""
    now = state(observed())
    inventory = empty_inventory(state())
    odd = type(TWO)(5, 99, TWO.placement, TWO.compute_instances)
    inventory.update_instances(now, [odd], 1)

    assert report(inventory, now).blocked.keys() == {"s4", "s5"}
