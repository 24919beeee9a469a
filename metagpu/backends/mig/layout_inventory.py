"""The inventory of one GPU under a fixed layout, and the provisioned state. Pure.

Work on a layout does not begin while a pod, a process or a foreign instance occupies a slot that
the layout needs: until then no instance is created or removed, and the present ones stay on offer.
The provisioned state has the devices and the blocked slots of any inventory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from metagpu.backends.mig.inventory import (
    InstanceInventory,
    RetryState,
    held_slots,
    identity,
    schedule_retry,
)
from metagpu.backends.mig.profiles import share_id
from metagpu.backends.mig.sharing import with_suffix
from metagpu.core.grants.cdi import device_name
from metagpu.core.model.mig import MigInstance, slot_of
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
            f"instance {slot} may be of another program; metagpu takes it over once it has been "
            "unused for a while"
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


@dataclass
class LayoutInventory(InstanceInventory):
    """The inventory of a GPU with a fixed layout (`InstanceSettings.layout`).

    Attributes:
        creation_failures: the instances that could not be created.
    """

    creation_failures: dict[str, RetryState] = field(default_factory=dict)

    @property
    def layout(self) -> list[str]:
        """The slots of the layout."""
        return sorted(self.settings.layout or ())

    def update_instances(self, state: GpuState, listed: Sequence[MigInstance], now: float) -> None:
        """Take over NVML's list; an instance that exists has no creation failure."""
        super().update_instances(state, listed, now)
        self.creation_failures = {
            slot: failure
            for slot, failure in self.creation_failures.items()
            if slot not in self.present
        }

    def update_processes(
        self, state: GpuState, pids: Mapping[int | None, Sequence[int]], now: float
    ) -> None:
        """Take over the processes; an idle instance in a slot of the layout becomes ours.

        No pod can hold it under another id, and the kubelet gives no id twice.
        """
        foreign = state.kubelet.mig_devices_of_other_plugins
        for slot in self.unclaimed.keys() & set(self.layout):
            instance = self.present[slot]
            held = foreign is None or identity(instance) in foreign
            if not held and not pids.get(instance.number):
                del self.unclaimed[slot]
                self.owned.add(identity(instance))
        super().update_processes(state, pids, now)

    def missing_instances(self, state: GpuState, now: float) -> list[str]:
        """List the instances to create now: with a free slot and without a recent failure."""
        if self.settings.keeps_existing or self.blockers(state):
            return []
        return [
            slot
            for slot in self._missing()
            if not self.overlapping(state, slot)
            and (slot not in self.creation_failures or now >= self.creation_failures[slot].at)
        ]

    def seconds_to_check(self, state: GpuState, now: float) -> float:
        """Return after how many seconds there may be something to do, if nothing happens."""
        failed = self.creation_failures.keys() & set(self._missing())
        times = [
            self.creation_failures[slot].at - now
            for slot in ([] if self.blockers(state) else failed)
            if not self.overlapping(state, slot)
        ]
        return max(0.0, min([super().seconds_to_check(state, now), *times]))

    def record_creation_failure(self, slot: str, reason: str, now: float) -> None:
        """Record that an instance could not be created."""
        before = self.creation_failures.get(slot)
        self.creation_failures[slot] = schedule_retry(before, reason, now, self.settings.timing)

    def blockers(self, state: GpuState) -> list[str]:
        """List what occupies slots that missing instances need, and may do so for long."""
        found = [
            reason
            for missing in self._missing()
            for slot in self.overlapping(state, missing)
            if (reason := self._retention_reason(state, slot))
        ]
        return list(dict.fromkeys(found))

    def waiting_reason(self, state: GpuState) -> str:
        """Return why the layout has no instance, empty if it has one or will have soon."""
        if any(self.is_owned(slot) or slot in self.changing for slot in self.layout):
            return ""
        found = (self._absence_reason(state, slot) for slot in self._missing())
        reasons = dict.fromkeys(filter(None, found))
        return f"the layout waits: {'; '.join(reasons)}" if reasons else ""

    def missing_slots(self, state: GpuState) -> Mapping[str, str]:
        """Return the footprint slots of missing instances, and why each is missing."""
        found: dict[str, str] = {}
        for slot in self.layout:
            if slot in self.changing:
                reason = f"instance {slot} is being created"
                found |= dict.fromkeys(self.blocked_slots(state, slot), reason)
        for slot in self._missing():
            gone = "another program removed it"
            soon = gone if self.settings.keeps_existing else "it is about to be created"
            reason = self._absence_reason(state, slot) or soon
            text = f"instance {slot} of the layout is missing: {reason}"
            found |= dict.fromkeys(self.blocked_slots(state, slot), text)
        return found

    def blocked_slots(self, state: GpuState, slot: str) -> frozenset[str]:
        """Return the footprint slots, with every suffix, that an instance excludes."""
        footprint = self.footprint(state, slot)
        suffixes = {suffix for its in self.settings.suffixes.values() for suffix in its}
        return footprint.union(*(with_suffix(footprint, suffix) for suffix in suffixes))

    def _missing(self) -> Iterator[str]:
        """Find missing instances, but not those that a pod lost: it cannot use a new one."""
        lost = set(map(slot_of, self.lost))
        for slot in self.layout:
            if slot not in self.present and slot not in self.changing and slot not in lost:
                yield slot

    def _retention_reason(self, state: GpuState, slot: str) -> str:
        """Return why an instance cannot be removed now, empty if it can."""
        for share, lease in state.leases.items():
            if slot_of(share) == slot:
                return f"{lease.holder or 'a pod that is being admitted'} holds instance {slot}"
        if slot in self.removal_failures or slot in self.changing:
            return ""
        return blocking_reason(self, state, slot)

    def _absence_reason(self, state: GpuState, missing: str) -> str:
        """Return why an instance of the layout is missing, empty if nothing keeps it away."""
        reasons = [
            reason
            for slot in self.overlapping(state, missing)
            if (reason := self._retention_reason(state, slot) or blocking_reason(self, state, slot))
        ]
        if not reasons and missing in self.creation_failures:
            return self.creation_failures[missing].reason
        return ", ".join(reasons)

    def _removal_time(self, state: GpuState, slot: str) -> float:
        """Return when to remove an idle instance: at once, if the layout can be created."""
        if self.settings.keeps_existing:
            return inf
        in_layout = slot in self.layout and self.present[slot].compute_instances
        if (in_layout and not self.is_faulty(state, slot)) or self.blockers(state):
            return inf
        failure = self.removal_failures.get(slot)
        return failure.at if failure else self.idle[slot]

    def _may_be_ours(self, slot: str, instance: MigInstance) -> bool:
        """Return whether an instance may become ours, of any profile at the first scan.

        Nothing but the layout shall exist on the GPU. An instance that appears later may become
        ours only in a slot of the layout.
        """
        new = slot in self.layout and not self.is_owned(slot) and slot not in self.unclaimed
        return (new if self.scanned else True) and len(instance.compute_instances) <= 1
