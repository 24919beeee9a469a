"""Metric families of a GPU's sensors and error counters, as NVML reports them."""

from typing import Final

from metagpu.plugins.metrics.samples import GPU_LABELS, FamilyFactory, MetricType, families_in

_gauge: Final = FamilyFactory(MetricType.GAUGE, GPU_LABELS)
_counter: Final = FamilyFactory(MetricType.COUNTER, GPU_LABELS)

TEMPERATURE: Final = _gauge("gpu_temperature_celsius", "Temperature of the GPU.")
MEMORY_TEMPERATURE: Final = _gauge(
    "gpu_memory_temperature_celsius", "Temperature of the GPU's memory."
)
POWER: Final = _gauge("gpu_power_watts", "Power that the GPU draws.")
POWER_LIMIT: Final = _gauge("gpu_power_limit_watts", "Power limit in force.")
ENERGY: Final = _counter(
    "gpu_energy_joules_total", "Energy that the GPU has used since the driver was loaded."
)
CLOCK: Final = _gauge(
    "gpu_clock_hertz", "Clock of the multiprocessors (sm) and of the memory.", "clock"
)
THROTTLED: Final = _gauge(
    "gpu_clocks_throttled", "Whether this reason lowers the GPU's clocks now, 1 or 0.", "reason"
)
ECC_ERRORS: Final = _counter(
    "gpu_ecc_errors_total",
    "Memory errors since the driver was loaded, corrected or uncorrected.",
    "kind",
)
NVLINK_ERRORS: Final = _counter(
    "gpu_nvlink_errors_total",
    "Errors of all NVLinks of the GPU since the driver was loaded, by kind.",
    "kind",
)
PCIE_REPLAYS: Final = _counter(
    "gpu_pcie_replays_total", "PCIe packets of the GPU that were sent again."
)

FAMILIES: Final = families_in(vars())
