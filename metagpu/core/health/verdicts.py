"""The verdicts on GPUs and MIG devices: what is out of service, and the ways back.

A fault in a MIG instance takes that instance alone out. NVML names an instance by numbers, and uses
the numbers again for later instances; a verdict belongs to a MIG device by its uuid. A faulty
device is replaced: its backend creates the instance again once no container holds it. Or an
operator acknowledges the fault. XIDs and memory errors are published on the bus, and logged.

The next daemon on this machine reads a note of faults and cordons. A passed check proves nothing
after some faults, so a restart of the daemon must not forget them. A reboot ends faults and
cordons: a note of another boot says nothing.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import anyio
import msgspec
import structlog

from metagpu.core.contracts.driver import DriverEvent, EccError, HealthDriver, Xid, read_instances
from metagpu.core.errors import DriverError, DriverUnavailable, FaultNoteUnusable
from metagpu.core.health.fault_assessment import FaultAssessment, GpuRecovery, MigInstanceRef
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import CordonSource, Fault, Recovery
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.events import Event, MemoryErrorReported, XidReported
from metagpu.core.state.facts import (
    GpuCordoned,
    GpuFaulted,
    GpuNeedsProof,
    GpuRecovered,
    GpuRecovering,
    GpuUncordoned,
    InstanceFaulted,
    InstanceRecovered,
)
from metagpu.core.state.registry import EventBus, Registry

VERSION: Final = 1
SIZE_LIMIT: Final = 256 * 1024
"""Bytes of a note; a machine with 16 GPUs in MIG mode, all of it faulty, needs less than 64 KiB."""
NOTED_FAULTS: Final = frozenset({Fault.XID, Fault.MEMORY, Fault.RECOVERY_ACTION})
"""Faults that the next daemon cannot find by itself, or not since when; it does find the others."""
_REASON_LENGTH: Final = 500


class NotedFault(msgspec.Struct, frozen=True):
    """A GPU that is out of service; `needs_proof` as in `GpuRecovery`.

    A newer daemon may know kinds of faults that this one does not: `kind` is `None` then.
    """

    gpu: GpuId
    reason: str
    since: float
    fault: str | None = None
    needs_proof: bool = False

    @property
    def kind(self) -> Fault | None:
        """The kind of the fault."""
        return Fault(self.fault) if self.fault in set(Fault) else None


class NotedDevice(msgspec.Struct, frozen=True):
    """A MIG device that is out of service."""

    gpu: GpuId
    device: str
    reason: str
    since: float


class NotedCordon(msgspec.Struct, frozen=True):
    """A GPU that an operator has cordoned."""

    gpu: GpuId
    reason: str
    since: float


NotedT = TypeVar("NotedT", NotedFault, NotedDevice, NotedCordon)


class FaultNote(msgspec.Struct, frozen=True):
    """All faults and cordons of a machine since its boot."""

    faults: tuple[NotedFault, ...] = ()
    devices: tuple[NotedDevice, ...] = ()
    cordons: tuple[NotedCordon, ...] = ()

    def of(self, gpus: Collection[GpuId], *, but: bool = False) -> "FaultNote":
        """Return the note of these GPUs alone, or of all `but` these."""

        def chosen(entries: tuple[NotedT, ...]) -> tuple[NotedT, ...]:
            return tuple(entry for entry in entries if (entry.gpu in gpus) is not but)

        return FaultNote(chosen(self.faults), chosen(self.devices), chosen(self.cordons))

    def joined(self, other: "FaultNote") -> "FaultNote":
        """Return the entries of both notes."""
        return FaultNote(
            self.faults + other.faults,
            self.devices + other.devices,
            self.cordons + other.cordons,
        )

    def without(self, known: "FaultNote") -> "FaultNote":
        """Return the entries that another note lacks.

        A fault that needs proof is more than a fault of the same GPU that needs none.
        """
        faults = {
            (fault.gpu, proof) for fault in known.faults for proof in {False, fault.needs_proof}
        }
        devices = {(device.gpu, device.device) for device in known.devices}
        cordons = {(cordon.gpu, cordon.reason) for cordon in known.cordons}
        return FaultNote(
            tuple(fault for fault in self.faults if (fault.gpu, fault.needs_proof) not in faults),
            tuple(device for device in self.devices if (device.gpu, device.device) not in devices),
            tuple(cordon for cordon in self.cordons if (cordon.gpu, cordon.reason) not in cordons),
        )


class _Written(msgspec.Struct, frozen=True):
    version: int
    boot: str
    note: FaultNote


def take_note(snapshot: Snapshot) -> FaultNote:
    """Return the note of a snapshot. Pure."""
    states = snapshot.gpus.items()
    return FaultNote(
        tuple(
            NotedFault(
                gpu, _brief(verdict.reason), verdict.since, verdict.fault, verdict.needs_proof
            )
            for gpu, state in states
            if not (verdict := state.verdict).healthy
            and (verdict.fault in NOTED_FAULTS or verdict.needs_proof)
        ),
        tuple(
            NotedDevice(gpu, device, _brief(other.reason), other.since)
            for gpu, state in states
            for device, other in state.mig_faults.items()
        ),
        tuple(
            NotedCordon(gpu, _brief(cordon.reason), cordon.since)
            for gpu, state in states
            if (cordon := state.cordons.get(CordonSource.OPERATOR)) is not None
        ),
    )


def encode(note: FaultNote, boot: str) -> bytes:
    """Encode a note for the boot with this id."""
    return msgspec.json.encode(_Written(VERSION, boot, note))


def decode(text: bytes, boot: str) -> FaultNote:
    """Decode a note; an empty one where it is of another boot.

    Raises:
        MetagpuError: it is no note, or one of another version.
    """
    try:
        version = msgspec.json.decode(text, type=dict[str, msgspec.Raw]).get("version")
        if version != msgspec.Raw(str(VERSION).encode()):
            raise FaultNoteUnusable(f"it is not a note of version {VERSION}")
        written = msgspec.json.decode(text, type=_Written)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FaultNoteUnusable(f"it cannot be read: {error}") from error
    return written.note if written.boot == boot else FaultNote()


def _brief(text: str) -> str:
    return text[:_REASON_LENGTH]


log = structlog.get_logger()


@dataclass(eq=False)
class GpuVerdicts:
    """The verdicts on GPUs in the registry, with what decides about their ends.

    Attributes:
        recovering: the GPUs out of service. Each fault of a GPU has an object of its own.
        recoveries: how often each GPU has come back: a check that began before says nothing.
    """

    registry: Registry
    clock: Callable[[], float]
    recovering: dict[GpuId, GpuRecovery] = field(default_factory=dict)
    recoveries: Counter[GpuId] = field(default_factory=Counter)
    _restored: FaultNote = field(default_factory=FaultNote)
    _restored_recoveries: dict[GpuId, GpuRecovery] = field(default_factory=dict)

    def restore(self, found: FaultNote) -> None:
        """Take out of service what was so before the start of the daemon."""
        self._restored = self._restored.joined(found)
        for fault in found.faults:
            recovery = GpuRecovery(needs_proof=fault.needs_proof)
            self.recovering[fault.gpu] = self._restored_recoveries[fault.gpu] = recovery
            self.registry.apply(GpuFaulted(fault.gpu, fault.reason, fault.since, fault.kind))
            if fault.needs_proof:
                self.registry.apply(GpuNeedsProof(fault.gpu))
            log.error("gpu still out of service", gpu=fault.gpu, reason=fault.reason)
        for device in found.devices:
            self.registry.apply(
                InstanceFaulted(device.gpu, device.device, device.reason, device.since)
            )
        for cordon in found.cordons:
            self.registry.apply(GpuCordoned(cordon.gpu, cordon.reason, cordon.since))

    def adopt(self, last: FaultNote, written: float = 0.0) -> None:
        """Replace what was restored at the start by what the other daemon knew at its end.

        What this daemon has found by itself stays if the note is older: the other daemon brought
        back what a later note lacks.
        """
        ended, reason = self._restored.without(last), "back in service under the daemon before"
        own = take_note(self.registry.snapshot).without(last)
        for found in own.faults:
            if found.since < written:
                self.recovered(found.gpu, reason)
        for device in own.devices:
            if device.since < written:
                self.registry.apply(
                    InstanceRecovered(device.gpu, device.device, reason, self.clock())
                )
        for fault in ended.faults:
            if self.recovering.get(fault.gpu) is self._restored_recoveries[fault.gpu]:
                self.recovered(fault.gpu, reason)
        for noted in ended.devices:
            self.registry.apply(InstanceRecovered(noted.gpu, noted.device, reason, self.clock()))
        for cordon in ended.cordons:
            self.registry.apply(GpuUncordoned(cordon.gpu, self.clock()))
        self.restore(last.without(take_note(self.registry.snapshot)))

    def fault(self, gpu: GpuId, reason: str, fault: Fault, *, proof: bool = False) -> None:
        """Take a GPU out of service; with `proof`, silence alone does not bring it back."""
        known = self.recovering.get(gpu, GpuRecovery())
        # A new object for each fault: a caller that waits for a check sees the new fault.
        self.recovering[gpu] = GpuRecovery(
            needs_proof=known.needs_proof or proof, operator_notified=known.operator_notified
        )

        if self.registry.apply(GpuFaulted(gpu, reason, self.clock(), fault)):
            log.error("gpu out of service", gpu=gpu, reason=reason)
        if proof:
            self.registry.apply(GpuNeedsProof(gpu))
        self.registry.apply(GpuRecovering(gpu, None))

    def recovered(self, gpu: GpuId, reason: str) -> None:
        """Bring a GPU back into service."""
        self.recovering.pop(gpu, None)
        self.recoveries[gpu] += 1
        if self.registry.apply(GpuRecovered(gpu, reason, self.clock())):
            log.info("gpu back in service", gpu=gpu, reason=reason)

    def report_recovery(self, gpu: GpuId, recovery: GpuRecovery, quiet: float) -> None:
        """Report how the GPU comes back, once for each run of passed checks."""
        known = self.registry.snapshot.gpus[gpu].verdict.recovery
        if recovery.clean_since is None and not recovery.operator_notified:
            self.registry.apply(GpuRecovering(gpu, None))
        elif recovery.clean_since is None:
            if known is None or known.returns_at is not None:
                self.registry.apply(GpuRecovering(gpu, Recovery(self.clock())))
        elif known is None or known.returns_at is None:
            passed = anyio.current_time() - recovery.clean_since
            since = self.clock() - passed
            self.registry.apply(GpuRecovering(gpu, Recovery(since, since + quiet)))

    def notify_operator(self, gpu: GpuId, recovery: GpuRecovery) -> None:
        """Log once that a GPU waits for an operator, if it does."""
        if recovery.needs_proof and not recovery.operator_notified:
            recovery.operator_notified = True
            log.warning(
                "gpu waits for an operator",
                gpu=gpu,
                reason="the driver does not report recovery actions",
                fix=f"repair or reset the GPU, then run: metagpu acknowledge {gpu}",
            )


CORRECTED_EVERY: Final = 60.0
"""Seconds in which corrected memory errors of a GPU are counted, after one was logged."""


class _CorrectedErrors(msgspec.Struct):
    """Corrected memory errors of one GPU: the last log entry, and errors since then."""

    logged_at: float = -math.inf
    unlogged: int = 0


class FaultLog(msgspec.Struct):
    """Publication and log of NVML's events; the health watch decides about them."""

    bus: EventBus[Event]
    clock: Callable[[], float]
    _corrected: dict[GpuId | None, _CorrectedErrors] = msgspec.field(default_factory=dict)

    def publish(self, event: DriverEvent) -> None:
        """Publish an XID or a memory error on the bus."""
        match event:
            case Xid(gpu, code):
                self.bus.publish(XidReported(gpu, code, self.clock()))
            case EccError(gpu, double_bit):
                self.bus.publish(MemoryErrorReported(gpu, not double_bit, self.clock()))

    def log(self, event: DriverEvent, assessment: FaultAssessment) -> None:
        """Log an event and its assessment; count most corrected memory errors.

        A worn GPU has corrected errors by the thousand, each harmless. The log has a GPU's first
        one; within `CORRECTED_EVERY` the others are counted, and the next entry has their number.
        """
        if event != EccError(assessment.gpu, double_bit=False):
            where = (
                {"instance": assessment.mig_instance.gpu_instance}
                if assessment.mig_instance
                else {}
            )
            log.warning("nvml event", gpu=assessment.gpu, description=assessment.reason, **where)
            return

        now = anyio.current_time()
        known = self._corrected.setdefault(assessment.gpu, _CorrectedErrors())
        known.unlogged += 1
        if now - known.logged_at >= CORRECTED_EVERY:
            log.warning(
                "nvml event",
                gpu=assessment.gpu,
                description=assessment.reason,
                count=known.unlogged,
            )
            known.logged_at, known.unlogged = now, 0


@dataclass
class MigHealth:
    """The owner of the registry's verdicts on MIG devices.

    Attributes:
        fault_count: number of faults of each GPU's MIG devices so far.
    """

    driver: HealthDriver
    registry: Registry
    clock: Callable[[], float]
    fault_count: Counter[GpuId] = field(default_factory=Counter)

    def apply_fault(self, gpu: GpuId, instance: MigInstanceRef, reason: str) -> bool:
        """Take the MIG devices of an event out of service; return whether they are known."""
        state = self.registry.snapshot.gpus.get(gpu)
        devices = _devices(state, instance) if state else ()
        self._fault(gpu, devices, reason)
        return bool(devices)

    async def find_and_fault(self, gpu: GpuId, reference: MigInstanceRef, reason: str) -> bool:
        """Find the MIG devices of an event through NVML, and take them out of service.

        Returns false if NVML cannot list the instances.

        Raises:
            DriverUnavailable: NVML as a whole is gone.
        """
        try:
            mode = await self.driver.mig.mode(gpu)
            if mode is None or not mode.enabled:
                return False
            instances = await self.driver.mig.instances(gpu)
        except DriverUnavailable:
            raise
        except DriverError:
            return False

        devices = [
            compute.uuid
            for instance in instances
            for compute in instance.compute_instances
            if _is_instance(reference, instance.number, compute.number) and compute.uuid
        ]
        if not devices:
            log.warning("mig instance of an event is gone", gpu=gpu, description=reason)
        self._fault(gpu, devices, reason)
        return True

    async def recover_removed(self) -> None:
        """End the verdicts on MIG devices that no longer exist, nor in a backend's report.

        A share whose device is gone would be in service until its backend has noticed.
        """
        gpus = self.registry.snapshot.gpus
        faulty = [gpu for gpu, state in gpus.items() if state.mig_faults]
        if not faulty:
            return
        for gpu, answer in (await read_instances(self.driver.mig, faulty)).items():
            if isinstance(answer, DriverError):
                continue  # the GPU's own verdict has the reason
            existing = {compute.uuid for each in answer for compute in each.compute_instances}
            state = self.registry.snapshot.gpus[gpu]
            for backend in state.provisioned.values():
                existing |= {hardware_device.device for hardware_device in backend.devices.values()}
            for device in state.mig_faults.keys() - existing:
                self._recovered(gpu, device, "the MIG device no longer exists")

    def acknowledge(self, gpu: GpuId, only: str | None = None) -> None:
        """Take the MIG devices of a GPU, or `only` one, back into service for an operator."""
        for device in list(self.registry.snapshot.gpus[gpu].mig_faults):
            if only in (None, device):
                self._recovered(gpu, device, "acknowledged by an operator")

    def _fault(self, gpu: GpuId, devices: Sequence[str], reason: str) -> None:
        self.fault_count[gpu] += len(devices)
        for device in devices:
            if self.registry.apply(InstanceFaulted(gpu, device, reason, self.clock())):
                log.error("mig device out of service", gpu=gpu, device=device, reason=reason)

    def _recovered(self, gpu: GpuId, device: str, reason: str) -> None:
        if self.registry.apply(InstanceRecovered(gpu, device, reason, self.clock())):
            log.info("mig device back in service", gpu=gpu, device=device, reason=reason)


def _devices(state: GpuState, reference: MigInstanceRef) -> Sequence[str]:
    """Return the MIG devices of an instance that backends have reported, each once."""
    provisioned = (
        device for backend in state.provisioned.values() for device in backend.devices.values()
    )
    found = (
        device.device
        for device in provisioned
        if _is_instance(reference, device.gpu_instance, device.compute_instance)
    )
    return list(dict.fromkeys(found))


def _is_instance(reference: MigInstanceRef, gpu_instance: int, compute_instance: int) -> bool:
    return reference.gpu_instance == gpu_instance and reference.compute_instance in (
        None,
        compute_instance,
    )
