"""The event set of a session: registrations, the wait, its exchange for another.

The methods block, run in worker threads, and raise pynvml's errors.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

import pynvml

from metagpu.core.contracts.driver import (
    DriverEvent,
    EccError,
    GpuUnavailable,
    RecoveryActionChanged,
    Xid,
)
from metagpu.core.model.gpu import GpuId
from metagpu.nvml.errors import FAILURES, LOST, error_code, or_none, to_driver_error
from metagpu.nvml.queries import Handle, instance_id
from metagpu.nvml.session_gpu import Registration, SessionGpu, address_of

BATCH: Final = 256
"""The most events of a batch: a storm of corrected errors must not keep the batch open."""

_XID: Final = pynvml.nvmlEventTypeXidCriticalError
_EVENT_TYPES: Final = (
    _XID
    | pynvml.nvmlEventTypeSingleBitEccError
    | pynvml.nvmlEventTypeDoubleBitEccError
    | pynvml.nvmlEventTypeGpuUnavailableError
    | pynvml.nvmlEventTypeGpuRecoveryAction
)
_SPOILED: Final = pynvml.NVML_ERROR_UNKNOWN
"""NVML's documentation: after this error of a registration the set is undefined."""
_NO_XIDS: Final = "this GPU or its driver reports no XIDs"


@runtime_checkable
class Interruptible(Protocol):
    """A library whose wait for events can be interrupted, unlike NVML's own."""

    def interrupt(self, events: Handle) -> None:
        """End the wait on this event set now, or the next wait if none is under way."""


@dataclass(slots=True)
class EventSet:
    """The event set in service, and those that still have to be freed.

    Attributes:
        gpus: the session's GPUs.
        longest_wait: seconds that `collect` waits for an event.
        simulated_library: the library below pynvml, `None` for this machine's.
        handle: the set in service, `None` while there is none.
        collected: events that the next `collect` returns without a wait.
    """

    gpus: Mapping[GpuId, SessionGpu]
    longest_wait: float
    simulated_library: object = None
    handle: Handle = None
    collected: list[DriverEvent] = field(default_factory=list)
    _mutex: threading.Lock = field(default_factory=threading.Lock)
    _present: set[int | None] = field(default_factory=set)
    _users: Counter[int | None] = field(default_factory=Counter)
    _retired: list[Handle] = field(default_factory=list)

    def create(self) -> Handle:
        """Create a set that is not in service yet."""
        events = pynvml.nvmlEventSetCreate()
        with self._mutex:
            self._present.add(address_of(events))
        return events

    def interrupt(self) -> None:
        """End the wait for an event, where the library supports it; this does not block."""
        if isinstance(self.simulated_library, Interruptible):
            self.simulated_library.interrupt(self.handle)

    def register(self, gpu: Handle, events: Handle = None) -> Registration:
        """Register for a GPU's events with a set, the present one by default."""
        try:
            with self._using(events) as held:
                types = _EVENT_TYPES & (or_none(pynvml.nvmlDeviceGetSupportedEventTypes, gpu) or 0)
                if types:
                    pynvml.nvmlDeviceRegisterEvents(gpu, types, held)
        except FAILURES as failure:
            if error_code(failure) in LOST:
                raise
            problem = str(to_driver_error(failure, "its events", whole=False))
            return Registration(0, problem, refused=error_code(failure) == _SPOILED)
        return Registration(types, "" if types & _XID else _NO_XIDS)

    @contextmanager
    def _using(self, events: Handle) -> Iterator[Handle]:
        """Hold a set: it must not be freed under a call that hangs.

        Raises:
            NVMLError: the set was freed before the call began.
        """
        with self._mutex:
            events = self.handle if events is None else events
            if address_of(events) not in self._present:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            self._users[address_of(events)] += 1
        try:
            yield events
        finally:
            with self._mutex:
                self._users[address_of(events)] -= 1

    def swap(self, new: Handle) -> None:
        """Put a new set into service; keep the events of both, each once."""
        with self._mutex:
            old, self.handle = self.handle, new
        if old is None:
            return

        # What happened since the registrations is in both sets.
        first, second = self._drain(old), self._drain(new)
        left = Counter(second) - Counter(first)
        self.collected += [*first, *left.elements()]
        self.release(old)

    def _drain(self, events: Handle) -> list[DriverEvent]:
        drained: list[DriverEvent] = []
        with suppress(pynvml.NVMLError):
            while len(drained) < BATCH:
                drained.append(self._event(pynvml.nvmlEventSetWait_v2(events, 0)))
        return drained

    def release(self, *sets: Handle) -> None:
        """Free sets, and earlier ones; those under a call that hangs wait."""
        self._retired += sets
        with self._mutex:
            idle = [it for it in self._retired if not self._users[address_of(it)]]
            self._present.difference_update(map(address_of, idle))
        for events in idle:
            self._retired.remove(events)
            del self._users[address_of(events)]
            with suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def free_all(self) -> None:
        """Free all sets."""
        self.release(*([] if self.handle is None else [self.handle]))

    def collect(self) -> tuple[DriverEvent, ...]:
        """Wait at most `longest_wait` seconds for an event; return all pending ones."""
        batch, self.collected = self.collected, []

        while len(batch) < BATCH and self.handle is not None:
            try:
                data = pynvml.nvmlEventSetWait_v2(
                    self.handle, 0 if batch else int(self.longest_wait * 1000)
                )
            except pynvml.NVMLError as failure:
                # The events of the batch come first: the next call gets the error again.
                if batch or error_code(failure) == pynvml.NVML_ERROR_TIMEOUT:
                    break
                raise
            batch.append(self._event(data))

        return tuple(batch)

    def _event(self, data: Any) -> DriverEvent:  # noqa: ANN401 - pynvml ships no types
        address = address_of(data.device)
        gpus = tuple(self.gpus.items())  # workers add GPUs that come late
        gpu = next((id_ for id_, g in gpus if address_of(g.handle) == address), None)

        if data.eventType == _XID:
            where = instance_id(data.gpuInstanceId), instance_id(data.computeInstanceId)
            return Xid(gpu, int(data.eventData), *where)
        if data.eventType == pynvml.nvmlEventTypeSingleBitEccError:
            return EccError(gpu, double_bit=False)
        if data.eventType == pynvml.nvmlEventTypeDoubleBitEccError:
            return EccError(gpu, double_bit=True)
        if data.eventType == pynvml.nvmlEventTypeGpuUnavailableError:
            return GpuUnavailable(gpu)
        return RecoveryActionChanged(gpu)
