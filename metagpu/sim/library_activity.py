"""NVML's question how busy processes keep a GPU."""

# ruff: noqa: N802 - functions carry the names of NVML's own

import time

import pynvml

from metagpu.sim.library_base import (
    Argument,
    LibraryBase,
    Return,
    address_in,
    c_function,
    number,
    target,
)


class Activity(LibraryBase):
    """The utilisation of processes."""

    @c_function
    def nvmlDeviceGetProcessUtilization(
        self, device: Argument, samples: Argument, count: Argument, _since: Argument
    ) -> None:
        """Give one sample, taken now, of each process that is busy; not in MIG mode."""
        with self._gpu(device) as gpu:
            if gpu.mig.enabled:
                raise Return(pynvml.NVML_ERROR_NOT_SUPPORTED)
            busy = [process for process in gpu.processes.values() if process.sm]
            if not busy:
                raise Return(pynvml.NVML_ERROR_NOT_FOUND)

            room, target(count).value = number(target(count)), len(busy)
            if room < len(busy) or not samples or not address_in(samples):
                raise Return(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
            for sample, process in zip(samples, busy, strict=False):
                sample.pid, sample.smUtil = process.pid, process.sm
                sample.timeStamp = time.time_ns() // 1000
