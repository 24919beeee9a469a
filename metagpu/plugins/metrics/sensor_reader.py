"""Reading of the sensors of all GPUs: one that hangs costs no other its values."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

import anyio

from metagpu.core.contracts.sensors import DetailedSensors
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import GpuId
from metagpu.core.runtime.tasks import start_together
from metagpu.core.state.registry import Registry
from metagpu.core.usage.reading_turns import SensorTurns
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
            await start_together(group, (partial(read_one, it) for it in gpus), DEFAULT_TIMING.turn)
        return {gpu: found[gpu] for gpu in gpus if gpu in found}


class DetailedSensorReader:
    """Reads the detailed sensors of all GPUs, the costly ones of one in turns."""

    def __init__(self, registry: Registry, sensors: ReadSensors) -> None:
        self._registry = registry
        self._sensors = sensors
        self._turns = SensorTurns(DEFAULT_TIMING.costly_age)

    async def read(self) -> Mapping[GpuId, DetailedSensors]:
        """Return the reading of each GPU that answers, in the order of the GPUs."""
        gpus = tuple(self._registry.snapshot.gpus)
        due = self._turns.due(gpus, anyio.current_time())

        async def read_one(gpu: GpuId) -> DetailedSensors:
            began, costly = anyio.current_time(), gpu in due
            found = await self._sensors(gpu, costly=costly)
            return self._turns.complete(gpu, found, began, was_read=costly)[gpu]

        readings = await SensorReader(self._registry, read_one).read()
        self._turns.retain(readings)  # a GPU that may be lost has no value of before
        return readings
