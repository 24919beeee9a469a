"""NVML's queries about sensors and error counters."""

# ruff: noqa: N802 - functions carry the names of NVML's own

from collections.abc import Iterator
from typing import Final

import pynvml

from metagpu.sim.machine.gpu import SimGpu
from metagpu.sim.nvml.base import (
    Argument,
    NvmlReturn,
    SimLibraryBase,
    c_function,
    read_number,
    write_number,
)

_SAMPLE_PERIOD: Final = 167_000  # microseconds

NVLINK_FIELDS: Final = (
    pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
)


class SensorFunctions(SimLibraryBase):
    """Temperature, power, clocks, and what lowers them."""

    @c_function
    def nvmlDeviceGetTemperature(
        self, device: Argument, sensor: Argument, temperature: Argument
    ) -> None:
        """Return the GPU's temperature: NVML has no other sensor here."""
        with self._gpu(device) as gpu:
            if read_number(sensor) != pynvml.NVML_TEMPERATURE_GPU:
                raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            write_number(temperature, gpu.sensors.temperature)

    @c_function
    def nvmlDeviceGetPowerUsage(self, device: Argument, power: Argument) -> None:
        """Return the power in milliwatts."""
        with self._gpu(device) as gpu:
            write_number(power, gpu.sensors.power)

    @c_function
    def nvmlDeviceGetEnforcedPowerLimit(self, device: Argument, limit: Argument) -> None:
        """Return the power limit in milliwatts."""
        with self._gpu(device) as gpu:
            write_number(limit, gpu.sensors.power_limit)

    @c_function
    def nvmlDeviceGetClockInfo(self, device: Argument, kind: Argument, clock: Argument) -> None:
        """Return a clock in MHz."""
        with self._gpu(device) as gpu:
            clocks = {
                pynvml.NVML_CLOCK_SM: gpu.sensors.sm_clock,
                pynvml.NVML_CLOCK_MEM: gpu.sensors.memory_clock,
            }
            self._supported(read_number(kind) in clocks)
            write_number(clock, clocks[read_number(kind)])

    @c_function
    def nvmlDeviceGetCurrentClocksThrottleReasons(
        self, device: Argument, reasons: Argument
    ) -> None:
        """Return why the clocks are low: also of an idle GPU."""
        with self._gpu(device) as gpu:
            idle = 0 if gpu.processes else pynvml.nvmlClocksThrottleReasonGpuIdle
            write_number(reasons, gpu.sensors.throttle_reasons | idle)

    @c_function
    def nvmlDeviceGetEncoderUtilization(
        self, device: Argument, utilization: Argument, period: Argument
    ) -> None:
        """Return an idle encoder."""
        self._report_idle_engine(device, utilization, period)

    @c_function
    def nvmlDeviceGetDecoderUtilization(
        self, device: Argument, utilization: Argument, period: Argument
    ) -> None:
        """Return an idle decoder."""
        self._report_idle_engine(device, utilization, period)

    def _report_idle_engine(
        self, device: Argument, utilization: Argument, period: Argument
    ) -> None:
        with self._gpu(device) as gpu:
            self._supported(not gpu.mig.enabled)
            write_number(utilization, 0)
            write_number(period, _SAMPLE_PERIOD)


def sensor_fields(gpu: SimGpu) -> Iterator[tuple[int, int]]:
    """Yield number and value of each sensor field that a GPU has."""
    yield pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, gpu.sensors.read_energy()
    yield pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER, gpu.sensors.pcie_replays
    yield pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL, gpu.ecc_corrected
    yield pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, gpu.ecc_uncorrected
    if (temperature := gpu.sensors.memory_temperature) is not None:
        yield pynvml.NVML_FI_DEV_MEMORY_TEMP, temperature
    if gpu.model.nvlinks:
        for field in NVLINK_FIELDS:
            yield field, gpu.sensors.nvlink_errors.get(field, 0)
