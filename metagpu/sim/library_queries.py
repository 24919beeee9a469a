"""NVML's questions about one GPU: what it is, how it is, who is on it."""

# ruff: noqa: N802 - functions carry the names of NVML's own

import time
from collections.abc import Iterator
from typing import Final

import pynvml

from metagpu.core.driver import ComputeMode
from metagpu.core.gpu import MIB
from metagpu.sim.gpu import SimGpu, SimProcess
from metagpu.sim.instances import SimCompute, SimInstance
from metagpu.sim.library_base import (
    Argument,
    LibraryBase,
    Return,
    address_in,
    c_function,
    fill,
    fill_address,
    fill_pointer,
    fill_text,
    number,
    target,
)
from metagpu.sim.node import RECOVERY_SINCE

_NONE: Final = 0xFFFFFFFF
_MUTE: Final = 0xFFFFFFFFFFFFFFFF
_ENABLED: Final = 1


class Queries(LibraryBase):
    """Handles, and what there is to ask with one."""

    @c_function
    def nvmlDeviceGetCount_v2(self, count: Argument) -> None:
        """Count the GPUs, lost ones too."""
        with self._ready():
            fill(count, len(self.node.gpus))

    @c_function
    def nvmlDeviceGetHandleByIndex_v2(self, index: Argument, handle: Argument) -> None:
        """Give the handle of the GPU with this number, in PCI order."""
        with self._ready():
            if not 0 <= number(index) < len(self.node.gpus):
                raise Return(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            self._hand_out(self.node.gpus[number(index)], handle)

    @c_function
    def nvmlDeviceGetHandleByUUID(self, uuid: Argument, handle: Argument) -> None:
        """Give the handle of the GPU, or the MIG device, with this uuid."""
        with self._ready():
            wanted = (target(uuid).value or b"").decode()
            for gpu in self.node.gpus:
                for _, compute in gpu.mig.computes:
                    if compute.uuid == wanted:
                        fill_pointer(handle, compute.device)
                        return
            found = [gpu for gpu in self.node.gpus if gpu.id == wanted]
            self._hand_out(self._only(found), handle)

    @c_function
    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: Argument, handle: Argument) -> None:
        """Give the handle of the GPU at this PCI address; its domain may have 4 digits or 8."""
        with self._ready():
            wanted = (target(bus_id).value or b"").decode().upper()
            found = [gpu for gpu in self.node.gpus if wanted in {gpu.bus_id, gpu.bus_id[4:]}]
            self._hand_out(self._only(found), handle)

    @c_function
    def nvmlDeviceGetIndex(self, device: Argument, index: Argument) -> None:
        """Give a GPU's number."""
        with self._gpu(device) as gpu:
            fill(index, self.node.gpus.index(gpu))

    @c_function
    def nvmlDeviceGetName(self, device: Argument, name: Argument, length: Argument) -> None:
        """Give the product's name."""
        with self._gpu(device) as gpu:
            fill_text(name, length, gpu.board.product)

    @c_function
    def nvmlDeviceGetUUID(self, device: Argument, uuid: Argument, length: Argument) -> None:
        """Give the uuid."""
        with self._device(device) as (gpu, part):
            fill_text(uuid, length, part[1].uuid if part else gpu.id)

    @c_function
    def nvmlDeviceGetMinorNumber(self, device: Argument, minor: Argument) -> None:
        """Give the number of the device node."""
        with self._gpu(device) as gpu:
            fill(minor, gpu.slot)

    @c_function
    def nvmlDeviceGetPciInfo_v3(self, device: Argument, info: Argument) -> None:
        """Describe the place on the PCI bus."""
        with self._gpu(device) as gpu:
            fill_address(info, gpu.bus_id)
            target(info).pciDeviceId = gpu.board.pci_device_id

    @c_function
    def nvmlDeviceGetMemoryInfo(self, device: Argument, memory: Argument) -> None:
        """Give total, used and free bytes; `used` includes what is reserved."""
        with self._device(device) as (gpu, part):
            answer = target(memory)
            answer.total, reserved, used = _memory(gpu, part)
            answer.used = reserved + used
            answer.free = answer.total - answer.used

    @c_function
    def nvmlDeviceGetMemoryInfo_v2(self, device: Argument, memory: Argument) -> None:
        """Give total, reserved, used and free bytes; `used` is without what is reserved."""
        with self._device(device) as (gpu, part):
            answer = target(memory)
            if answer.version != pynvml.nvmlMemory_v2:
                raise Return(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)

            answer.total, answer.reserved, answer.used = _memory(gpu, part)
            answer.free = answer.total - answer.reserved - answer.used

    @c_function
    def nvmlDeviceGetCudaComputeCapability(
        self, device: Argument, major: Argument, minor: Argument
    ) -> None:
        """Give the compute capability."""
        with self._gpu(device) as gpu:
            fill(major, gpu.board.compute_capability[0])
            fill(minor, gpu.board.compute_capability[1])

    @c_function
    def nvmlDeviceGetArchitecture(self, device: Argument, architecture: Argument) -> None:
        """Give the number of the architecture."""
        with self._gpu(device) as gpu:
            fill(architecture, gpu.board.architecture)

    @c_function
    def nvmlDeviceGetMemoryAffinity(
        self, device: Argument, size: Argument, nodes: Argument, _scope: Argument
    ) -> None:
        """Set the bit of the nearest NUMA node in words of 64."""
        with self._gpu(device) as gpu:
            if number(size) * 64 <= gpu.numa:
                raise Return(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            target(nodes)[gpu.numa // 64] = 1 << gpu.numa % 64

    @c_function
    def nvmlDeviceGetEccMode(self, device: Argument, current: Argument, pending: Argument) -> None:
        """Tell whether error correction is on: always, as these GPUs are shipped."""
        with self._gpu(device):
            fill(current, _ENABLED)
            fill(pending, _ENABLED)

    @c_function
    def nvmlDeviceGetTotalEccErrors(
        self, device: Argument, kind: Argument, _counter: Argument, count: Argument
    ) -> None:
        """Count memory errors; those of a GPU's whole life are not told from recent ones."""
        with self._gpu(device) as gpu:
            corrected = number(kind) == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
            fill(count, gpu.ecc_corrected if corrected else gpu.ecc_uncorrected)

    @c_function
    def nvmlDeviceGetRemappedRows(self, device: Argument, *counts: Argument) -> None:
        """Count replaced memory rows: corrected, uncorrected, some pending, some failed."""
        with self._gpu(device) as gpu:
            self._supported(gpu.board.remaps_rows)
            for argument, value in zip(counts, gpu.rows, strict=True):
                fill(argument, value)

    @c_function
    def nvmlDeviceGetFieldValues(self, device: Argument, count: Argument, values: Argument) -> None:
        """Answer fields one by one: only the recovery action is there."""
        with self._gpu(device) as gpu:
            wanted = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION

            for answer in target(values)[: number(count)]:
                answer.timestamp = time.time_ns() // 1000
                if answer.fieldId != wanted or self.node.driver_branch < RECOVERY_SINCE:
                    answer.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
                    continue
                answer.nvmlReturn = pynvml.NVML_SUCCESS
                answer.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
                answer.value.uiVal = int(gpu.recovery_action)

    @c_function
    def nvmlDeviceGetComputeMode(self, device: Argument, mode: Argument) -> None:
        """Tell who may compute on a GPU."""
        with self._gpu(device) as gpu:
            fill(mode, gpu.compute_mode)

    @c_function
    def nvmlDeviceSetComputeMode(self, device: Argument, mode: Argument) -> None:
        """Say who may compute on a GPU: root alone may; a mode of old drivers is not supported.

        In MIG mode none but the default is (NVIDIA/go-nvml#61 has nvidia-smi's words).
        """
        with self._gpu(device) as gpu:
            wanted = number(mode)
            if not self.node.root:
                raise Return(pynvml.NVML_ERROR_NO_PERMISSION)
            if not 0 <= wanted < pynvml.NVML_COMPUTEMODE_COUNT:
                raise Return(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            self._supported(wanted != pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD)
            self._supported(wanted == pynvml.NVML_COMPUTEMODE_DEFAULT or not gpu.mig.enabled)
            gpu.compute_mode = ComputeMode(wanted)

    @c_function
    def nvmlDeviceGetUtilizationRates(self, device: Argument, rates: Argument) -> None:
        """Give percent: a GPU with processes is busy, and its memory as much as it is used."""
        with self._gpu(device) as gpu:
            target(rates).gpu = 100 if gpu.processes else 0
            target(rates).memory = 100 * gpu.used // (gpu.board.memory * MIB)

    @c_function
    def nvmlDeviceGetComputeRunningProcesses_v3(
        self, device: Argument, count: Argument, entries: Argument
    ) -> None:
        """List processes with a compute context."""
        with self._device(device) as (gpu, part):
            found = [process for process in _processes(gpu, part) if not process.graphics]
            _list_processes(found, count, entries)

    @c_function
    def nvmlDeviceGetGraphicsRunningProcesses_v3(
        self, device: Argument, count: Argument, entries: Argument
    ) -> None:
        """List processes with a graphics context."""
        with self._device(device) as (gpu, part):
            found = [process for process in _processes(gpu, part) if process.graphics]
            _list_processes(found, count, entries)

    def _hand_out(self, gpu: SimGpu, handle: Argument) -> None:
        fill_pointer(handle, self._answering(gpu).handle)

    @staticmethod
    def _only(found: list[SimGpu]) -> SimGpu:
        if not found:
            raise Return(pynvml.NVML_ERROR_NOT_FOUND)
        return found[0]


def _memory(gpu: SimGpu, part: tuple[SimInstance, SimCompute] | None) -> tuple[int, int, int]:
    """Give the bytes in total, reserved, and used by processes; nothing is reserved in MIG."""
    if part is None:
        return gpu.board.memory * MIB, gpu.board.reserved * MIB, gpu.used
    return part[0].profile.memory * MIB, 0, gpu.used_in(part[0].number)


def _processes(gpu: SimGpu, part: tuple[SimInstance, SimCompute] | None) -> Iterator[SimProcess]:
    """Give the processes on a GPU, or on one MIG device of it."""
    for process in gpu.processes.values():
        if part is None or (process.gi, process.ci) == (part[0].number, part[1].number):
            yield process


def _list_processes(found: list[SimProcess], count: Argument, entries: Argument) -> None:
    """Fill as many entries as the caller has room for, or tell how many it would take."""
    room, target(count).value = number(target(count)), len(found)
    if found and (room < len(found) or not entries or not address_in(entries)):
        raise Return(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)

    for entry, process in zip(entries or (), found, strict=False):
        entry.pid = process.pid
        entry.usedGpuMemory = _MUTE if process.memory is None else process.memory
        entry.gpuInstanceId = _NONE if process.gi is None else process.gi
        entry.computeInstanceId = _NONE if process.ci is None else process.ci
