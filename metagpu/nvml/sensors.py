"""Sensors, error counters, processes and their utilization on one GPU.

These functions block, and raise pynvml's errors of a lost GPU; any other failure leaves a value
unknown.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

import pynvml
from msgspec.structs import asdict

from metagpu.core.contracts.driver import GpuActivity
from metagpu.core.contracts.sensors import (
    DetailedSensors,
    GpuSensors,
    NvlinkError,
    ThrottleReason,
)
from metagpu.nvml.errors import FAILURES, NOT_REPORTED, NvmlAnswers, error_code
from metagpu.nvml.queries import Handle, field_number, read_memory, read_processes

_MILLI: Final = 1e-3  # milliwatts and millijoules
_MEGA: Final = 1e6
_PERCENT: Final = 100

_NVLINK_FIELDS: Final = MappingProxyType(
    {
        NvlinkError.CRC_FLIT: pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        NvlinkError.CRC_DATA: pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        NvlinkError.REPLAY: pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
        NvlinkError.RECOVERY: pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    }
)
_ENERGY: Final = pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION
_COSTLY: Final = (_ENERGY, pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER)
_FIELDS: Final = (
    pynvml.NVML_FI_DEV_MEMORY_TEMP,
    pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL,
    pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL,
    *_NVLINK_FIELDS.values(),
)
"""Read by one call: each answer has a code of its own."""
_REASONS: Final = MappingProxyType(
    {
        ThrottleReason.POWER_CAP: pynvml.nvmlClocksThrottleReasonSwPowerCap,
        ThrottleReason.SOFTWARE_THERMAL: pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
        ThrottleReason.HARDWARE_THERMAL: pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        ThrottleReason.POWER_BRAKE: pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
)
"""Without what is no fault: an idle GPU, clocks that somebody set or that follow another GPU's."""


def read_sensors(handle: Handle, answers: NvmlAnswers, *, costly: bool = True) -> GpuSensors:
    """Read the sensors of a GPU once; the costly ones take longer than all others."""
    fields = answers.fresh(_read_fields, handle, (*_FIELDS, *_COSTLY) if costly else _FIELDS) or {}
    ask = partial(_scaled, answers, handle)

    return GpuSensors(
        temperature=ask(_read_temperature),
        memory_temperature=fields.get(pynvml.NVML_FI_DEV_MEMORY_TEMP),
        power=ask(pynvml.nvmlDeviceGetPowerUsage, _MILLI),
        power_limit=ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, _MILLI),
        energy=_times(fields.get(_ENERGY), _MILLI),
        sm_clock=ask(_read_sm_clock, _MEGA),
        memory_clock=ask(_read_memory_clock, _MEGA),
        ecc_corrected=fields.get(pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL),
        ecc_uncorrected=fields.get(pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL),
        nvlink_errors={
            kind: fields[field] for kind, field in _NVLINK_FIELDS.items() if field in fields
        },
        pcie_replays=fields.get(pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER),
        throttled=_throttle_reasons(answers.fresh(_read_throttle_reasons, handle)),
    )


def read_detailed_sensors(
    handle: Handle, answers: NvmlAnswers, *, costly: bool = True
) -> DetailedSensors:
    """Read the sensors of a GPU once, its engines, its memory and its remapped rows."""
    memory = read_memory(handle)  # without an answer to this, nothing else is worth a call
    sensors = read_sensors(handle, answers, costly=costly)
    rates = answers.fresh(pynvml.nvmlDeviceGetUtilizationRates, handle)
    rows = answers.fresh(pynvml.nvmlDeviceGetRemappedRows, handle)
    encoder = answers.fresh(pynvml.nvmlDeviceGetEncoderUtilization, handle)
    decoder = answers.fresh(pynvml.nvmlDeviceGetDecoderUtilization, handle)

    return DetailedSensors(
        **asdict(sensors),
        utilization=rates and rates.gpu / _PERCENT,
        memory_utilization=rates and rates.memory / _PERCENT,
        encoder=encoder and encoder[0] / _PERCENT,
        decoder=decoder and decoder[0] / _PERCENT,
        memory_used=None if memory is None else memory.used - (memory.reserved or 0),
        memory_free=memory and memory.total - memory.used,
        memory_reserved=memory and memory.reserved,
        rows_correctable=rows and rows[0],
        rows_uncorrectable=rows and rows[1],
        rows_failed=rows and bool(rows[3]),
    )


def _read_fields(handle: Handle, fields: Sequence[int]) -> Mapping[int, int]:
    """Read those of the fields that the GPU has, by number."""
    found = pynvml.nvmlDeviceGetFieldValues(handle, list(fields))
    return {
        answer.fieldId: field_number(answer)
        for answer in found
        if answer.nvmlReturn == pynvml.NVML_SUCCESS
    }


def _scaled(
    answers: NvmlAnswers, handle: Handle, function: Callable[..., Any], unit: float = 1
) -> float | None:
    return _times(answers.fresh(function, handle), unit)


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


# One function for each value: failures are logged by the function's name.


def _read_temperature(handle: Handle) -> Any:  # noqa: ANN401 - pynvml ships no types
    return pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)


def _read_sm_clock(handle: Handle) -> Any:  # noqa: ANN401 - likewise
    return pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)


def _read_memory_clock(handle: Handle) -> Any:  # noqa: ANN401 - likewise
    return pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)


def _read_throttle_reasons(handle: Handle) -> Any:  # noqa: ANN401 - likewise
    # Drivers from 535 on have this function under a second name as well.
    return pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)


def _throttle_reasons(bits: int | None) -> frozenset[ThrottleReason] | None:
    if bits is None:
        return None
    return frozenset(reason for reason, bit in _REASONS.items() if bits & bit)


WINDOW: Final = 3.0
"""Seconds of utilization that a reading covers."""

_IDLE: Final = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_SUCCESS})
"""NVML's codes for no samples; pynvml raises a success that fills no sample."""


def read_activity(
    handle: Handle,
    sensor_answers: NvmlAnswers | None = None,
    *,
    processes: bool = True,
    costly: bool = True,
) -> GpuActivity:
    """Read the processes on a GPU and its sensors.

    Sensors that cannot be read cost nothing else: the health watch reports a GPU that is lost.
    """
    listed = read_processes(handle) if processes else ()
    sensors = None
    if sensor_answers is not None:
        with suppress(Exception):
            sensors = read_sensors(handle, sensor_answers, costly=costly)
    return GpuActivity(listed, sensors)


def read_utilization(handle: Handle) -> Mapping[int, int] | None:
    """Return each process's percent of multiprocessor time, by pid.

    The time is that of the last `WINDOW` seconds, idle moments too. `None` where the driver does
    not report it.

    By NVML's documentation there is one sample for each process with use, and none for idle ones.
    The outputs that others have published show one for each process, a mean since the given time.
    So a process with one sample has it as its mean. Of several, each stands for the usual time
    between two of a process. Either may leave out idle time: all processes together have no more
    than the mean of the GPU's own samples, which idle moments have too. None of this was measured
    on a card (docs/verified.md).
    """
    since = int((time.time() - WINDOW) * 1e6)

    try:
        samples = _process_samples(handle, since)
    except FAILURES as failure:
        if error_code(failure) in _IDLE:
            return {}
        # A new process came during the call: the next read has it.
        if error_code(failure) in NOT_REPORTED | {pynvml.NVML_ERROR_INSUFFICIENT_SIZE}:
            return None
        raise

    values: defaultdict[int, list[int]] = defaultdict(list)
    times: defaultdict[int, list[int]] = defaultdict(list)
    for sample in samples:
        if sample.timeStamp >= since:  # the rest of the buffer is not filled
            values[sample.pid].append(min(sample.smUtil, _PERCENT))
            times[sample.pid].append(sample.timeStamp)
    moments = max((1, *map(len, values.values()), *map(_moments, times.values())))
    used = {pid: sum(percents) / moments for pid, percents in values.items()}
    total = sum(used.values())
    most = (_mean_of_gpu(handle, since) if used else None) or total
    scale = min(1, most / total) if total else 1
    return {pid: round(percent * scale) for pid, percent in used.items()}


def _process_samples(handle: Handle, since: int) -> Sequence[Any]:
    """Return NVML's samples of processes after a time in microseconds."""
    try:
        return list(pynvml.nvmlDeviceGetProcessUtilization(handle, since))
    except FAILURES as failure:
        if error_code(failure) not in NOT_REPORTED:
            raise
    return list(pynvml.nvmlDeviceGetProcessesUtilizationInfo(handle, since))


def _moments(times: Sequence[int]) -> int:
    """Return how many samples fit into the window, by the usual time between two."""
    gaps = sorted(later - earlier for earlier, later in pairwise(sorted(times)))
    return int(WINDOW * 1e6 / max(1, gaps[(len(gaps) - 1) // 2])) if gaps else 1


def _mean_of_gpu(handle: Handle, since: int) -> float | None:
    """Return the percent of the time with a kernel, `None` where it is unknown."""
    try:
        kind = pynvml.NVML_GPU_UTILIZATION_SAMPLES
        _, samples = pynvml.nvmlDeviceGetSamples(handle, kind, since)
    except FAILURES:
        return None
    percents = [sample.sampleValue.uiVal for sample in samples if sample.timeStamp >= since]
    return sum(percents) / len(percents) if percents else None
