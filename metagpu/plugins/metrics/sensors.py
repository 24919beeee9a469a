"""Samples of a GPU's sensors; pure functions for a thread."""

from collections.abc import Iterator, Mapping

from metagpu.core.contracts.sensors import GpuSensors, ThrottleReason
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.snapshot import Snapshot
from metagpu.plugins.metrics import sensor_families as f
from metagpu.plugins.metrics.gpus import gpu_label_values
from metagpu.plugins.metrics.samples import MetricFamily, Sample


def sensor_samples(snapshot: Snapshot, readings: Mapping[GpuId, GpuSensors]) -> Iterator[Sample]:
    """Yield what each GPU reports: what it does not report is absent, and not zero."""
    for gpu, reading in readings.items():
        if (state := snapshot.gpus.get(gpu)) is not None:
            me = gpu_label_values(state.gpu)
            for family, labels, value in _values(reading):
                if value is not None:
                    yield Sample(family, (*me, *labels), value)


def _values(it: GpuSensors) -> Iterator[tuple[MetricFamily, tuple[str, ...], float | None]]:
    yield f.TEMPERATURE, (), it.temperature
    yield f.MEMORY_TEMPERATURE, (), it.memory_temperature
    yield f.POWER, (), it.power
    yield f.POWER_LIMIT, (), it.power_limit
    yield f.ENERGY, (), it.energy
    yield f.CLOCK, ("sm",), it.sm_clock
    yield f.CLOCK, ("memory",), it.memory_clock
    for reason in ThrottleReason if it.throttled is not None else ():
        yield f.THROTTLED, (reason,), reason in (it.throttled or ())
    yield f.ECC_ERRORS, ("corrected",), it.ecc_corrected
    yield f.ECC_ERRORS, ("uncorrected",), it.ecc_uncorrected
    for kind, count in it.nvlink_errors.items():
        yield f.NVLINK_ERRORS, (kind,), count
    yield f.PCIE_REPLAYS, (), it.pcie_replays
