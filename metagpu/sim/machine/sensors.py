"""Sensors of a simulated GPU: what its load makes of them, and what a test sets.

Powers are the limits in NVIDIA's datasheets; the caller holds `SimNode.changed`.
"""

import time
from typing import Final

import msgspec

_TDP: Final = {
    "v100": 300,
    "t4": 70,
    "l40s": 350,
    "a30": 165,
    "a100-pcie": 250,
    "a100": 400,
    "h100": 700,
    "h200": 700,
    "b200": 1000,
    "rtx-pro-6000": 600,
}
"""Watts, by the beginning of a model's key; the first one that fits."""
_WITHOUT_MEMORY_SENSOR: Final = ("t4", "l40s", "rtx-pro-6000")
"""Models with GDDR memory, of which NVML reports no temperature."""
_IDLE_PART: Final = 0.15
_IDLE_TEMPERATURE, _BUSY_TEMPERATURE = 32, 68
_IDLE_CLOCK, _BUSY_CLOCK, _MEMORY_CLOCK = 210, 1410, 1215


class SimSensors(msgspec.Struct):
    """The sensors of one GPU, in NVML's units.

    Attributes:
        busy: percent of the multiprocessors in use.
        nvlink_errors: by NVML's field.
        throttle_reasons: NVML's bits.
        energy: millijoules since the driver was loaded.
    """

    key: str
    busy: int = 0
    nvlink_errors: dict[int, int] = msgspec.field(default_factory=dict)
    pcie_replays: int = 0
    throttle_reasons: int = 0
    energy: float = 0.0
    _read_at: float = msgspec.field(default_factory=time.monotonic)

    @property
    def power_limit(self) -> int:
        """Return the power limit in milliwatts."""
        return 1000 * next(watts for name, watts in _TDP.items() if self.key.startswith(name))

    @property
    def power(self) -> int:
        """Return the power in milliwatts."""
        return round(self.power_limit * (_IDLE_PART + (1 - _IDLE_PART) * self.busy / 100))

    @property
    def temperature(self) -> int:
        """Return the temperature in degrees Celsius."""
        warmer = (_BUSY_TEMPERATURE - _IDLE_TEMPERATURE) * self.busy / 100
        return round(_IDLE_TEMPERATURE + warmer)

    @property
    def memory_temperature(self) -> int | None:
        """Return the memory's temperature in degrees Celsius, `None` without a sensor."""
        return None if self.key in _WITHOUT_MEMORY_SENSOR else self.temperature + 4

    @property
    def sm_clock(self) -> int:
        """Return the clock of the multiprocessors in MHz."""
        return _BUSY_CLOCK if self.busy else _IDLE_CLOCK

    @property
    def memory_clock(self) -> int:
        """Return the memory's clock in MHz."""
        return _MEMORY_CLOCK

    def read_energy(self) -> int:
        """Return the energy in millijoules, with what was used since the last reading."""
        now = time.monotonic()
        self.energy += self.power * (now - self._read_at)
        self._read_at = now
        return round(self.energy)
