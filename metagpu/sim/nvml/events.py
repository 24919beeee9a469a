"""NVML's functions for event sets."""

# ruff: noqa: N802 - functions carry the names of NVML's own

import ctypes
import time
from typing import Final

import pynvml

from metagpu.sim.machine.gpu import SimGpu
from metagpu.sim.machine.node import RECOVERY_SINCE, SimEvent, SimEventSet, SimNode
from metagpu.sim.nvml.base import (
    Argument,
    NvmlReturn,
    SimLibraryBase,
    c_function,
    dereference,
    read_address,
    read_number,
    write_number,
    write_pointer,
)

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
