"""The inventory of one GPU's MIG instances, and what follows from it. Pure.

A slot, such as `2g.10gb@4`, names an instance; a uuid identifies it for good.

Ownership (docs/decisions/0018): metagpu owns the instances that it created, that a pod holds under
a share of metagpu, or that existed at the start, could be of an earlier agent, and stayed unused
for `MigTiming.grace`. All others are foreign: metagpu leaves them alone and does not offer their
slots. Leftovers of an earlier agent need no such wait, which is for pods that were admitted while
no agent ran: there the kubelet has listed its pods, and nobody grants any more.

Methods take the GPU's state, since leases and faults change without the inventory.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from metagpu.backends.common.mps_daemon.control import SHARED_MEMORY
from metagpu.backends.mig.profiles import (
    PlacedProfile,
    ProfileGeometry,
    geometry_of,
    share_id,
    slot_of_instance,
)
from metagpu.backends.mig.sharing import UNSHARED
from metagpu.core.contracts.leftovers import AbandonedNode, Leftover
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.mig import MigInstance, slot_of
from metagpu.core.model.shares import Lease, ProvisionedState, ProvisionFailure, ShareId
from metagpu.core.model.snapshot import GpuState
from metagpu.core.runtime.rate_limit import Backoff


class MigTiming(msgspec.Struct, frozen=True):
    """Times of the MIG backend, in seconds.

    Attributes:
        scan: between two scans of a GPU where nothing happens; also the longest delay before a
            failed creation or removal is tried again.
        poll: between two scans while a process runs on an instance that no container holds; also
            the first of those delays.
        grace: how long an instance that existed at the start must stay unused before metagpu takes
            it over: longer than the kubelet takes to report a pod that was admitted while no agent
            ran.
        busy: before NVML is asked again that answered "in use": the first time; then twice as long
            each time, up to `longest_busy`.
        longest_busy: the limit of that delay.
        stagger: between the offers of two profiles on freed slices: longer than it takes until the
            Node shows the first (`NodeStatusWriter`), and a waiting pod is bound and admitted.
        shutdown: how long the removal of idle instances may take at the end.
    """

    scan: float = 30.0
    poll: float = 2.0
    grace: float = 30.0
    busy: float = 0.1
    longest_busy: float = 2.0
    stagger: float = 1.5
    shutdown: float = 5.0


class InstanceSettings(msgspec.Struct, frozen=True):
    """The configuration of one GPU's instances; times in seconds.

    Attributes:
        allowed: the profiles of which instances may be created.
        keep_warm: how long an idle instance is kept for the next container.
        deadline: how long the creation of an instance may take.
        layout: the slots of the fixed layout, `None` if instances are created on demand.
        suffixes: the suffixes of an instance's share ids, by profile; a profile that is left out
            has one share per instance, without a suffix.
        mps_profiles: the profiles of which instances are shared through MPS.
        keeps_existing: whether nothing is created or removed, as somebody else does that.
        shared_memory: the bytes of /dev/shm of each of those instances.
        timing: how often to scan, and when to try again.
    """

    allowed: frozenset[str]
    keep_warm: float
    deadline: float
    layout: frozenset[str] | None = None
    suffixes: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    mps_profiles: frozenset[str] = frozenset()
    keeps_existing: bool = False
    shared_memory: int = SHARED_MEMORY
    timing: MigTiming = MigTiming()


class RetryState(NamedTuple):
    """A failed creation or removal: the reason, when to try again, the back-off."""

    reason: str
    at: float
    backoff: Backoff


@dataclass(slots=True)
class InstanceInventory:
    """The instances of one GPU. Times are those of the event loop.

    Attributes:
        present: the instances that NVML listed last, by slot.
        owned: the identities of the instances that metagpu may remove.
        unclaimed: the instances that existed at the start, and since when each is unused.
        idle: the owned instances without lease and process, and since when.
        just_released: the instances that had a lease at the last report, and no scan since.
        processes: processes on instances without a lease, as text for messages.
        changing: the slots of which an instance is being created or removed.
        creating: those of which an instance is being created.
        removal_failures: the instances that could not be removed.
        unsettled: the slots of which a creation failed or was late since the last scan: an instance
            there is ours, unless scans failed meanwhile and it may be anybody's.
        half_removed: the GPU instances whose removal failed since the last scan, by slot: without
            compute instances they have another identity, and are still ours.
        failed: the leases for which no instance could be created.
        lost: the shares that pods hold and whose instances are gone.
        daemon_problems: why the MPS control daemon of a device takes no clients, by uuid; empty
            text where it does.
        scanned: whether there was a scan.
        outage: whether scans have failed since: others may have changed all instances.
    """

    settings: InstanceSettings
    backend: str
    present: dict[str, MigInstance] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)
    unclaimed: dict[str, float] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)
    just_released: set[str] = field(default_factory=set)
    processes: dict[str, str] = field(default_factory=dict)
    changing: set[str] = field(default_factory=set)
    creating: set[str] = field(default_factory=set)
    removal_failures: dict[str, RetryState] = field(default_factory=dict)
    unsettled: set[str] = field(default_factory=set)
    half_removed: dict[str, int] = field(default_factory=dict)
    failed: dict[ShareId, ProvisionFailure] = field(default_factory=dict)
    lost: frozenset[ShareId] = frozenset()
    daemon_problems: dict[str, str] = field(default_factory=dict)
    scanned: bool = False
    outage: bool = False

    def update_instances(self, state: GpuState, listed: Sequence[MigInstance], now: float) -> None:
        """Take over NVML's list; no request to create or remove may be open meanwhile."""
        held = {slot_of(share) for share, lease in state.leases.items() if lease.holder is not None}
        reported = set[str]()
        if not self.scanned:  # reported by this agent, under an earlier configuration
            before = state.provisioned.get(self.backend, ProvisionedState())
            reported = {device.device for device in before.devices.values()}
            self.unsettled |= before.pending
        self.present = {
            slot_of_instance(state.gpu.mig_profiles, mig_instance): mig_instance
            for mig_instance in listed
        }

        for slot, instance in self.present.items():
            ours = slot in held or identity(instance) in reported
            if ours or self._was_left_over(state, slot, instance):
                self.owned.add(identity(instance))
            elif self._may_be_ours(slot, instance):
                self.unclaimed[slot] = now

        if self.outage:  # another instance may be in the slot since
            self.unclaimed = dict.fromkeys(self.unclaimed, now)
        self._forget_absent(listed)
        for slot in held & self.unclaimed.keys():
            del self.unclaimed[slot]
        self.unsettled.clear()
        self.half_removed.clear()
        self.scanned, self.outage = True, False
        self.lost = frozenset(
            share
            for share, lease in state.leases.items()
            if lease.share.backend == self.backend
            and lease.holder is not None
            and slot_of(share) not in self.present
        )

    def update_processes(
        self, state: GpuState, pids: Mapping[int | None, Sequence[int]], now: float
    ) -> None:
        """Take over the processes on each GPU instance, by NVML's number.

        `pids` may be empty while no instance is `unleased`.
        """
        self.processes = {
            slot: ", ".join(f"process {pid}" for pid in sorted(set(here)))
            for slot in self.unleased(state)
            if (here := pids.get(self.present[slot].number))
        }
        foreign = state.kubelet.mig_devices_of_other_plugins
        for slot, since in list(self.unclaimed.items()):
            if foreign is not None and identity(self.present[slot]) in foreign:
                del self.unclaimed[slot]  # another plugin's: never ours
            elif slot in self.processes or foreign is None:
                self.unclaimed[slot] = now
            elif now - since >= self.settings.timing.grace:
                del self.unclaimed[slot]
                self.owned.add(identity(self.present[slot]))

        self.just_released &= held_slots(state)
        self.idle = {
            slot: self.idle.get(slot, now)
            for slot in self.present
            if self.is_unleased(state, slot) and slot not in self.processes
        }

    def unleased(self, state: GpuState) -> list[str]:
        """List the instances without a lease that are ours or may be."""
        return [
            slot for slot in self.present if slot in self.unclaimed or self.is_unleased(state, slot)
        ]

    def is_owned(self, slot: str) -> bool:
        """Return whether metagpu owns the instance in a slot."""
        instance = self.present.get(slot)
        return instance is not None and identity(instance) in self.owned

    def is_unleased(self, state: GpuState, slot: str) -> bool:
        """Return whether metagpu owns the instance in a slot and no lease holds it."""
        return self.is_owned(slot) and slot not in held_slots(state)

    def is_faulty(self, state: GpuState, slot: str) -> bool:
        """Return whether the instance in a slot is out of service."""
        instance = self.present.get(slot)
        return instance is not None and identity(instance) in state.mig_faults

    def shares(self, state: GpuState, slot: str) -> list[ShareId]:
        """Return the ids of the shares of an instance."""
        suffixes = self.settings.suffixes.get(slot.rpartition("@")[0], UNSHARED)
        return [share_id(state.gpu.id, f"{slot}{suffix}") for suffix in suffixes]

    def uses_mps(self, slot: str) -> bool:
        """Return whether the shares of an instance are for clients of MPS."""
        return slot.rpartition("@")[0] in self.settings.mps_profiles

    def pending_leases(self, state: GpuState) -> Iterator[Lease]:
        """Find leases whose containers wait for an instance, at admission or at a start.

        The container of any other lease knows the uuid of an earlier instance: a new one is of no
        use to it.
        """
        for share, lease in state.leases.items():
            failure, slot = self.failed.get(share), slot_of(share)
            if (
                lease.share.backend == self.backend
                and (lease.provisioned_at_start or _is_in_admission(lease))
                and slot not in self.changing
                and not self.is_owned(slot)
                and (failure is None or failure.since != lease.since)
            ):
                yield lease

    def removable(self, state: GpuState, now: float) -> list[str]:
        """List the instances that have been idle for long enough, or were never finished."""
        return [
            slot
            for slot in self.idle
            if slot not in self.changing and now >= self._removal_time(state, slot)
        ]

    def seconds_to_check(self, state: GpuState, now: float) -> float:
        """Return after how many seconds there may be something to do, if nothing happens."""
        timing = self.settings.timing
        times = [now + timing.scan]
        times += [now + timing.poll for _ in (*self.processes, *self.unclaimed)]
        times += [
            self._removal_time(state, slot) for slot in self.idle if slot not in self.changing
        ]
        return max(0.0, min(times) - now)

    def missing_instances(
        self,
        state: GpuState,  # noqa: ARG002 - for layouts
        now: float,  # noqa: ARG002 - for layouts, which try again later
    ) -> list[str]:
        """List the slots of a layout to create instances in now; none on demand."""
        return []

    def waiting_reason(self, state: GpuState) -> str:  # noqa: ARG002 - for layouts
        """Return why nothing at all can be given, empty if something can or may soon be."""
        return ""

    def missing_slots(self, state: GpuState) -> Mapping[str, str]:  # noqa: ARG002 - for layouts
        """Return the footprints of a layout's missing instances, and why each is missing."""
        return {}

    def record_creation_failure(self, slot: str, reason: str, now: float) -> None:
        """Record that an instance of a layout could not be created."""

    def record_removal_failure(self, slot: str, reason: str, now: float) -> bool:
        """Record that a removal failed; return whether it is the first time."""
        before = self.removal_failures.get(slot)
        self.removal_failures[slot] = schedule_retry(before, reason, now, self.settings.timing)
        return before is None

    def record_lease_failure(self, lease: Lease, reason: str) -> None:
        """Record that the instance of a lease could not be created."""
        self.failed[lease.share.id] = ProvisionFailure(reason, lease.since)

    def record_leases(self, state: GpuState) -> None:
        """Record which instances have leases; forget failures of leases that have ended."""
        leases = state.leases
        self.just_released |= held_slots(state) & self.present.keys()
        self.failed = {
            share: failure
            for share, failure in self.failed.items()
            if share in leases and leases[share].since == failure.since
        }

    def overlapping(self, state: GpuState, slot: str) -> dict[str, MigInstance]:
        """Find the instances that overlap an instance in this slot, itself included."""
        footprint = self.footprint(state, slot)
        return {
            other: instance
            for other, instance in self.present.items()
            if not self.footprint(state, other).isdisjoint(footprint)
        }

    def blocked_slots(self, state: GpuState, slot: str) -> frozenset[str]:
        """Return the footprint slots of the shares that an instance excludes."""
        return self.footprint(state, slot)

    def footprint(self, state: GpuState, slot: str) -> frozenset[str]:
        """Return the footprint of an instance, empty for a profile that the GPU lacks now."""
        for placed in geometry_of(state.gpu.mig_profiles).placed_profiles:
            if str(placed) == slot:
                return placed.footprint
        if slot not in self.present:
            return frozenset()
        placement = self.present[slot].placement
        return PlacedProfile(ProfileGeometry(slot, 0, (placement,), 2), placement).footprint

    def _forget_absent(self, listed: Sequence[MigInstance]) -> None:
        """Forget what is recorded of instances that NVML does not list any more."""
        self.owned &= {identity(instance) for instance in listed}
        for record in (self.unclaimed, self.idle, self.processes, self.removal_failures):
            for slot in record.keys() - self.present.keys():
                record.pop(slot)
        uuids = {
            compute_instance.uuid
            for instance in listed
            for compute_instance in instance.compute_instances
        }
        self.daemon_problems = {k: why for k, why in self.daemon_problems.items() if k in uuids}

    def _removal_time(self, state: GpuState, slot: str) -> float:
        """Return when to remove an idle instance."""
        if slot in self.removal_failures:
            return self.removal_failures[slot].at
        useful = self.present[slot].compute_instances and not self.is_faulty(state, slot)
        return self.idle[slot] + (self.settings.keep_warm if useful else 0.0)

    def _was_left_over(self, state: GpuState, slot: str, instance: MigInstance) -> bool:
        """Return whether a creation or removal of ours left this instance."""
        if not instance.compute_instances and self.half_removed.get(slot) == instance.number:
            return True
        foreign = state.kubelet.mig_devices_of_other_plugins or ()
        late = slot in self.unsettled and not self.outage
        return late and _has_our_form(instance) and identity(instance) not in foreign

    def _may_be_ours(self, slot: str, instance: MigInstance) -> bool:
        """Return whether this agent or an earlier one may have created an instance.

        An earlier one's is found by the first scan, with an allowed profile. Ours is in the slot of
        a creation that failed in an outage.
        """
        allowed = slot.rpartition("@")[0] in self.settings.allowed
        found = slot in self.unsettled or (not self.scanned and allowed)
        return found and not self.is_owned(slot) and _has_our_form(instance)


def schedule_retry(
    before: RetryState | None, reason: str, now: float, timing: MigTiming
) -> RetryState:
    """Schedule the next try of what failed, once more or for the first time."""
    backoff = before.backoff if before else Backoff(timing.poll, timing.scan)
    return RetryState(reason, now + backoff.next(), backoff)


def held_slots(state: GpuState) -> set[str]:
    """Return the slots of the instances that have leases."""
    return set(map(slot_of, state.leases))


def identity(instance: MigInstance) -> str:
    """Return the unique name of an instance: earlier ones in its slot had others."""
    uuids = [compute.uuid for compute in instance.compute_instances if compute.uuid]
    place = f"{instance.number} at {instance.placement.start}"
    return uuids[0] if uuids else f"GPU instance {place} without compute instance"


def _has_our_form(instance: MigInstance) -> bool:
    """Return whether an instance has one compute instance, or none if unfinished."""
    return len(instance.compute_instances) <= 1


def _is_in_admission(lease: Lease) -> bool:
    return lease.holder is None and not lease.from_checkpoint


async def find_instances(
    node: AbandonedNode, gpu: Gpu, settings: InstanceSettings, backend: str
) -> Sequence[Leftover]:
    """Find the instances of a GPU that are metagpu's; those in use stay."""
    if settings.keeps_existing:
        return ()
    state, mig = node.snapshot.gpus[gpu.id], node.driver.mig
    timing = replace(settings.timing, grace=0.0)
    inventory = InstanceInventory(replace(settings, layout=None, timing=timing), backend)
    try:
        inventory.update_instances(state, await mig.instances(gpu.id), time.monotonic())
        if not inventory.unleased(state) and not inventory.owned:
            return ()
        processes = await node.driver.processes(gpu.id)
    except DriverError as error:
        return [Leftover("MIG instances", f"GPU {gpu}", stays=str(error))]

    pids: dict[int | None, list[int]] = {}
    for process in processes:
        pids.setdefault(process.gpu_instance, []).append(process.pid)
    ours = inventory.unleased(state) + [
        slot for slot in inventory.present if inventory.is_owned(slot)
    ]
    inventory.update_processes(state, pids, time.monotonic())
    return [
        Leftover(
            "MIG instance",
            f"{slot} of GPU {gpu}",
            partial(mig.destroy, gpu.id, inventory.present[slot].number),
            _reason_to_stay(node, inventory, slot),
        )
        for slot in sorted(set(ours))
        if slot in inventory.unclaimed or inventory.is_owned(slot)
    ]


def _reason_to_stay(node: AbandonedNode, inventory: InstanceInventory, slot: str) -> str:
    """Return who uses an instance, or may; empty if nobody does."""
    processes: Mapping[str, str] = inventory.processes
    if slot in processes:
        return f"used by {processes[slot]}"
    return "" if slot in inventory.idle else node.used_by or "it may be in use"
