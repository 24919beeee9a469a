"""The provisioned state of one GPU: devices and blocked slots. Pure."""

from collections.abc import Mapping
from typing import Final

from metagpu.backends.mig.geometry import share_id
from metagpu.backends.mig.inventory import InstanceInventory, held_slots, identity
from metagpu.core.grants.cdi import device_name
from metagpu.core.model.mig import MigInstance
from metagpu.core.model.shares import HardwareDevice, ProvisionedState, ShareId
from metagpu.core.model.snapshot import GpuState

_NOT_YET: Final = "its MPS control daemon is not running yet"


def provisioned_state(
    inventory: InstanceInventory, state: GpuState, *, exclusive: bool
) -> ProvisionedState:
    """Return the whole state; call `InstanceInventory.record_leases` before."""
    devices: dict[ShareId, HardwareDevice] = {}
    blocked: dict[str, str] = {}
    named: dict[str, HardwareDevice] = {}
    paused: dict[ShareId, str] = {}

    for slot, instance in inventory.present.items():
        if slot in inventory.changing:
            continue
        if reason := blocking_reason(inventory, state, slot):
            blocked |= dict.fromkeys(inventory.blocked_slots(state, slot), reason)
        if not instance.compute_instances:
            continue
        named |= _named_devices(inventory, state, slot, instance)
        if inventory.is_owned(slot):
            devices |= _devices(inventory, state, slot, instance)
            uuid = instance.compute_instances[0].uuid
            problem = inventory.daemon_problems.get(uuid, _NOT_YET)
            if inventory.uses_mps(slot) and problem:
                shares = inventory.shares(state, slot)
                paused |= dict.fromkeys(shares, f"instance {slot}: {problem}")

    return ProvisionedState(
        devices,
        dict(inventory.failed),
        blocked | dict(inventory.missing_slots(state)),
        paused,
        exclusive,
        named,
        pending=frozenset(inventory.creating),
    )


def blocking_reason(inventory: InstanceInventory, state: GpuState, slot: str) -> str:
    """Return why an instance excludes all shares on its slots, empty if it does not."""
    if slot in inventory.unclaimed:
        return (
            f"instance {slot} existed before metagpu started; metagpu takes it over once it has "
            "been unused for a while"
        )
    if not inventory.is_owned(slot):
        return f"instance {slot} was not created by metagpu"
    return _removal_reason(inventory, state, slot) if inventory.is_unleased(state, slot) else ""


def _removal_reason(inventory: InstanceInventory, state: GpuState, slot: str) -> str:
    """Return why an unleased instance of ours is not idle, empty if it is."""
    if inventory.is_faulty(state, slot):
        return _fault_reason(inventory, state, slot)
    if slot in inventory.processes:
        return f"instance {slot} was released, and {inventory.processes[slot]} still runs on it"
    if slot in inventory.removal_failures:
        return f"instance {slot} cannot be removed: {inventory.removal_failures[slot].reason}"
    return ""


def _fault_reason(inventory: InstanceInventory, state: GpuState, slot: str) -> str:
    fault = state.mig_faults[identity(inventory.present[slot])].reason
    text = f"instance {slot} is out of service ({fault}) and will be created again"
    if slot in inventory.processes:
        text += f"; {inventory.processes[slot]} still runs on it"
    if slot in inventory.removal_failures:
        text += f"; it cannot be removed: {inventory.removal_failures[slot].reason}"
    return text


def _devices(
    inventory: InstanceInventory, state: GpuState, slot: str, instance: MigInstance
) -> Mapping[ShareId, HardwareDevice]:
    """Return the device of an instance for each of its shares."""
    first, faulty = instance.compute_instances[0], inventory.is_faulty(state, slot)
    # A container that gets another replica of a held instance shares it anyway.
    free = not faulty and (slot in held_slots(state) or slot in inventory.idle)
    reusable = not faulty and slot in inventory.just_released
    return {
        share: HardwareDevice(
            *(first.uuid, instance.number, first.number),
            idle=free and share not in state.leases,
            reusable=reusable,
            placement=instance.placement,
        )
        for share in inventory.shares(state, slot)
    }


def _named_devices(
    inventory: InstanceInventory, state: GpuState, slot: str, instance: MigInstance
) -> Mapping[str, HardwareDevice]:
    """Return an instance's device by its CDI names: its uuid and, if ours, its slot.

    Of a layout, only an instance that a pod holds has the name by slot: the pod may have been
    admitted with that name before.
    """
    first = instance.compute_instances[0]
    device = HardwareDevice(first.uuid, instance.number, first.number)
    on_demand = inventory.settings.layout is None
    if inventory.is_owned(slot) and (on_demand or slot in held_slots(state)):
        return {first.uuid: device, device_name(share_id(state.gpu.id, slot)): device}
    return {first.uuid: device}
