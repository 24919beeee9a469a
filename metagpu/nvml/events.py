"""Events of a session's GPUs: the wait for them, and renewals of the event set.

NVML forgets the registration of a GPU that was reset, and does not report that. So the event set is
replaced by a new one now and then, without a lost or a doubled event: GPUs are registered with the
new set first, then the old one is emptied.
"""

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

import anyio
import pynvml
import structlog

from metagpu.core.contracts.driver import (
    DriverEvent,
    EccError,
    GpuUnavailable,
    RecoveryActionChanged,
    Xid,
)
from metagpu.core.errors import DriverError, DriverTimeout, DriverUnavailable, GpuLost
from metagpu.core.model.gpu import GpuId
from metagpu.core.runtime.rate_limit import Backoff, LogOnce
from metagpu.nvml.errors import CONCLUSIVE, FAILURES, LOST, error_code, or_none, to_driver_error
from metagpu.nvml.queries import Handle, instance_id, read_memory
from metagpu.nvml.session_gpu import NvmlTiming, Registration, SessionGpu, address_of
from metagpu.nvml.worker import NvmlWorker

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
            idle = [retired for retired in self._retired if not self._users[address_of(retired)]]
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


log = structlog.get_logger()


@dataclass(slots=True)
class NvmlEvents:
    """The events of a session, as its loop hears them.

    Attributes:
        gpus: the session's GPUs.
        timing: seconds of a wait, and of the back-off after failures.
        event_set: registrations, and the wait.
        worker: waits for events.
        due: whether the set must be replaced, as soon as the back-off allows it.
        problem: why no event of any GPU is heard, empty while they are.
    """

    gpus: Mapping[GpuId, SessionGpu]
    timing: NvmlTiming
    event_set: EventSet
    worker: NvmlWorker = field(default_factory=lambda: NvmlWorker("NVML events"))
    due: bool = False
    problem: str = ""
    _turn: anyio.Lock = field(default_factory=anyio.Lock)
    _begun: int = 0
    _backoff: Backoff = field(init=False)
    _not_before: float = 0.0
    _logged: LogOnce = field(default_factory=LogOnce)

    def __post_init__(self) -> None:
        self._backoff = Backoff(self.timing.event_retry, self.timing.event_retry_longest)

    @property
    def unheard(self) -> Mapping[GpuId, str]:
        """The GPUs whose XIDs are not heard, and why; without lost ones."""
        gpus = tuple(self.gpus.items())  # workers add GPUs that come late
        present = {id_: known.registration for id_, known in gpus if not known.lost}
        return {
            id_: problem
            for id_, registration in present.items()
            if (problem := self.problem or registration.problem)
        }

    async def wait(self, deadline: float) -> Sequence[DriverEvent]:
        """Wait for events of any GPU, at most one second; empty when nothing happened."""
        if self.due and anyio.current_time() >= self._not_before:
            await self.renew(deadline)
        if not self.event_set.collected and not any(
            gpu.registration.types for gpu in self.gpus.values()
        ):
            await anyio.sleep(self.timing.wait)
            return ()

        try:
            async with self._turn:
                events = await self.worker.call(
                    self.event_set.collect, self.timing.wait + deadline, self.event_set.interrupt
                )
        except GpuLost:
            return await self._find_lost_gpus(deadline)
        except DriverUnavailable:
            raise
        except DriverError as error:
            self.problem = str(error)
            self._postpone()
            raise
        if not self.due:
            self.problem = ""
            self._backoff.reset()
        return events

    async def renew(self, deadline: float) -> None:
        """Replace the event set by a new one with all GPUs that answer.

        Calls that wait for each other share one replacement. A failure is logged, and a later wait
        tries again.

        Raises:
            DriverUnavailable: NVML as a whole is gone.
        """
        begun = self._begun
        if not self.worker.is_idle:
            self.event_set.interrupt()
        async with self._turn:
            if self._begun > begun:
                return  # by another caller, who began later
            self._begun += 1
            self.due = False
            try:
                await self._replace(deadline)
            except DriverUnavailable:
                raise
            except DriverError as error:
                if self.event_set.handle is None:
                    self.problem = str(error)
                self._postpone()
                self._log_no_set(str(error))
            else:
                self._logged.clear("event set")

    async def exclude(self, lost: Sequence[GpuId], deadline: float) -> None:
        """Exclude lost GPUs from the event set: with one NVML fails every wait at once.

        Raises:
            DriverUnavailable: NVML as a whole is gone.
        """
        gone = [self.gpus[gpu] for gpu in lost if gpu in self.gpus]
        registered = any(known.registration.types for known in gone)

        for known in gone:
            known.registration.clear("the GPU is lost")
            known.lost = known.needs_recovery = True
        if registered:
            self.due = True
        if self.due and anyio.current_time() >= self._not_before:
            await self.renew(deadline)

    async def close(self, deadline: float) -> None:
        """Free the event set."""
        with suppress(DriverError):
            await self.worker.call(self.event_set.free_all, deadline)

    def _postpone(self) -> None:
        self.due = True
        self._not_before = anyio.current_time() + self._backoff.next()

    async def _replace(self, deadline: float) -> None:
        """Build a new set, without the GPUs that spoil it, and put it into service."""
        refused: dict[GpuId, Registration] = {}
        while True:
            new = await self.worker.call(self.event_set.create, deadline)
            found = await self._register_all(new, refused, deadline)
            spoiling = {gpu: outcome for gpu, outcome in found.items() if outcome.refused}
            if not spoiling:
                break
            refused |= spoiling
            await self.worker.call(partial(self.event_set.release, new), deadline)

        await self.worker.call(partial(self.event_set.swap, new), deadline)
        for gpu, registration in {**found, **refused}.items():
            self.gpus[gpu].registration = registration
            self._log_problem(gpu, registration.problem)

    async def _register_all(
        self, new: Handle, without: Collection[GpuId], deadline: float
    ) -> dict[GpuId, Registration]:
        """Register every GPU with a set, each in its own worker."""
        found: dict[GpuId, Registration] = {}
        gone: list[DriverUnavailable] = []

        async def register(gpu: GpuId, known: SessionGpu) -> None:
            found[gpu] = Registration(problem="NVML does not answer")
            try:
                with anyio.move_on_after(deadline):
                    work = partial(self.event_set.register, known.handle, new)
                    found[gpu] = await known.worker.call(work, deadline)
            except DriverUnavailable as error:
                gone.append(error)
            except DriverError as error:
                found[gpu] = Registration(problem=str(error))

        async with anyio.create_task_group() as group:
            for gpu, known in self.gpus.items():
                if gpu not in without and not known.lost:
                    group.start_soon(register, gpu, known)
        if gone:
            raise gone[0]
        return found

    def _log_problem(self, gpu: GpuId, problem: str) -> None:
        if not problem:
            self._logged.clear(gpu)
        elif self._logged.is_new(gpu, problem):
            log.warning("gpu events unheard", gpu=gpu, error=problem)

    async def _find_lost_gpus(self, deadline: float) -> Sequence[DriverEvent]:
        """Find the lost GPUs of the event set: NVML reports that there is one, not which."""
        lost: list[GpuId] = []

        async def check(gpu: GpuId, known: SessionGpu) -> None:
            with suppress(DriverError):
                try:
                    await known.worker.call(partial(read_memory, known.handle), deadline)
                except (GpuLost, DriverTimeout):
                    lost.append(gpu)

        async with anyio.create_task_group() as group:
            for gpu, known in self.gpus.items():
                if known.registration.types:
                    group.start_soon(check, gpu, known)

        # With a lost GPU in the set, NVML returns the same error at once.
        await self.exclude(lost, deadline)
        if lost:
            return tuple(GpuUnavailable(gpu) for gpu in lost)

        await anyio.sleep(self.timing.wait)
        if self.due:  # a set that could not be replaced has known lost GPUs: that is no new event
            return ()
        self.problem = "NVML reports a lost GPU, and every GPU answers"
        self._postpone()
        return (GpuUnavailable(None),)

    def _log_no_set(self, problem: str) -> None:
        if self._logged.is_new("event set", problem):
            log.warning("nvml event set unavailable", error=problem)

    def create(self) -> None:
        """Create the first event set; after a failure a later wait tries again. Blocks."""
        try:
            self.event_set.handle = self.event_set.create()
        except FAILURES as failure:
            if error_code(failure) in CONCLUSIVE:
                raise
            self.due = True
            self.problem = str(to_driver_error(failure, self.worker.name, whole=False))
            self._log_no_set(self.problem)

    def ensure_registered(self, known: SessionGpu) -> None:
        """Register for a GPU's events, if not yet done or refused. Blocks."""
        while self.event_set.handle is not None and not (
            known.registration.types or known.registration.refused
        ):
            events = self.event_set.handle
            known.registration = self.event_set.register(known.handle)
            self.due |= known.registration.refused
            if events is self.event_set.handle:
                return
            known.registration.clear("the event set was replaced")
