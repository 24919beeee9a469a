"""NVML's query for the utilization by processes."""

# ruff: noqa: N802 - functions carry the names of NVML's own

import time

import pynvml

from metagpu.sim.nvml.base import (
    Argument,
    NvmlReturn,
    SimLibraryBase,
    c_function,
    dereference,
    read_address,
    read_number,
)


class UtilizationFunctions(SimLibraryBase):
    """The utilization of a GPU by its processes."""

    @c_function
    def nvmlDeviceGetProcessUtilization(
        self, device: Argument, samples: Argument, count: Argument, _since: Argument
    ) -> None:
        """Return one sample, taken now, of each busy process; not supported in MIG mode."""
        with self._gpu(device) as gpu:
            if gpu.mig.enabled:
                raise NvmlReturn(pynvml.NVML_ERROR_NOT_SUPPORTED)
            busy = [process for process in gpu.processes.values() if process.sm]
            if not busy:
                raise NvmlReturn(pynvml.NVML_ERROR_NOT_FOUND)

            room, dereference(count).value = read_number(dereference(count)), len(busy)
            if room < len(busy) or not samples or not read_address(samples):
                raise NvmlReturn(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
            for sample, process in zip(samples, busy, strict=False):
                sample.pid, sample.smUtil = process.pid, process.sm
                sample.timeStamp = time.time_ns() // 1000
