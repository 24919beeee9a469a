"""NVML between its initialisation and its shutdown: the GPUs met so far, and the event set.

The methods block, and run in lanes; they raise what pynvml does.
"""

import ctypes
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

import anyio
import pynvml
import structlog

from metagpu.core.driver import (
    DriverEvent,
    EccError,
    GpuUnavailable,
    RecoveryActionChanged,
    Xid,
)
from metagpu.core.gpu import Gpu, GpuId
from metagpu.core.mig import MigProfile
from metagpu.core.snapshot import Versions
from metagpu.nvml.codes import CONCLUSIVE, FAILURES, code_of, error_for, if_said
from metagpu.nvml.lane import Lane
from metagpu.nvml.mig import read_profiles
from metagpu.nvml.reading import Handle, describe, instance

log = structlog.get_logger()

SLICE: Final = 1.0
"""Seconds of one wait for events: NVML's cannot be cancelled, so leaving takes as long."""
BATCH: Final = 256
"""Events in a batch at most: a storm of corrected errors must not hold it open."""

_XID: Final = pynvml.nvmlEventTypeXidCriticalError
_HEARD: Final = (
    _XID
    | pynvml.nvmlEventTypeSingleBitEccError
    | pynvml.nvmlEventTypeDoubleBitEccError
    | pynvml.nvmlEventTypeGpuUnavailableError
    | pynvml.nvmlEventTypeGpuRecoveryAction
)


@runtime_checkable
class Interruptible(Protocol):
    """A library whose waits for events can be ended early, which NVML's own cannot."""

    def interrupt(self, events: Handle) -> None:
        """Have the wait on this event set end now, or the next one if nobody waits."""


def address_of(handle: Handle) -> int | None:
    """Give the address that tells one handle from another."""
    return ctypes.cast(handle, ctypes.c_void_p).value


@dataclass(slots=True)
class Known:
    """A GPU of this session.

    Attributes:
        heard: the event types that it is registered for, 0 when none.
        lost: whether it must be kept out of the event set: NVML would fail every wait at once.
        ailing: whether it was lost or wanted something when its condition was last read.
        mig_profiles: what it can be cut into, in which mode of MIG; `None` while that is not read,
            and `complaint` is why, told once.
    """

    index: int
    handle: Handle
    lane: Lane
    heard: int = 0
    lost: bool = False
    ailing: bool = False
    mig_profiles: tuple[bool, tuple[MigProfile, ...]] | None = None
    complaint: str = ""


@dataclass(slots=True)
class Session:
    """See the module.

    Attributes:
        library: the lane of NVML as a whole; it outlives the session.
        below: the library that was put below pynvml, `None` for this machine's.
        events: the event set, `None` where NVML has no events.
        registering: held while GPUs are registered with it, or it is replaced.
        spoiled: whether it has to be replaced; `renew` clears it, once the new set is there.
        complaints: why it could not be replaced, each reason told once.
    """

    library: Lane
    below: object = None
    wait: Lane = field(default_factory=lambda: Lane("NVML events"))
    lanes: dict[int, Lane] = field(default_factory=dict)
    gpus: dict[GpuId, Known] = field(default_factory=dict)
    events: Handle = None
    registering: anyio.Lock = field(default_factory=anyio.Lock)
    spoiled: bool = False
    complaints: set[str] = field(default_factory=set)

    def open(self) -> None:
        """Initialise NVML."""
        pynvml.nvmlInit()

        try:
            self.events = if_said(pynvml.nvmlEventSetCreate)
        except FAILURES:
            pynvml.nvmlShutdown()
            raise

    def count(self) -> tuple[int, Versions]:
        """Give the number of GPUs and the versions of driver and CUDA."""
        cuda = if_said(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        versions = Versions(
            pynvml.nvmlSystemGetDriverVersion(),
            None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        )
        return pynvml.nvmlDeviceGetCount(), versions

    def read(self, index: int) -> Gpu:
        """Describe the GPU at an index, and listen to it if that is not so yet."""
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        gpu_id = GpuId(pynvml.nvmlDeviceGetUUID(handle))
        lane = self.lanes[index]
        lane.name = f"GPU {index} ({gpu_id})"

        known = self.gpus.setdefault(gpu_id, Known(index, handle, lane))
        if address_of(known.handle) != address_of(handle):
            known.heard = 0
        known.index, known.handle, known.lane, known.lost = index, handle, lane, False
        known.heard = known.heard or self.register(handle)

        return describe(
            handle,
            gpu_id,
            index,
            mig_profiles=self.profiles(known),
            listens=bool(known.heard & _XID),
        )

    def profiles(self, known: Known) -> tuple[MigProfile, ...]:
        """List what a GPU can be cut into; NVML says that it stays so as long as MIG's mode.

        Not to know them costs a GPU its MIG instances and nothing else.
        """
        mode = if_said(pynvml.nvmlDeviceGetMigMode, known.handle)
        if mode is None:
            return ()

        enabled = bool(mode[0])
        if known.mig_profiles is None or known.mig_profiles[0] != enabled:
            try:
                known.mig_profiles = enabled, read_profiles(known.handle)
            except FAILURES as failure:
                if code_of(failure) in CONCLUSIVE:
                    raise
                known.mig_profiles = None
                problem = str(error_for(failure, known.lane.name, whole=False))
                if problem != known.complaint:
                    known.complaint = problem
                    log.warning("MIG profiles cannot be read", error=problem)
                return ()
        return known.mig_profiles[1]

    def register(self, handle: Handle) -> int:
        """Listen to a GPU from now on; give the event types that it will tell, 0 when none."""
        heard = _HEARD & (if_said(pynvml.nvmlDeviceGetSupportedEventTypes, handle) or 0)
        if self.events is None or not heard:
            return 0

        try:
            pynvml.nvmlDeviceRegisterEvents(handle, heard, self.events)
        except pynvml.NVMLError as failure:
            if code_of(failure) in CONCLUSIVE:
                raise
            # NVML's documentation: after this error the set is undefined and should be freed.
            self.spoiled |= code_of(failure) == pynvml.NVML_ERROR_UNKNOWN
            return 0

        return int(heard)

    def renew(self) -> None:
        """Replace the event set by one that holds the GPUs that answer."""
        old, self.events, self.spoiled = self.events, pynvml.nvmlEventSetCreate(), False

        for known in self.gpus.values():
            # Whoever is left out here is registered by the next survey that can read it.
            known.heard = 0
            if known.lane.idle and not known.lost:
                with suppress(pynvml.NVMLError):
                    known.heard = self.register(known.handle)
        pynvml.nvmlEventSetFree(old)

    def take(self) -> tuple[DriverEvent, ...]:
        """Wait for an event, `SLICE` seconds at most, then take along those already there."""
        batch: list[DriverEvent] = []

        while len(batch) < BATCH:
            try:
                data = pynvml.nvmlEventSetWait_v2(self.events, 0 if batch else int(SLICE * 1000))
            except pynvml.NVMLError as failure:
                # With events at hand an error can wait: the next call meets it again.
                if batch or code_of(failure) == pynvml.NVML_ERROR_TIMEOUT:
                    break
                raise
            batch.append(self._event(data))

        return tuple(batch)

    def interrupt(self) -> None:
        """End the wait for an event, where the library knows how to; this does not block."""
        if isinstance(self.below, Interruptible):
            self.below.interrupt(self.events)

    def free(self) -> None:
        """Free the event set."""
        if self.events is not None:
            pynvml.nvmlEventSetFree(self.events)

    def _event(self, data: Any) -> DriverEvent:  # noqa: ANN401 - pynvml ships no types
        address = address_of(data.device)
        gpu = next((id_ for id_, g in self.gpus.items() if address_of(g.handle) == address), None)

        if data.eventType == _XID:
            where = instance(data.gpuInstanceId), instance(data.computeInstanceId)
            return Xid(gpu, int(data.eventData), *where)
        if data.eventType == pynvml.nvmlEventTypeSingleBitEccError:
            return EccError(gpu, double_bit=False)
        if data.eventType == pynvml.nvmlEventTypeDoubleBitEccError:
            return EccError(gpu, double_bit=True)
        if data.eventType == pynvml.nvmlEventTypeGpuUnavailableError:
            return GpuUnavailable(gpu)
        return RecoveryActionChanged(gpu)
