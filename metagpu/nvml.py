"""NVML behind `core.driver.Driver`: the only importer of pynvml, the only reader of its codes.

Every call runs in a worker thread in the lane of the GPU it is about. A GPU that hangs keeps its
own lane busy and nobody else's, and a lane is never worth more than one thread. Idle, there is one
thread for all GPUs: the one that waits for events.
"""

import ctypes
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from traceback import walk_tb
from typing import Any, Final, TypeAlias, TypeVar

import anyio
import anyio.to_thread
import pynvml

from metagpu.core.driver import (
    Condition,
    DriverEvent,
    EccError,
    GpuProcess,
    RecoveryAction,
    RecoveryActionChanged,
    RemappedRows,
    Survey,
    Unreadable,
    Xid,
)
from metagpu.core.errors import DriverError, DriverTimeout, DriverUnavailable, GpuLost
from metagpu.core.model import Gpu, GpuId

ResultT = TypeVar("ResultT")
Handle: TypeAlias = Any  # a pointer of ctypes; pynvml ships no types

SLICE: Final = 1.0
"""Seconds of one wait for events: NVML's waits cannot be cancelled, so this is how long leaving takes."""
OPENING: Final = 60.0
"""Seconds for initialising NVML, which without persistence mode wakes every GPU in turn."""
FIRST_TOUCH: Final = 4
"""How many deadlines a survey gives each GPU: taking its handle may initialise it."""
BATCH: Final = 256
"""Events taken at once at most, so that a storm of corrected errors cannot hold a batch open."""

_ANY_INSTANCE: Final = 0xFFFFFFFF
_NUMA_WORDS: Final = 16  # 64 nodes each: Linux knows at most 1024
_XID: Final = pynvml.nvmlEventTypeXidCriticalError
_HEARD: Final = (
    _XID
    | pynvml.nvmlEventTypeSingleBitEccError
    | pynvml.nvmlEventTypeDoubleBitEccError
    | pynvml.nvmlEventTypeGpuUnavailableError
    | pynvml.nvmlEventTypeGpuRecoveryAction
)
_ARCHITECTURES: Final = {
    pynvml.NVML_DEVICE_ARCH_KEPLER: "kepler",
    pynvml.NVML_DEVICE_ARCH_MAXWELL: "maxwell",
    pynvml.NVML_DEVICE_ARCH_PASCAL: "pascal",
    pynvml.NVML_DEVICE_ARCH_VOLTA: "volta",
    pynvml.NVML_DEVICE_ARCH_TURING: "turing",
    pynvml.NVML_DEVICE_ARCH_AMPERE: "ampere",
    pynvml.NVML_DEVICE_ARCH_ADA: "ada",
    pynvml.NVML_DEVICE_ARCH_HOPPER: "hopper",
    pynvml.NVML_DEVICE_ARCH_BLACKWELL: "blackwell",
    pynvml.NVML_DEVICE_ARCH_RUBIN: "rubin",
}

_FAILURES: Final = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
_UNKNOWN: Final = {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
_UNAVAILABLE: Final = {
    pynvml.NVML_ERROR_UNINITIALIZED: "NVML is not initialised any more",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "the NVIDIA driver is not loaded; load it on this node (modprobe nvidia), "
        "and see `dmesg | grep NVRM` if it does not stay"
    ),
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "NVML is not there: libnvidia-ml.so.1 cannot be loaded; install the NVIDIA driver on this "
        "node, or mount it into the container"
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "libnvidia-ml.so.1 and the loaded NVIDIA driver have different versions: the driver was "
        "upgraded without being reloaded; reboot this node or reload the driver, then restart metagpu"
    ),
}
_REFUSED: Final = {
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "NVML has no permission to talk to the driver; run with access to /dev/nvidiactl and "
        "/dev/nvidia* (privileged, or with these devices mounted)"
    ),
    pynvml.NVML_ERROR_UNKNOWN: (
        "NVML cannot talk to the driver (Unknown Error); most often the container has lost its "
        "access to /dev/nvidiactl: restart it"
    ),
}
_LOST: Final = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "the GPU is lost: it has fallen off the bus or does not answer",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the GPU wants a reset before it answers again",
}


def _code(failure: Exception) -> int:
    return int(getattr(failure, "value", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND))


def _error(failure: Exception, who: str, *, whole: bool) -> DriverError:
    """Give the error of ours for NVML's; `whole` says that without this call nothing works."""
    code = _code(failure)
    calls = [frame.f_code.co_name for frame, _ in walk_tb(failure.__traceback__)]
    call = next((name for name in reversed(calls) if name.startswith("nvml")), "NVML")

    if code in _UNAVAILABLE:
        return DriverUnavailable(_UNAVAILABLE[code])
    if whole:
        return DriverUnavailable(_REFUSED.get(code, f"{call}: {failure}"))
    if code in _LOST:
        return GpuLost(f"{who}: {_LOST[code]}")
    if code == pynvml.NVML_ERROR_TIMEOUT:
        return DriverTimeout(f"{who}: {call} timed out in the driver")
    return DriverError(f"{who}: {call}: {failure}")


class _Lane:
    """What NVML is asked about by one thread at a time: a GPU, the events, or NVML as a whole."""

    def __init__(self, name: str, *, whole: bool = False) -> None:
        self.name = name
        self._whole = whole
        self._turn = anyio.Lock()
        self._limiter = anyio.CapacityLimiter(1)
        self._idle = threading.Event()
        self._idle.set()

    @property
    def idle(self) -> bool:
        """Whether no thread is inside NVML for this lane."""
        return self._idle.is_set()

    async def call(self, work: Callable[[], ResultT], deadline: float) -> ResultT:
        """Run `work` in a thread, for at most `deadline` seconds.

        Being cancelled waits for the thread or the deadline: nobody may take NVML's objects away
        from under a call.

        Raises:
            DriverTimeout: at the deadline, and at once while an earlier call is still out.
            DriverError: as NVML failed.
        """
        async with self._turn:
            if not self.idle:
                raise DriverTimeout(f"{self.name}: an earlier NVML call has not come back yet")

            with anyio.CancelScope(
                shield=True, deadline=anyio.current_time() + deadline
            ):
                return await anyio.to_thread.run_sync(
                    self._work, work, abandon_on_cancel=True, limiter=self._limiter
                )
            raise DriverTimeout(f"{self.name}: NVML did not answer within {deadline:g} s")

    async def settled(self, patience: float) -> bool:
        """Wait for a thread that was left alone; tell whether it has come back."""
        return self.idle or await anyio.to_thread.run_sync(
            self._idle.wait, patience, limiter=self._limiter
        )

    def _work(self, work: Callable[[], ResultT]) -> ResultT:
        self._idle.clear()

        try:
            return work()
        except _FAILURES as failure:
            raise _error(failure, self.name, whole=self._whole) from failure
        finally:
            self._idle.set()


@dataclass(slots=True)
class _Known:
    """A GPU of this session; `heard` are the event types it is registered for."""

    index: int
    handle: Handle
    lane: _Lane
    heard: int = 0


@dataclass(slots=True)
class _Session:
    """NVML between its initialisation and its shutdown; the methods block and run in lanes."""

    library: _Lane = field(default_factory=lambda: _Lane("NVML", whole=True))
    wait: _Lane = field(default_factory=lambda: _Lane("NVML events"))
    lanes: dict[int, _Lane] = field(default_factory=dict)
    gpus: dict[GpuId, _Known] = field(default_factory=dict)
    events: Handle = None
    spoiled: bool = False

    def open(self) -> None:
        pynvml.nvmlInit()

        try:
            self.events = _maybe(pynvml.nvmlEventSetCreate)
        except _FAILURES:
            pynvml.nvmlShutdown()
            raise

    def count(self) -> tuple[int, str]:
        return pynvml.nvmlDeviceGetCount(), pynvml.nvmlSystemGetDriverVersion()

    def read(self, index: int) -> Gpu:
        """Describe the GPU at an index, and listen to it if that is not so yet."""
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        gpu_id = GpuId(pynvml.nvmlDeviceGetUUID(handle))
        lane = self.lanes[index]
        lane.name = f"GPU {index} ({gpu_id})"

        known = self.gpus.setdefault(gpu_id, _Known(index, handle, lane))
        if _address(known.handle) != _address(handle):
            known.heard = 0
        known.index, known.handle, known.lane = index, handle, lane
        known.heard = known.heard or self.register(handle)

        return _describe(handle, gpu_id, index, listens=bool(known.heard & _XID))

    def register(self, handle: Handle) -> int:
        """Listen to a GPU from now on; give the event types it will tell, 0 when none."""
        heard = _HEARD & (_maybe(pynvml.nvmlDeviceGetSupportedEventTypes, handle) or 0)
        if self.events is None or not heard:
            return 0

        try:
            pynvml.nvmlDeviceRegisterEvents(handle, heard, self.events)
        except pynvml.NVMLError as failure:
            if _code(failure) in _LOST.keys() | _UNAVAILABLE.keys():
                raise
            # NVML's documentation: after this error the set is undefined and should be freed.
            self.spoiled |= _code(failure) == pynvml.NVML_ERROR_UNKNOWN
            return 0

        return int(heard)

    def renew(self) -> None:
        """Replace the event set by one that holds the GPUs that still answer."""
        self.spoiled = False
        old, self.events = self.events, pynvml.nvmlEventSetCreate()

        for known in self.gpus.values():
            try:
                # What is not heard now is registered again by the next survey that can read it.
                known.heard = self.register(known.handle) if known.heard and known.lane.idle else 0
            except pynvml.NVMLError:
                known.heard = 0
        pynvml.nvmlEventSetFree(old)

    def take(self) -> tuple[DriverEvent, ...]:
        """Wait for an event, then take along those that are there already."""
        batch: list[DriverEvent] = []

        while len(batch) < BATCH:
            try:
                data = pynvml.nvmlEventSetWait_v2(self.events, 0 if batch else int(SLICE * 1000))
            except pynvml.NVMLError as failure:
                # With events at hand an error can wait: the next call meets it again.
                if batch or _code(failure) == pynvml.NVML_ERROR_TIMEOUT:
                    break
                raise
            batch.append(self._event(data))

        return tuple(batch)

    def free(self) -> None:
        if self.events is not None:
            pynvml.nvmlEventSetFree(self.events)

    def _event(self, data: Any) -> DriverEvent:  # noqa: ANN401 - pynvml ships no types
        address = _address(data.device)
        gpu = next((id_ for id_, g in self.gpus.items() if _address(g.handle) == address), None)

        if data.eventType == _XID:
            instances = _instance(data.gpuInstanceId), _instance(data.computeInstanceId)
            return Xid(gpu, int(data.eventData), *instances)
        if data.eventType == pynvml.nvmlEventTypeSingleBitEccError:
            return EccError(gpu, double_bit=False)
        if data.eventType == pynvml.nvmlEventTypeDoubleBitEccError:
            return EccError(gpu, double_bit=True)
        return RecoveryActionChanged(gpu)
