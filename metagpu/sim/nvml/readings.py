"""NVML's functions for sensors, use by processes, memory limits and connections."""

# ruff: noqa: N802 - functions carry the names of NVML's own

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from uuid import UUID

import pynvml

from metagpu.sim.machine.gpu import SimGpu
from metagpu.sim.machine.load import SAMPLE_PERIOD, SAMPLES_KEPT
from metagpu.sim.nvml.base import (
    Argument,
    NvmlReturn,
    SimLibraryBase,
    c_function,
    dereference,
    read_address,
    read_number,
    since,
    write_number,
    write_pci_address,
)

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
        """Return the power limit in milliwatts; an integrated GPU has none."""
        with self._gpu(device) as gpu:
            self._supported(bool(gpu.model.memory))
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
            write_number(period, SAMPLE_PERIOD)


def sensor_fields(gpu: SimGpu) -> Iterator[tuple[int, int]]:
    """Yield number and value of each sensor field that a GPU has."""
    yield pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, gpu.sensors.read_energy()
    yield pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER, gpu.sensors.pcie_replays
    if gpu.model.memory:
        yield pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL, gpu.ecc_corrected
        yield pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, gpu.ecc_uncorrected
    if (temperature := gpu.sensors.memory_temperature) is not None:
        yield pynvml.NVML_FI_DEV_MEMORY_TEMP, temperature
    if gpu.model.nvlinks:
        for field in NVLINK_FIELDS:
            yield field, gpu.sensors.nvlink_errors.get(field, 0)


class UtilizationFunctions(SimLibraryBase):
    """The utilization of a GPU by its processes."""

    @c_function
    def nvmlDeviceGetProcessUtilization(
        self, device: Argument, samples: Argument, count: Argument, last_seen: Argument
    ) -> None:
        """Return the samples of processes since a time; not supported in MIG mode.

        Moments without use have no sample. The size that is asked for is that of all samples that
        the driver can keep, as more may come until the caller has made room.
        """
        with self._gpu(device) as gpu:
            self._supported(not gpu.mig.enabled)
            gpu.advance(self.node.now)
            found = [
                (process.pid, at, percent)
                for process in gpu.processes.values()
                for at, percent in process.samples
                if at > read_number(last_seen)
            ]
            if not found:
                raise NvmlReturn(pynvml.NVML_ERROR_NOT_FOUND)

            size = dereference(count)
            if size.value < len(found) or not samples or not read_address(samples):
                size.value = SAMPLES_KEPT * len(gpu.processes)
                raise NvmlReturn(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
            size.value = len(found)
            for sample, (pid, at, percent) in zip(samples, found, strict=False):
                sample.pid, sample.timeStamp, sample.smUtil = pid, at, percent

    @c_function
    def nvmlDeviceGetSamples(
        self, device: Argument, kind: Argument, last_seen: Argument, *answer: Argument
    ) -> None:
        """Return the samples of the GPU's own use since a time, idle moments too."""
        value_type, count, samples = answer
        with self._gpu(device) as gpu:
            self._supported(read_number(kind) == pynvml.NVML_GPU_UTILIZATION_SAMPLES)
            self._supported(not gpu.mig.enabled)
            gpu.advance(self.node.now)
            found = [each for each in gpu.own_samples() if each[0] > read_number(last_seen)]
            if not found:
                raise NvmlReturn(pynvml.NVML_ERROR_NOT_FOUND)
            write_number(value_type, pynvml.NVML_VALUE_TYPE_UNSIGNED_INT)
            write_number(count, len(found))
            for sample, (at, percent) in zip(samples or (), found, strict=False):
                sample.timeStamp, sample.sampleValue.uiVal = at, percent


class MemoryLimitFunctions(SimLibraryBase):
    """Memory limits of cgroups; not supported in MIG mode."""

    @since(615)
    @c_function
    def nvmlDeviceSetMemoryLimits_v1(self, device: Argument, limits: Argument) -> None:
        """Set the memory limit of an existing cgroup; only root may."""
        with self._gpu(device) as gpu:
            self._supported(not gpu.mig.enabled)
            if not self.node.root:
                raise NvmlReturn(pynvml.NVML_ERROR_NO_PERMISSION)
            wanted = dereference(limits)
            cgroup = _folder(wanted.nameSpace)
            if wanted.hardLimit == pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX:
                gpu.memory_limits.pop(cgroup, None)
            else:
                gpu.memory_limits[cgroup] = wanted.hardLimit

    @since(615)
    @c_function
    def nvmlDeviceGetMemoryLimits_v1(self, device: Argument, limits: Argument) -> None:
        """Return the limit of a cgroup or its nearest parent, and the memory in use."""
        with self._gpu(device) as gpu:
            self._supported(not gpu.mig.enabled)
            answer = dereference(limits)
            cgroup = _folder(answer.nameSpace)
            above = [limit for limit in gpu.memory_limits if cgroup.is_relative_to(limit)]
            nearest = max(above, key=lambda limit: len(limit.parts), default=None)
            unlimited = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX
            answer.softLimit = 0
            answer.hardLimit = unlimited if nearest is None else gpu.memory_limits[nearest]
            answer.currentUsed = gpu.used_below(cgroup)


def _folder(path: bytes | None) -> Path:
    """Return the cgroup's folder, as NVML opens it."""
    folder = Path(os.fsdecode(path or b""))
    if not folder.is_absolute() or not folder.is_dir():
        raise NvmlReturn(pynvml.NVML_ERROR_NOT_FOUND)
    return folder


_SWITCH: Final = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
_SWITCH_ADDRESS: Final = "00000000:C4:00.0"  # of the first NVSwitch of a DGX A100


class TopologyFunctions(SimLibraryBase):
    """Connections: the PCI bus between two GPUs, and NVLinks."""

    @c_function
    def nvmlDeviceGetTopologyCommonAncestor(
        self, first: Argument, second: Argument, level: Argument
    ) -> None:
        """Return the level at which two GPUs meet on the PCI bus."""
        with self._gpu(first) as a, self._gpu(second) as b:
            write_number(level, self.node.pci_level(a, b))

    @since(535)
    @c_function
    def nvmlDeviceGetPciInfoExt(self, device: Argument, info: Argument) -> None:
        """Return the PCI class: a 3D controller, or a VGA controller for a display."""
        with self._gpu(device) as gpu:
            answer = dereference(info)
            answer.baseClass, answer.subClass = 0x03, 0x00 if gpu.model.is_display else 0x02

    @since(550)
    @c_function
    def nvmlDeviceGetGpuFabricInfoV(self, device: Argument, info: Argument) -> None:
        """Return the NVLink domain of several nodes, if there is one."""
        with self._gpu(device) as gpu:
            if gpu.clique is None:
                raise NvmlReturn(pynvml.NVML_ERROR_NOT_SUPPORTED)
            answer, (cluster, number) = dereference(info), gpu.clique
            answer.clusterUuid[:] = UUID(cluster).bytes
            answer.cliqueId, answer.state = number, pynvml.NVML_GPU_FABRIC_STATE_COMPLETED

    @c_function
    def nvmlDeviceGetNvLinkState(self, device: Argument, link: Argument, active: Argument) -> None:
        """Return whether an NVLink is up: an unconnected one is down."""
        with self._gpu(device) as gpu:
            ends = self.node.nvlinks(gpu)
            self._supported(bool(gpu.model.nvlinks or ends))
            if read_number(link) >= max(gpu.model.nvlinks, len(ends)):
                raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            write_number(active, read_number(link) < len(ends))

    @c_function
    def nvmlDeviceGetNvLinkRemoteDeviceType(
        self, device: Argument, link: Argument, kind: Argument
    ) -> None:
        """Return whether an NVLink leads to a GPU or an NVSwitch."""
        with self._link_end(device, link) as end:
            write_number(kind, _SWITCH if end is None else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)

    @c_function
    def nvmlDeviceGetNvLinkRemotePciInfo_v2(
        self, device: Argument, link: Argument, info: Argument
    ) -> None:
        """Return the PCI address of the other end of an NVLink."""
        with self._link_end(device, link) as end:
            write_pci_address(info, _SWITCH_ADDRESS if end is None else end.bus_id)

    @contextmanager
    def _link_end(self, device: Argument, link: Argument) -> Iterator[SimGpu | None]:
        """Yield the other end of an NVLink that is up."""
        with self._gpu(device) as gpu:
            ends = self.node.nvlinks(gpu)
            if read_number(link) >= len(ends):
                raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            yield ends[read_number(link)]
