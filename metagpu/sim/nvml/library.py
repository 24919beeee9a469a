"""NVML's library in Python: its C functions, by their names, on a simulated node.

pynvml finds functions by name on one library object, so an object of this class can be that
library. A function that is missing here raises `AttributeError`, which pynvml reports as it does
for a library too old to have the function.
"""

# ruff: noqa: N802, N815 - functions carry the names of NVML's own

import ctypes
import math
import time
from collections.abc import Iterator
from typing import Final

import pynvml

from metagpu.core.contracts.driver import ComputeMode, RecoveryAction
from metagpu.core.model.gpu import MIB
from metagpu.sim.machine.gpu import SimGpu, SimProcess
from metagpu.sim.machine.mig_state import SimComputeInstance, SimGpuInstance
from metagpu.sim.machine.node import (
    RECOVERY_SINCE,
    RESET_STATUS_SINCE,
    SimEvent,
    SimEventSet,
    SimNode,
)
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
    write_pointer,
    write_text,
)
from metagpu.sim.nvml.mig import MigFunctions
from metagpu.sim.nvml.readings import (
    MemoryLimitFunctions,
    SensorFunctions,
    TopologyFunctions,
    UtilizationFunctions,
    sensor_fields,
)

_MUTE: Final = 0xFFFFFFFFFFFFFFFF
_ENABLED: Final = 1


class QueryFunctions(SimLibraryBase):
    """Handles, and the queries about one GPU."""

    @c_function
    def nvmlDeviceGetCount_v2(self, count: Argument) -> None:
        """Return the number of GPUs, lost ones too."""
        with self._ready():
            write_number(count, len(self.node.gpus))

    @c_function
    def nvmlDeviceGetHandleByIndex_v2(self, index: Argument, handle: Argument) -> None:
        """Return the handle of the GPU with this index, in PCI order."""
        with self._ready():
            if not 0 <= read_number(index) < len(self.node.gpus):
                raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            self._hand_out(self.node.gpus[read_number(index)], handle)

    @c_function
    def nvmlDeviceGetHandleByUUID(self, uuid: Argument, handle: Argument) -> None:
        """Return the handle of the GPU or MIG device with this UUID."""
        with self._ready():
            wanted = (dereference(uuid).value or b"").decode()
            for gpu in self.node.gpus:
                for _, compute in gpu.mig.compute_instances:
                    if compute.uuid == wanted:
                        write_pointer(handle, compute.device)
                        return
            found = [gpu for gpu in self.node.gpus if gpu.id == wanted]
            self._hand_out(self._only(found), handle)

    @c_function
    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: Argument, handle: Argument) -> None:
        """Return the handle of the GPU at a PCI address with a domain of 4 or 8 digits."""
        with self._ready():
            wanted = (dereference(bus_id).value or b"").decode().upper()
            found = [gpu for gpu in self.node.gpus if wanted in {gpu.bus_id, gpu.bus_id[4:]}]
            self._hand_out(self._only(found), handle)

    @c_function
    def nvmlDeviceGetIndex(self, device: Argument, index: Argument) -> None:
        """Return a GPU's index."""
        with self._gpu(device) as gpu:
            write_number(index, self.node.gpus.index(gpu))

    @c_function
    def nvmlDeviceGetName(self, device: Argument, name: Argument, length: Argument) -> None:
        """Return the product's name."""
        with self._gpu(device) as gpu:
            write_text(name, length, gpu.model.product)

    @c_function
    def nvmlDeviceGetUUID(self, device: Argument, uuid: Argument, length: Argument) -> None:
        """Return the UUID."""
        with self._device(device) as (gpu, part):
            write_text(uuid, length, part[1].uuid if part else gpu.id)

    @c_function
    def nvmlDeviceGetMinorNumber(self, device: Argument, minor: Argument) -> None:
        """Return the minor number of the device node."""
        with self._gpu(device) as gpu:
            write_number(minor, gpu.slot)

    @c_function
    def nvmlDeviceGetPciInfo_v3(self, device: Argument, info: Argument) -> None:
        """Return the PCI address and device id."""
        with self._gpu(device) as gpu:
            write_pci_address(info, gpu.bus_id)
            dereference(info).pciDeviceId = gpu.model.pci_device_id
            dereference(info).pciSubSystemId = gpu.model.pci_subsystem_id

    @c_function
    def nvmlDeviceGetVirtualizationMode(self, device: Argument, mode: Argument) -> None:
        """Return whether the GPU belongs to a machine, or is a vGPU of a virtual one."""
        with self._gpu(device) as gpu:
            write_number(mode, gpu.virtualization)

    @c_function
    def nvmlDeviceGetMemoryInfo(self, device: Argument, memory: Argument) -> None:
        """Return total, used and free bytes; `used` includes the reserved bytes."""
        with self._device(device) as (gpu, part):
            answer = dereference(memory)
            answer.total, reserved, used = _memory(gpu, part)
            answer.used = reserved + used
            answer.free = answer.total - answer.used

    @since(510)
    @c_function
    def nvmlDeviceGetMemoryInfo_v2(self, device: Argument, memory: Argument) -> None:
        """Return total, reserved, used and free bytes; `used` excludes the reserved bytes."""
        with self._device(device) as (gpu, part):
            answer = dereference(memory)
            if answer.version != pynvml.nvmlMemory_v2:
                raise NvmlReturn(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)

            answer.total, answer.reserved, answer.used = _memory(gpu, part)
            answer.free = answer.total - answer.reserved - answer.used

    @c_function
    def nvmlDeviceGetCudaComputeCapability(
        self, device: Argument, major: Argument, minor: Argument
    ) -> None:
        """Return the compute capability."""
        with self._gpu(device) as gpu:
            write_number(major, gpu.model.compute_capability[0])
            write_number(minor, gpu.model.compute_capability[1])

    @c_function
    def nvmlDeviceGetArchitecture(self, device: Argument, architecture: Argument) -> None:
        """Return the number of the architecture."""
        with self._gpu(device) as gpu:
            write_number(architecture, gpu.model.architecture)

    @c_function
    def nvmlDeviceGetBrand(self, device: Argument, brand: Argument) -> None:
        """Return the number of the brand."""
        with self._gpu(device) as gpu:
            write_number(brand, gpu.model.brand)

    @c_function
    def nvmlDeviceGetMemoryAffinity(
        self, device: Argument, size: Argument, nodes: Argument, _scope: Argument
    ) -> None:
        """Set the bit of the nearest NUMA node in words of 64."""
        with self._gpu(device) as gpu:
            if read_number(size) * 64 <= gpu.numa:
                raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            dereference(nodes)[gpu.numa // 64] = 1 << gpu.numa % 64

    @c_function
    def nvmlDeviceGetEccMode(self, device: Argument, current: Argument, pending: Argument) -> None:
        """Return whether ECC is on: always, as these GPUs are shipped."""
        with self._gpu(device) as gpu:
            self._supported(gpu.model.has_ecc)
            write_number(current, _ENABLED)
            write_number(pending, _ENABLED)

    @c_function
    def nvmlDeviceGetTotalEccErrors(
        self, device: Argument, kind: Argument, _counter: Argument, count: Argument
    ) -> None:
        """Return the number of memory errors; volatile and aggregate counts are equal."""
        with self._gpu(device) as gpu:
            self._supported(gpu.model.has_ecc)
            corrected = read_number(kind) == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
            write_number(count, gpu.ecc_corrected if corrected else gpu.ecc_uncorrected)

    @c_function
    def nvmlDeviceGetRemappedRows(self, device: Argument, *counts: Argument) -> None:
        """Return the remapped rows: corrected, uncorrected, some pending, some failed."""
        with self._gpu(device) as gpu:
            self._supported(gpu.model.remaps_rows)
            for argument, value in zip(counts, gpu.rows, strict=True):
                write_number(argument, value)

    @c_function
    def nvmlDeviceGetFieldValues(self, device: Argument, count: Argument, values: Argument) -> None:
        """Return fields one by one: the recovery action, a needed reset, and sensors."""
        with self._gpu(device) as gpu:
            action = gpu.recovery_action
            known = {
                pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: (RECOVERY_SINCE, action),
                pynvml.NVML_FI_DEV_RESET_STATUS: (
                    RESET_STATUS_SINCE,
                    action == RecoveryAction.GPU_RESET,
                ),
                pynvml.NVML_FI_DEV_DRAIN_AND_RESET_STATUS: (
                    RESET_STATUS_SINCE,
                    action == RecoveryAction.DRAIN_AND_RESET,
                ),
                **{field: (0, value) for field, value in sensor_fields(gpu)},
            }

            for answer in dereference(values)[: read_number(count)]:
                answer.timestamp = time.time_ns() // 1000
                since, value = known.get(answer.fieldId, (math.inf, 0))
                if self.node.driver_branch < since:
                    answer.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
                    continue
                answer.nvmlReturn = pynvml.NVML_SUCCESS
                answer.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
                answer.value.ullVal = int(value)

    @c_function
    def nvmlDeviceGetComputeMode(self, device: Argument, mode: Argument) -> None:
        """Return the compute mode of a GPU."""
        with self._gpu(device) as gpu:
            write_number(mode, gpu.compute_mode)

    @c_function
    def nvmlDeviceSetComputeMode(self, device: Argument, mode: Argument) -> None:
        """Set the compute mode of a GPU; only root may.

        The mode EXCLUSIVE_THREAD of old drivers is not supported. In MIG mode only the default is
        (NVIDIA/go-nvml#61 has nvidia-smi's words).
        """
        with self._gpu(device) as gpu:
            wanted = read_number(mode)
            if not self.node.root:
                raise NvmlReturn(pynvml.NVML_ERROR_NO_PERMISSION)
            if not 0 <= wanted < pynvml.NVML_COMPUTEMODE_COUNT:
                raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            self._supported(wanted != pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD)
            self._supported(wanted == pynvml.NVML_COMPUTEMODE_DEFAULT or not gpu.mig.enabled)
            gpu.compute_mode = ComputeMode(wanted)

    @c_function
    def nvmlDeviceGetUtilizationRates(self, device: Argument, rates: Argument) -> None:
        """Return utilization in percent: 100 for a GPU with processes; and memory in use."""
        with self._gpu(device) as gpu:
            dereference(rates).gpu = 100 if gpu.processes else 0
            dereference(rates).memory = 100 * gpu.used // max(1, gpu.model.memory * MIB)

    @since(510)
    @c_function
    def nvmlDeviceGetComputeRunningProcesses_v3(
        self, device: Argument, count: Argument, entries: Argument
    ) -> None:
        """Return the processes with a compute context."""
        with self._device(device) as (gpu, part):
            found = [process for process in _processes(gpu, part) if not process.graphics]
            _list_processes(found, count, entries)

    @since(510)
    @c_function
    def nvmlDeviceGetGraphicsRunningProcesses_v3(
        self, device: Argument, count: Argument, entries: Argument
    ) -> None:
        """Return the processes with a graphics context."""
        with self._device(device) as (gpu, part):
            found = [process for process in _processes(gpu, part) if process.graphics]
            _list_processes(found, count, entries)

    # The same entries under the names that a library before 510 has.
    nvmlDeviceGetComputeRunningProcesses_v2 = nvmlDeviceGetComputeRunningProcesses_v3.function
    nvmlDeviceGetGraphicsRunningProcesses_v2 = nvmlDeviceGetGraphicsRunningProcesses_v3.function

    def _hand_out(self, gpu: SimGpu, handle: Argument) -> None:
        write_pointer(handle, self._answering(gpu).handle)

    @staticmethod
    def _only(found: list[SimGpu]) -> SimGpu:
        if not found:
            raise NvmlReturn(pynvml.NVML_ERROR_NOT_FOUND)
        return found[0]


def _memory(
    gpu: SimGpu, part: tuple[SimGpuInstance, SimComputeInstance] | None
) -> tuple[int, int, int]:
    """Return total, reserved and used bytes; nothing is reserved in a MIG device."""
    if not gpu.model.memory:
        raise NvmlReturn(pynvml.NVML_ERROR_NOT_SUPPORTED)
    if part is None:
        return gpu.model.memory * MIB, gpu.model.reserved * MIB, gpu.used
    return part[0].profile.memory * MIB, 0, gpu.used_in(part[0].number)


def _processes(
    gpu: SimGpu, part: tuple[SimGpuInstance, SimComputeInstance] | None
) -> Iterator[SimProcess]:
    """Yield the processes on a GPU, or on one of its MIG devices."""
    for process in gpu.processes.values():
        if part is None or (process.gi, process.ci) == (part[0].number, part[1].number):
            yield process


def _list_processes(found: list[SimProcess], count: Argument, entries: Argument) -> None:
    """Fill the caller's array of entries, or return the required size."""
    room, dereference(count).value = read_number(dereference(count)), len(found)
    if found and (room < len(found) or not entries or not read_address(entries)):
        raise NvmlReturn(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)

    for entry, process in zip(entries or (), found, strict=False):
        entry.pid = process.pid
        entry.usedGpuMemory = _MUTE if process.memory is None else process.memory
        entry.gpuInstanceId = _NONE if process.gi is None else process.gi
        entry.computeInstanceId = _NONE if process.ci is None else process.ci


_SETS: Final = 0x7F5F_0000_0000
_NONE: Final = 0xFFFFFFFF


class EventFunctions(SimLibraryBase):
    """Event sets: register event types and wait for events."""

    def __init__(self, node: SimNode) -> None:
        super().__init__(node)
        self._sets: dict[int, SimEventSet] = {}
        self._made = 0

    @c_function
    def nvmlDeviceGetSupportedEventTypes(self, device: Argument, types: Argument) -> None:
        """Return the event types that a GPU supports."""
        with self._gpu(device) as gpu:
            write_number(types, self._types(gpu))

    @c_function
    def nvmlEventSetCreate(self, events: Argument) -> None:
        """Create an event set."""
        with self._ready():
            self._made += 1
            made = SimEventSet()
            self._sets[_SETS + 0x100 * self._made] = made
            self.node.event_sets.append(made)
            write_pointer(events, _SETS + 0x100 * self._made)

    @c_function
    def nvmlDeviceRegisterEvents(self, device: Argument, types: Argument, events: Argument) -> None:
        """Deliver a GPU's events from now on; earlier events are lost."""
        with self._gpu(device) as gpu:
            wanted = read_number(types)
            if wanted & ~pynvml.nvmlEventTypeAll:
                raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            if wanted & ~self._types(gpu):
                raise NvmlReturn(pynvml.NVML_ERROR_NOT_SUPPORTED)
            registered = self._set(events).registered
            registered[gpu.slot] = registered.get(gpu.slot, 0) | wanted

    @c_function
    def nvmlEventSetWait_v2(self, events: Argument, data: Argument, timeout: Argument) -> None:
        """Wait for an event, at most `timeout` milliseconds.

        Once all events are delivered, a lost GPU in the set makes every wait fail at once: NVML's
        documentation promises no better.
        """
        deadline = time.monotonic() + read_number(timeout) / 1000

        with self._ready():
            answer = dereference(data)
            while not (waiting := self._set(events)).queue:
                if any(self._is_lost(slot) for slot in waiting.registered):
                    raise NvmlReturn(pynvml.NVML_ERROR_GPU_IS_LOST)
                left = 0.0 if waiting.interrupted else deadline - time.monotonic()
                if left <= 0:
                    waiting.interrupted = False
                    raise NvmlReturn(pynvml.NVML_ERROR_TIMEOUT)
                self.node.changed.wait(left)
                self._check()
            _deliver(waiting.queue.popleft(), answer)

    def interrupt(self, events: Argument) -> None:
        """End the current wait on an event set as if it had timed out, or the next one.

        NVML has no such function: its callers wait until the timeout.
        """
        with self.node.changed:
            if read_address(events) in self._sets:
                self._sets[read_address(events)].interrupted = True
                self.node.changed.notify_all()

    @c_function
    def nvmlEventSetFree(self, events: Argument) -> None:
        """Free an event set."""
        with self._ready():
            self.node.event_sets.remove(self._set(events))
            del self._sets[read_address(events)]
            self.node.changed.notify_all()

    def _close(self) -> None:
        for events in self._sets.values():
            self.node.event_sets.remove(events)
        self._sets.clear()
        self.node.changed.notify_all()

    def _set(self, events: Argument) -> SimEventSet:
        found = self._sets.get(read_address(events))
        if found is None:
            raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return found

    def _is_lost(self, slot: int) -> bool:
        return any(
            gpu.slot == slot and gpu.failure == pynvml.NVML_ERROR_GPU_IS_LOST
            for gpu in self.node.gpus
        )

    def _types(self, gpu: SimGpu) -> int:
        newer = pynvml.nvmlEventTypeGpuUnavailableError | pynvml.nvmlEventTypeGpuRecoveryAction
        return gpu.model.event_types | (newer if self.node.driver_branch >= RECOVERY_SINCE else 0)


def _deliver(event: SimEvent, data: Argument) -> None:
    data.device = ctypes.cast(event.gpu.handle, type(data.device))
    data.eventType, data.eventData = event.type, event.data
    data.gpuInstanceId = _NONE if event.gi is None else event.gi
    data.computeInstanceId = _NONE if event.ci is None else event.ci


class SimLibrary(
    QueryFunctions,
    TopologyFunctions,
    MigFunctions,
    EventFunctions,
    UtilizationFunctions,
    SensorFunctions,
    MemoryLimitFunctions,
):
    """All simulated functions; see `SimLibraryBase` for the arguments."""
