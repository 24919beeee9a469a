"""The `Driver` on NVML: surveys, conditions, processes, limits and events of GPUs.

Every call runs in a thread, one at a time for each GPU: a GPU that hangs delays no other. Short
calls share a thread; an idle daemon has another one, which waits for events.

    errors       NVML's return codes -> our errors
    worker       one call at a time, with a deadline; the short calls of all GPUs
    queries      one GPU's answers -> our values; memory limits of cgroups
    sensors      temperature, power, clocks, error counters; processes and their utilization
    mig          the calls of MIG
    session      the library, and the GPUs seen so far
    session_gpu  one GPU of a session
    events       the event set, and events as the loop hears them
    topology     the connections between GPUs, read once for each set of GPUs
"""

import ctypes
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Final

import anyio
import pynvml
from msgspec.structs import replace

from metagpu.core.contracts.driver import (
    ComputeMode,
    DriverEvent,
    GpuActivity,
    GpuCondition,
    GpuProcess,
    Survey,
    UnreadableGpu,
)
from metagpu.core.contracts.sensors import DetailedSensors
from metagpu.core.errors import DriverError, DriverTimeout, DriverUnavailable, GpuLost
from metagpu.core.model.driver_roots import NVML_LIBRARY
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.snapshot import Versions
from metagpu.nvml.mig import NvmlMigDriver
from metagpu.nvml.queries import (
    Handle,
    limit_memory,
    read_compute_mode,
    read_condition,
    read_limit,
    read_memory,
    read_processes,
    set_compute_mode,
)
from metagpu.nvml.sensors import read_activity, read_detailed_sensors, read_utilization
from metagpu.nvml.session import NvmlSession, TopologyReader
from metagpu.nvml.session_gpu import TIMING, NvmlTiming, SessionGpu
from metagpu.nvml.worker import NvmlWorker, ResultT, SharedThread
from metagpu.patches import use_nvml_library

__all__ = ["NvmlDriver"]

_FIRST_READ: Final = 4  # deadlines: taking a GPU's handle may initialise it


class NvmlDriver:
    """The `Driver` on NVML.

    Args:
        library: an object that has NVML's functions, put below pynvml while a session is open;
            `None` for this machine's libnvidia-ml. A process has one NVML at a time.
        deadline: seconds that a call may take.
        timing: seconds of the calls that take longer.
        find_libraries: names this machine's libnvidia-ml, by paths or for the linker, in their
            order; asked at each session, as a driver may come later. Blocks.
    """

    def __init__(
        self,
        library: object | None = None,
        deadline: float = 5.0,
        timing: NvmlTiming = TIMING,
        *,
        find_libraries: Callable[[], Sequence[str]] = lambda: (NVML_LIBRARY,),
    ) -> None:
        self._library = library
        self._deadline = deadline
        self._timing = timing
        self._find_libraries = find_libraries
        # One for all sessions: a retry while NVML hangs must not cost another thread.
        self._library_worker = NvmlWorker("NVML", whole=True)
        self._shared_thread = SharedThread()
        self._session: NvmlSession | None = None
        self._topology = TopologyReader()
        self._indices: dict[int, GpuId] = {}
        self._hung: list[NvmlWorker] = []
        self.mig = NvmlMigDriver(self._known, deadline, timing)

    @property
    def unanswered_calls(self) -> Sequence[str]:
        """Name what NVML was asked about without coming back before its deadline."""
        return [worker.name for worker in self._all_workers if worker.is_overdue]

    @property
    def has_threads(self) -> bool:
        """True while a thread is inside NVML: Python does not end before it returns."""
        return not all(worker.is_idle for worker in self._all_workers)

    @property
    def _all_workers(self) -> Sequence[NvmlWorker]:
        workers = self._workers(self._session) if self._session else []
        return [self._library_worker, *self._hung, *workers]

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """Initialise NVML on entry and shut it down on exit.

        A session that is cancelled is left as it is: this process ends, which frees all of it, and
        need not wait for threads inside NVML.

        Raises:
            DriverUnavailable: if the library or the driver is missing; the message says which.
                At once, while a call of an earlier session about NVML as a whole is still out.
        """
        if self._session is not None:
            raise RuntimeError("this NvmlDriver has an open session already")

        session = NvmlSession(
            self._library_worker,
            self._library,
            self._timing,
            find_libraries=self._find_libraries,
        )
        with _below_pynvml(self._library):
            await session.library_worker.call(
                session.open, max(self._timing.opening, self._deadline)
            )
            self._session, self._topology = session, TopologyReader()
            cancelled = False
            try:
                yield
            except anyio.get_cancelled_exc_class():
                cancelled = True
                raise
            finally:
                self._session = None
                if not cancelled:
                    with anyio.CancelScope(shield=True):
                        await self._close(session)
                workers = [*self._hung, *self._workers(session)]
                self._hung = [worker for worker in workers if not worker.is_idle]

    async def survey(self) -> Survey:
        """Read every GPU, and register for the events of new GPUs."""
        session = self._opened()
        count, versions = await session.library_worker.call(session.read_node, self._deadline)
        answers = await self._read_gpus(session, count)

        gone = [answer for answer in answers if isinstance(answer, DriverUnavailable)]
        if gone and not any(isinstance(answer, Gpu) for answer in answers):
            raise gone[0]
        survey = self._survey(answers, versions)
        lost = [u.gpu for u in survey.unreadable if u.gpu and isinstance(answers[u.index], GpuLost)]
        await session.events.exclude(lost, self._deadline)

        topology = await self._topology.read(survey.gpus, session.gpus, self._deadline)
        return replace(survey, topology=topology)

    async def _read_gpus(self, session: NvmlSession, count: int) -> Sequence[Gpu | DriverError]:
        """Read every GPU; one that was never read delays the others for a moment only."""
        answers: list[Gpu | DriverError] = [
            DriverTimeout(f"GPU {index}: no answer from NVML yet") for index in range(count)
        ]
        left, one, every = set(range(count)), anyio.Event(), anyio.Event()

        async def read(index: int) -> None:
            worker = session.workers.setdefault(index, self._new_worker(index))
            deadline = self._deadline * (1 if index in self._indices else _FIRST_READ)
            try:
                answers[index] = await worker.call(partial(session.read_gpu, index), deadline)
            except DriverError as error:
                answers[index] = error
            left.discard(index)
            if isinstance(answers[index], Gpu):
                one.set()
            if not left:
                one.set()
                every.set()

        async with anyio.create_task_group() as new:
            async with anyio.create_task_group() as known:
                for index in range(count):
                    (known if index in self._indices else new).start_soon(read, index)
            if left:
                await one.wait()
                with anyio.move_on_after(self._timing.straggler):
                    await every.wait()
                new.cancel_scope.cancel()  # a later survey gets their answers
        return answers

    async def condition(self, gpu: GpuId) -> GpuCondition:
        """Read one GPU's present condition: this is the device check."""
        session, known = self._opened(), self._known(gpu)

        try:
            condition = await self._read(gpu, partial(read_condition, answers=known.answers))
        except GpuLost:
            known.needs_recovery = True
            raise

        needs_recovery = bool(condition.recovery_action)
        recovered = known.needs_recovery and not needs_recovery
        known.needs_recovery = needs_recovery
        if recovered:
            known.lost = False
            await session.events.renew(self._deadline)
        return condition

    async def processes(self, gpu: GpuId) -> Sequence[GpuProcess]:
        """List the compute and graphics processes that have memory on one GPU."""
        return await self._read(gpu, read_processes)

    async def free_memory(self, gpu: GpuId) -> int | None:
        """Read the free bytes of one GPU."""
        return (memory := await self._read(gpu, read_memory)) and memory.total - memory.used

    async def activity(
        self, gpu: GpuId, *, processes: bool = True, sensors: bool = False, costly: bool = True
    ) -> GpuActivity:
        """Read one GPU's processes and sensors, each if wanted."""
        answers = self._known(gpu).sensor_answers if sensors else None
        read = partial(read_activity, sensor_answers=answers, processes=processes, costly=costly)
        return await self._read(gpu, read)

    async def utilization(self, gpu: GpuId) -> Mapping[int, int] | None:
        """Read the shares of one GPU's multiprocessors, by pid."""
        return await self._read(gpu, read_utilization)

    async def sensors(self, gpu: GpuId, *, costly: bool = True) -> DetailedSensors:
        """Read the sensors and error counters of one GPU, with the costly ones if wanted."""
        answers = self._known(gpu).sensor_answers
        return await self._read(gpu, partial(read_detailed_sensors, answers=answers, costly=costly))

    async def limit_memory(self, gpu: GpuId, cgroup: str, limit: int | None) -> None:
        """Limit the memory of a cgroup's processes together, in bytes; `None` removes it."""
        known = self._known(gpu)
        await known.worker.call(partial(limit_memory, known.handle, cgroup, limit), self._deadline)

    async def memory_limit(self, gpu: GpuId, cgroup: str) -> int | None:
        """Return the limit of a cgroup's processes in bytes, `None` for no limit."""
        return await self._read(gpu, partial(read_limit, cgroup=cgroup))

    async def compute_mode(self, gpu: GpuId) -> ComputeMode | None:
        """Return the compute mode of a GPU; `None` where the driver does not report it."""
        return await self._read(gpu, read_compute_mode)

    async def set_compute_mode(self, gpu: GpuId, mode: ComputeMode) -> None:
        """Set the compute mode of a GPU; only root may."""
        known = self._known(gpu)
        await known.worker.call(partial(set_compute_mode, known.handle, mode), self._deadline)

    async def events(self) -> Sequence[DriverEvent]:
        """Wait for events of any GPU, at most one second; empty when nothing happened.

        A lost GPU is reported as `GpuUnavailable`; the receiver then reads its condition.
        """
        return await self._opened().events.wait(self._deadline)

    async def renew_events(self) -> None:
        """Register for the events of every GPU again; a reset ends a registration."""
        await self._opened().events.renew(self._deadline)

    @property
    def unheard(self) -> Mapping[GpuId, str]:
        """The GPUs whose XIDs NVML does not deliver, and why."""
        return self._session.events.unheard if self._session else {}

    async def _read(self, gpu: GpuId, read: Callable[[Handle], ResultT]) -> ResultT:
        """Make short calls about one GPU."""
        known = self._known(gpu)
        return await known.worker.call(partial(read, known.handle), self._deadline, short=True)

    def _survey(self, answers: Sequence[Gpu | DriverError], versions: Versions) -> Survey:
        gpus = [answer for answer in answers if isinstance(answer, Gpu)]
        read = {gpu.id for gpu in gpus}
        met = {index: gpu for index, gpu in self._indices.items() if gpu not in read}
        unreadable = [
            UnreadableGpu(
                index,
                f"GPU {index}: {answer}" if isinstance(answer, DriverUnavailable) else str(answer),
                met.get(index),
            )
            for index, answer in enumerate(answers)
            if isinstance(answer, DriverError)
        ]

        self._indices = {u.index: u.gpu for u in unreadable if u.gpu} | {
            g.index: g.id for g in gpus
        }
        return Survey(tuple(gpus), tuple(unreadable), versions.driver, versions.cuda)

    def _new_worker(self, index: int) -> NvmlWorker:
        return NvmlWorker(f"GPU {index}", others_work=self._others_work, shared=self._shared_thread)

    async def _others_work(self, worker: NvmlWorker) -> bool:
        """Return whether another GPU answers: then one GPU alone says that NVML is gone."""
        others = [known for known in self._opened().gpus.values() if known.worker is not worker]
        for known in others:
            with suppress(DriverError):
                await known.worker.call_alone(partial(read_memory, known.handle), self._deadline)
                return True
        return False

    def _opened(self) -> NvmlSession:
        if self._session is None:
            raise DriverUnavailable("no NVML session is open")
        return self._session

    def _known(self, gpu: GpuId) -> SessionGpu:
        known = self._opened().gpus.get(gpu)
        if gpu not in self._indices.values():
            raise DriverError(f"the last survey did not find {gpu} on this node")
        if known is None:
            raise GpuLost(f"{gpu}: it could not be read since NVML was initialised")
        return known

    async def _close(self, session: NvmlSession) -> None:
        # Nothing may be freed under a call.
        if await session.events.worker.wait_idle(self._timing.wait + self._deadline):
            await session.events.close(self._deadline)
        with suppress(DriverError):
            await session.library_worker.call(pynvml.nvmlShutdown, self._deadline)

    def _workers(self, session: NvmlSession) -> list[NvmlWorker]:
        return [session.events.worker, *session.workers.values(), *self._topology.workers]


@contextmanager
def _below_pynvml(library: object | None) -> Iterator[None]:
    """Make pynvml call this library while the block lasts."""
    before = pynvml.nvmlLib
    if before is not library and not isinstance(before, ctypes.CDLL | None):
        raise RuntimeError("a session with another NVML library is open in this process")

    if library is not None:
        use_nvml_library(library)
    try:
        yield
    finally:
        if library is not None:
            use_nvml_library(before)
