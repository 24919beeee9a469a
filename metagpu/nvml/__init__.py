"""NVML behind `core.driver.Driver`: the only importer of pynvml, the only reader of its codes.

Every call runs in a worker thread, in the lane of the GPU it is about: a GPU that hangs delays no
other. Idle, there is one thread for all GPUs, the one that waits for events.

    codes     NVML's return codes -> our errors
    lane      one thread at a time, with a deadline
    reading   one GPU's answers -> our values
    mig       the same for MIG, and what is done with it; `instances` puts it into the GPU's lane
    session   the GPUs met so far, and the one event set
    listening events, from the GPUs that are not lost
    wiring    how the GPUs are connected, read once for each set of them
    activity  how busy processes keep a GPU
    limits    how much of its memory the driver lets a cgroup have
"""

import ctypes
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Final

import anyio
import pynvml
from msgspec.structs import replace

from metagpu.core.driver import ComputeMode, Condition, DriverEvent, GpuProcess, Survey, Unreadable
from metagpu.core.errors import DriverError, DriverUnavailable, GpuLost
from metagpu.core.gpu import Gpu, GpuId
from metagpu.core.snapshot import Versions
from metagpu.nvml.activity import read_utilisation
from metagpu.nvml.instances import Instances
from metagpu.nvml.lane import Lane
from metagpu.nvml.limits import limit_memory, read_limit
from metagpu.nvml.listening import hear, stop_listening
from metagpu.nvml.reading import read_compute_mode, read_condition, read_processes, set_compute_mode
from metagpu.nvml.session import SLICE, Known, Session
from metagpu.nvml.wiring import Wiring

__all__ = ["Nvml"]

_OPENING: Final = 60.0  # seconds: without persistence mode, initialising wakes every GPU in turn
_FIRST_TOUCH: Final = 4  # deadlines: taking a GPU's handle may initialise it


class Nvml:
    """The `Driver` on NVML.

    Args:
        library: an object that has NVML's functions, put below pynvml while a session is open;
            `None` for this machine's libnvidia-ml. A process has one NVML at a time.
        deadline: seconds that a call may take.
    """

    def __init__(self, library: object | None = None, deadline: float = 5.0) -> None:
        self._library = library
        self._deadline = deadline
        # One for all sessions: a retry while NVML hangs must not cost another thread.
        self._whole = Lane("NVML", whole=True)
        self._session: Session | None = None
        self._wiring = Wiring()
        self._met: dict[int, GpuId] = {}
        self._left: list[Lane] = []
        self.mig = Instances(self._known, deadline)

    @property
    def overdue(self) -> Sequence[str]:
        """Name what NVML was asked about without coming back.

        Such a thread outlives the event loop, and Python does not end before its threads do.
        """
        session = self._session
        lanes = self._lanes(session) if session else []

        return [lane.name for lane in [self._whole, *self._left, *lanes] if not lane.idle]

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """Initialise NVML on entry and shut it down on exit.

        Raises:
            DriverUnavailable: if the library or the driver is missing; the message says which.
                At once, while a call of an earlier session about NVML as a whole is still out.
        """
        if self._session is not None:
            raise RuntimeError("this Nvml has an open session already")

        session = Session(self._whole, self._library)
        with _below_pynvml(self._library):
            await session.library.call(session.open, max(_OPENING, self._deadline))
            self._session, self._wiring = session, Wiring()
            try:
                yield
            finally:
                self._session = None
                with anyio.CancelScope(shield=True):
                    await self._close(session)

    async def survey(self) -> Survey:
        """Read every GPU, and listen to the events of those not listened to yet."""
        session = self._opened()

        async with session.registering:
            return await self._look_around(session)

    async def _look_around(self, session: Session) -> Survey:
        count, versions = await session.library.call(session.count, self._deadline)
        answers: list[Gpu | DriverError] = [DriverError("not asked")] * count

        async def read(index: int) -> None:
            lane = session.lanes.setdefault(index, Lane(f"GPU {index}"))
            patience = self._deadline * (1 if index in self._met else _FIRST_TOUCH)
            try:
                answers[index] = await lane.call(partial(session.read, index), patience)
            except DriverError as error:
                answers[index] = error

        async with anyio.create_task_group() as group:
            for index in range(count):
                group.start_soon(read, index)

        for answer in answers:
            if isinstance(answer, DriverUnavailable):
                raise answer
        survey = self._survey(answers, versions)
        lost = [u.gpu for u in survey.unreadable if u.gpu and isinstance(answers[u.index], GpuLost)]
        await stop_listening(session, lost, self._deadline)

        topology = await self._wiring.read(survey.gpus, session.gpus, self._deadline)
        return replace(survey, topology=topology)

    async def condition(self, gpu: GpuId) -> Condition:
        """Read how one GPU is now: this is the device check."""
        session, known = self._opened(), self._known(gpu)

        try:
            condition = await known.lane.call(partial(read_condition, known.handle), self._deadline)
        except GpuLost:
            known.ailing = True
            raise

        ailing = bool(condition.recovery_action)
        recovered, known.ailing = known.ailing and not ailing, ailing
        if recovered:
            # A reset may have taken the registration with it, and NVML would not say so.
            known.lost, session.spoiled = False, True
            async with session.registering:
                await stop_listening(session, (), self._deadline)
        return condition

    async def processes(self, gpu: GpuId) -> Sequence[GpuProcess]:
        """List the compute and graphics processes that have memory on one GPU."""
        known = self._known(gpu)
        return await known.lane.call(partial(read_processes, known.handle), self._deadline)

    async def utilisation(self, gpu: GpuId) -> Mapping[int, int] | None:
        """Tell how busy processes kept one GPU's processors of late, in percent, by their pids."""
        known = self._known(gpu)
        return await known.lane.call(partial(read_utilisation, known.handle), self._deadline)

    async def limit_memory(self, gpu: GpuId, cgroup: str, limit: int | None) -> None:
        """Have the driver refuse all processes of a cgroup together more than so many bytes."""
        known = self._known(gpu)
        await known.lane.call(partial(limit_memory, known.handle, cgroup, limit), self._deadline)

    async def memory_limit(self, gpu: GpuId, cgroup: str) -> int | None:
        """Read what all processes of a cgroup together are limited to, `None` for nothing."""
        known = self._known(gpu)
        return await known.lane.call(partial(read_limit, known.handle, cgroup), self._deadline)

    async def compute_mode(self, gpu: GpuId) -> ComputeMode | None:
        """Read who may use a GPU for computing; `None` when the driver does not say."""
        known = self._known(gpu)
        return await known.lane.call(partial(read_compute_mode, known.handle), self._deadline)

    async def set_compute_mode(self, gpu: GpuId, mode: ComputeMode) -> None:
        """Say who may use a GPU for computing; root alone may."""
        known = self._known(gpu)
        await known.lane.call(partial(set_compute_mode, known.handle, mode), self._deadline)

    async def events(self) -> Sequence[DriverEvent]:
        """Wait for events of any GPU, at most one second; empty when nothing happened.

        A GPU that is lost is reported as `GpuUnavailable`, which asks for its condition.
        """
        return await hear(self._opened(), self._deadline)

    def _survey(self, answers: Sequence[Gpu | DriverError], versions: Versions) -> Survey:
        gpus = [answer for answer in answers if isinstance(answer, Gpu)]
        read = {gpu.id for gpu in gpus}
        met = {index: gpu for index, gpu in self._met.items() if gpu not in read}
        unreadable = [
            Unreadable(index, str(answer), met.get(index))
            for index, answer in enumerate(answers)
            if isinstance(answer, DriverError)
        ]

        self._met = {u.index: u.gpu for u in unreadable if u.gpu} | {g.index: g.id for g in gpus}
        return Survey(tuple(gpus), tuple(unreadable), versions.driver, versions.cuda)

    def _opened(self) -> Session:
        if self._session is None:
            raise DriverUnavailable("no NVML session is open")
        return self._session

    def _known(self, gpu: GpuId) -> Known:
        known = self._opened().gpus.get(gpu)
        if gpu not in self._met.values():
            raise DriverError(f"no GPU {gpu} was found on this node by the last survey")
        if known is None:
            raise GpuLost(f"GPU {gpu}: it could not be read since NVML was initialised")
        return known

    async def _close(self, session: Session) -> None:
        # A set that somebody still waits on must not be freed; it goes with the process.
        if await session.wait.settled(SLICE + self._deadline):
            with suppress(DriverError):
                await session.wait.call(session.free, self._deadline)
        with suppress(DriverError):
            await session.library.call(pynvml.nvmlShutdown, self._deadline)

        lanes = [*self._left, *self._lanes(session)]
        self._left = [lane for lane in lanes if not lane.idle]

    def _lanes(self, session: Session) -> list[Lane]:
        return [session.wait, *session.lanes.values(), *self._wiring.lanes]


@contextmanager
def _below_pynvml(library: object | None) -> Iterator[None]:
    """Have pynvml call this library: it keeps its one in a global, and its functions in another."""
    before = pynvml.nvmlLib
    if before is not library and not isinstance(before, ctypes.CDLL | None):
        raise RuntimeError("a session with another NVML library is open in this process")

    if library is not None:
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - it has no other door
    try:
        yield
    finally:
        if library is not None:
            pynvml.nvmlLib = before
            pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - likewise
