"""Utilization of GPUs by processes, and turns for readings that cost NVML much.

One GPU is read at a time, the oldest first.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

import anyio
from msgspec.structs import replace

from metagpu.core.contracts.driver import UsageDriver
from metagpu.core.contracts.sensors import GpuSensors
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import GpuId
from metagpu.core.runtime.tasks import start_together
from metagpu.core.state.registry import Registry
from metagpu.core.usage.timing import UsageTiming

ALWAYS_READ: Final = 2
"""GPUs that are read each time where there are no more of them."""

ValueT = TypeVar("ValueT")
SensorsT = TypeVar("SensorsT", bound=GpuSensors)


class _Reading(NamedTuple, Generic[ValueT]):
    value: ValueT
    at: float


class ReadingTurns(Generic[ValueT]):
    """The last readings of GPUs, and whose turn is next: one at a time.

    The cost does not grow with the number of GPUs. Times are those of one clock, in seconds.

    Args:
        max_age: the age from which a reading is read again in any case.
    """

    def __init__(self, max_age: float) -> None:
        self._max_age = max_age
        self._readings: dict[GpuId, _Reading[ValueT]] = {}

    def due(self, gpus: Collection[GpuId], now: float) -> frozenset[GpuId]:
        """Return which of the GPUs to read now: all that have no reading, or an old one.

        Where there are none of these, the one with the oldest reading.
        """
        if len(gpus) <= ALWAYS_READ:
            return frozenset(gpus)
        oldest = max(gpus, key=lambda gpu: self._age(gpu, now))
        return self.older(gpus, now, self._max_age) or frozenset((oldest,))

    def older(self, gpus: Collection[GpuId], now: float, age: float) -> frozenset[GpuId]:
        """Return those of the GPUs that have no reading, or one of this age in seconds."""
        return frozenset(gpu for gpu in gpus if self._age(gpu, now) >= age)

    def add(self, gpu: GpuId, value: ValueT, began: float) -> None:
        """Keep a reading that began at this time, if none that began later is kept."""
        if (known := self._readings.get(gpu)) is None or known.at <= began:
            self._readings[gpu] = _Reading(value, began)

    def latest(self, gpu: GpuId) -> ValueT | None:
        """Return the last reading of a GPU, `None` without one."""
        known = self._readings.get(gpu)
        return known and known.value

    def forget(self, gpu: GpuId) -> None:
        """Drop the reading of a GPU: it is due next."""
        self._readings.pop(gpu, None)

    def retain(self, gpus: Collection[GpuId]) -> None:
        """Drop the readings of all other GPUs."""
        for gpu in self._readings.keys() - set(gpus):
            self.forget(gpu)

    def _age(self, gpu: GpuId, now: float) -> float:
        known = self._readings.get(gpu)
        return float("inf") if known is None else now - known.at


class SensorTurns(ReadingTurns[GpuSensors]):
    """The costly sensors of GPUs: energy and PCIe replays."""

    def complete(
        self, gpu: GpuId, sensors: SensorsT | None, began: float, *, was_read: bool
    ) -> Mapping[GpuId, SensorsT]:
        """Return sensors with the costly ones: their own if they were read, else the last.

        Of a GPU without sensors the last one is forgotten, and nothing is returned.
        """
        if sensors is None:
            self.forget(gpu)
            return {}
        if was_read:
            self.add(gpu, sensors, began)
        last = self.latest(gpu) or GpuSensors()
        return {gpu: replace(sensors, energy=last.energy, pcie_replays=last.pcie_replays)}


class _Utilization(NamedTuple):
    """The percent of each process; the processes that the driver listed at that time."""

    percents: Mapping[int, int] | None
    pids: frozenset[int]


class UtilizationReader:
    """Reads how much of each GPU its processes use, and keeps it for scrapes."""

    def __init__(self, driver: UsageDriver, registry: Registry, timing: UsageTiming) -> None:
        self._driver = driver
        self._registry = registry
        self._timing = timing
        self._turns = ReadingTurns[_Utilization](timing.costly_age)

    async def read(
        self, pids: Mapping[GpuId, Collection[int]], max_age: float | None
    ) -> dict[GpuId, Mapping[int, int]]:
        """Return percents by pid of those GPUs whose driver reports them.

        A GPU whose processes all have a reading may answer with that one. A GPU without a process
        is idle, and NVML is not asked; in MIG mode it has no answer.

        Args:
            pids: the processes that the driver lists now, of each GPU to read.
            max_age: seconds from which a reading is read again, `None` for turns of the GPUs.
        """
        gpus = [gpu for gpu in pids if self._is_whole(gpu)]
        for gpu in pids:
            known = self._turns.latest(gpu)
            if gpu not in gpus or (known and not known.pids.issuperset(pids[gpu])):
                self._turns.forget(gpu)
        busy = [gpu for gpu in gpus if pids[gpu] or self._turns.latest(gpu) is None]
        now = anyio.current_time()
        due = (
            self._turns.due(busy, now) if max_age is None else self._turns.older(busy, now, max_age)
        )

        async with anyio.create_task_group() as group:
            works = (partial(self._read_gpu, gpu, pids[gpu]) for gpu in busy if gpu in due)
            await start_together(group, works, self._timing.turn)
        return {
            gpu: {pid: percent for pid, percent in known.percents.items() if pid not in ended}
            for gpu in gpus
            if (known := self._turns.latest(gpu)) and known.percents is not None
            for ended in (known.pids.difference(pids[gpu]),)
        }

    def retain(self, gpus: Collection[GpuId]) -> None:
        """Forget all other GPUs."""
        self._turns.retain(gpus)

    async def _read_gpu(self, gpu: GpuId, pids: Collection[int]) -> None:
        began = anyio.current_time()
        try:
            percents = await self._driver.utilization(gpu)
        except DriverError:  # the health watch reports it
            self._turns.forget(gpu)
        else:
            self._turns.add(gpu, _Utilization(percents, frozenset(pids)), began)

    def _is_whole(self, gpu: GpuId) -> bool:
        state = self._registry.snapshot.gpus.get(gpu)
        return state is not None and not state.gpu.mig_enabled
