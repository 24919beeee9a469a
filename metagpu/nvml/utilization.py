"""Processes on a GPU, and their shares of its processor time.

These functions block, and raise pynvml's errors.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import pynvml

from metagpu.core.contracts.driver import GpuActivity
from metagpu.nvml.answers import NvmlAnswers
from metagpu.nvml.errors import FAILURES, NOT_REPORTED, error_code
from metagpu.nvml.queries import Handle, read_processes
from metagpu.nvml.sensors import read_sensors

WINDOW: Final = 3.0
"""Seconds of samples: in each second the driver takes several of a busy process."""

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
    """Return each process's mean share of multiprocessor time, in percent, by pid.

    `None` where the driver does not report it.
    """
    since = int((time.time() - WINDOW) * 1e6)

    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, since)
    except FAILURES as failure:
        if error_code(failure) in _IDLE:
            return {}
        # A new process came during the call: the next read has it.
        if error_code(failure) in NOT_REPORTED | {pynvml.NVML_ERROR_INSUFFICIENT_SIZE}:
            return None
        raise

    percents: defaultdict[int, list[int]] = defaultdict(list)
    for sample in samples:
        if sample.timeStamp >= since:  # the rest of the buffer is not filled
            percents[sample.pid].append(sample.smUtil)
    return {pid: round(sum(values) / len(values)) for pid, values in percents.items()}
