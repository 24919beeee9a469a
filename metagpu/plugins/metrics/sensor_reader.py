"""Reading of the sensors of all GPUs: one that hangs costs no other its values."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

import anyio

from metagpu.core.contracts.sensors import DetailedSensors
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import GpuId
from metagpu.core.runtime.in_turn import start_in_turn
from metagpu.core.state.registry import Registry
from metagpu.core.usage.reading_turns import EnergyTurns
from metagpu.core.usage.timing import DEFAULT_TIMING
from metagpu.plugins.metrics.sources import ReadSensors

ReadingT = TypeVar("ReadingT")


class SensorReader(Generic[ReadingT]):
    """Reads the sensors of all GPUs, or of their MIG instances.

    A GPU that hangs ends at NVML's deadline once, and fails at once while that call is out. No
    reading is cancelled: NVML's worker would not count a call as overdue that nobody waits for.
    """

    def __init__(self, registry: Registry, sensors: Callable[[GpuId], Awaitable[ReadingT]]) -> None:
        self._registry = registry
        self._sensors = sensors

    async def read(self) -> Mapping[GpuId, ReadingT]:
        """Return the reading of each GPU that answers, in the order of the GPUs."""
        gpus = tuple(self._registry.snapshot.gpus)
        found: dict[GpuId, ReadingT] = {}

        async def read_one(gpu: GpuId) -> None:
            with suppress(DriverError):  # the health watch reports it
                found[gpu] = await self._sensors(gpu)

        async with anyio.create_task_group() as group:
            await start_in_turn(group, (partial(read_one, it) for it in gpus), DEFAULT_TIMING.turn)
        return {gpu: found[gpu] for gpu in gpus if gpu in found}


class DetailedSensorReader:
    """Reads the detailed sensors of all GPUs, the energy of few in turns."""

    def __init__(self, registry: Registry, sensors: ReadSensors) -> None:
        self._registry = registry
        self._sensors = sensors
        self._energy = EnergyTurns(DEFAULT_TIMING.energy_age)

    async def read(self) -> Mapping[GpuId, DetailedSensors]:
        """Return the reading of each GPU that answers, in the order of the GPUs."""
        gpus = tuple(self._registry.snapshot.gpus)
        due = self._energy.due(gpus, anyio.current_time())

        async def read_one(gpu: GpuId) -> DetailedSensors:
            began, energy = anyio.current_time(), gpu in due
            found = await self._sensors(gpu, energy=energy)
            return self._energy.complete(gpu, found, began, was_read=energy)[gpu]

        readings = await SensorReader(self._registry, read_one).read()
        self._energy.retain(readings)  # a GPU that may be lost has no energy of before
        return readings
