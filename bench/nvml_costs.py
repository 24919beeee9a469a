"""The processor time that a real NVML takes for a scrape, added to the simulated one."""

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import pynvml

from metagpu.sim.nvml.library import SimLibrary

FIELDS: Final[Mapping[int, float]] = MappingProxyType(
    {
        pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION: 3.5e-3,
        pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER: 0.17e-3,
    }
)
"""Seconds for each field, as measured on an H200 (docs/verified.md)."""
UTILIZATION: Final = 2.9e-3
"""Seconds for the samples of the processes, likewise."""


def add_costs() -> None:
    """Make this process's simulated NVML use as much processor time as an H200's."""

    def of_fields(_device: object, count: Any, values: Any) -> float:  # noqa: ANN401 - of ctypes
        asked = values._obj[: getattr(count, "value", count)]  # noqa: SLF001 - of a byref
        return sum(FIELDS.get(value.fieldId, 0) for value in asked)

    # pynvml asks for the number of samples first; the two calls together were measured.
    def of_samples(_device: object, samples: object, *_: object) -> float:
        return 0 if samples is None else UTILIZATION

    _slow("nvmlDeviceGetFieldValues", of_fields)
    _slow("nvmlDeviceGetProcessUtilization", of_samples)


def _slow(name: str, seconds: Callable[..., float]) -> None:
    function = getattr(SimLibrary, name)

    def slow(library: SimLibrary, *arguments: object) -> int:
        until = time.thread_time() + seconds(*arguments)
        code = int(function(library, *arguments))
        while time.thread_time() < until:
            pass
        return code

    setattr(SimLibrary, name, slow)
