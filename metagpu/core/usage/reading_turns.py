"""Turns of GPUs for readings that cost NVML much: one at a time, the oldest first."""

from collections.abc import Collection, Mapping
from typing import Final, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from metagpu.core.contracts.sensors import GpuSensors
from metagpu.core.model.gpu import GpuId

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
