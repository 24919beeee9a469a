"""NVML's functions for MIG."""

# ruff: noqa: N802 - functions carry the names of NVML's own

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pynvml

from metagpu.sim import cutting
from metagpu.sim.gpu import SimGpu
from metagpu.sim.instances import SimCompute, SimInstance
from metagpu.sim.library_base import (
    Argument,
    LibraryBase,
    Return,
    address_in,
    c_function,
    fill,
    fill_pointer,
    number,
    target,
)
from metagpu.sim.mig_boards import SimProfile


class Mig(LibraryBase):
    """Mode, profiles, and GPU and compute instances."""

    @c_function
    def nvmlDeviceGetMigMode(self, device: Argument, current: Argument, pending: Argument) -> None:
        """Tell whether MIG is on, and whether it will be after a reset."""
        with self._mig(device) as gpu:
            fill(current, gpu.mig.enabled)
            fill(pending, gpu.mig.pending)

    @c_function
    def nvmlDeviceSetMigMode(self, device: Argument, mode: Argument, status: Argument) -> None:
        """Turn MIG on or off; the status tells why that has to wait."""
        with self._mig(device) as gpu:
            if number(mode) not in (0, 1):
                raise Return(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            fill(status, cutting.set_mode(gpu, enabled=bool(number(mode))))

    @c_function
    def nvmlDeviceGetMaxMigDeviceCount(self, device: Argument, count: Argument) -> None:
        """Count the MIG devices that there could be; none where MIG is off."""
        with self._gpu(device) as gpu:
            most = max((profile.most for profile in gpu.mig.profiles), default=0)
            fill(count, most if gpu.mig.enabled else 0)

    @c_function
    def nvmlDeviceGetMigDeviceHandleByIndex(
        self, device: Argument, index: Argument, handle: Argument
    ) -> None:
        """Give the handle of a MIG device."""
        with self._gpu(device) as gpu:
            found = list(gpu.mig.computes)
            if number(index) >= len(found):
                raise Return(pynvml.NVML_ERROR_NOT_FOUND)
            fill_pointer(handle, found[number(index)][1].device)

    @c_function
    def nvmlDeviceIsMigDeviceHandle(self, device: Argument, answer: Argument) -> None:
        """Tell whether a handle is a MIG device's."""
        with self._ready():
            fill(answer, self._compute_at(address_in(device)) is not None)

    @c_function
    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
        self, device: Argument, handle: Argument
    ) -> None:
        """Give the GPU of a MIG device."""
        with self._mig_device(device) as (gpu, _, _):
            fill_pointer(handle, gpu.handle)

    @c_function
    def nvmlDeviceGetGpuInstanceId(self, device: Argument, answer: Argument) -> None:
        """Give the number of a MIG device's GPU instance."""
        with self._mig_device(device) as (_, instance, _):
            fill(answer, instance.number)

    @c_function
    def nvmlDeviceGetComputeInstanceId(self, device: Argument, answer: Argument) -> None:
        """Give the number of a MIG device's compute instance."""
        with self._mig_device(device) as (_, _, compute):
            fill(answer, compute.number)

    @c_function
    def nvmlDeviceGetGpuInstanceProfileInfo(
        self, device: Argument, kind: Argument, info: Argument
    ) -> None:
        """Describe a kind of GPU instance, whether MIG is on or not."""
        with self._mig(device) as gpu:
            _describe(_of_kind(gpu, number(kind)), target(info))

    @c_function
    def nvmlDeviceGetGpuInstanceProfileInfoV(
        self, device: Argument, kind: Argument, info: Argument
    ) -> None:
        """Describe it in the newer structure."""
        with self._mig(device) as gpu:
            if target(info).version != pynvml.nvmlGpuInstanceProfileInfo_v2:
                raise Return(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
            found = _of_kind(gpu, number(kind))
            _describe(found, target(info))
            target(info).name = f"MIG {gpu.board.mig_name(found)}".encode()

    @c_function
    def nvmlDeviceGetGpuInstanceRemainingCapacity(
        self, device: Argument, profile: Argument, count: Argument
    ) -> None:
        """Count how many more GPU instances of a profile there is room for."""
        with self._mig(device, enabled=True) as gpu:
            fill(count, cutting.remaining(gpu, cutting.profile_of(gpu, number(profile))))

    @c_function
    def nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        self, device: Argument, profile: Argument, placements: Argument, count: Argument
    ) -> None:
        """List where a profile may be, taken or not, whether MIG is on or not."""
        with self._mig(device) as gpu:
            found = cutting.profile_of(gpu, number(profile))
            target(count).value = len(found.starts)
            for place, start in zip(placements or (), found.starts, strict=False):
                place.start, place.size = start, found.size

    @c_function
    def nvmlDeviceCreateGpuInstanceWithPlacement(
        self, device: Argument, profile: Argument, placement: Argument, made: Argument
    ) -> None:
        """Make a GPU instance at a place."""
        with self._mig(device) as gpu:
            place = target(placement)
            instance = cutting.make(self.node, gpu, number(profile), place.start, place.size)
            fill_pointer(made, instance.handle)

    @c_function
    def nvmlGpuInstanceDestroy(self, instance: Argument) -> None:
        """Destroy a GPU instance."""
        with self._instance(instance) as (gpu, found):
            cutting.end(gpu, found)

    @c_function
    def nvmlDeviceGetGpuInstances(
        self, device: Argument, profile: Argument, instances: Argument, count: Argument
    ) -> None:
        """List the GPU instances of a profile."""
        with self._mig(device, enabled=True) as gpu:
            wanted = cutting.profile_of(gpu, number(profile))
            found = [it for it in gpu.mig.present.values() if it.profile is wanted]
            _list_handles([it.handle for it in found], instances, count)

    @c_function
    def nvmlDeviceGetGpuInstanceById(
        self, device: Argument, wanted: Argument, handle: Argument
    ) -> None:
        """Give the handle of a GPU instance by its number."""
        with self._mig(device, enabled=True) as gpu:
            found = gpu.mig.present.get(number(wanted))
            if found is None:
                raise Return(pynvml.NVML_ERROR_NOT_FOUND)
            fill_pointer(handle, found.handle)

    @c_function
    def nvmlGpuInstanceGetInfo(self, instance: Argument, info: Argument) -> None:
        """Describe a GPU instance."""
        with self._instance(instance) as (gpu, found):
            answer = target(info)
            answer.device = ctypes.cast(gpu.handle, type(answer.device))
            answer.id, answer.profileId = found.number, found.profile.number
            answer.placement.start, answer.placement.size = found.start, found.profile.size

    @c_function
    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, instance: Argument, kind: Argument, _engines: Argument, info: Argument
    ) -> None:
        """Describe a kind of compute instance; its number is that of the kind."""
        with self._instance(instance) as (_, found):
            slices = cutting.COMPUTES.get(number(kind), 0)
            self._supported(0 < slices <= found.profile.slices)

            answer, whole = target(info), found.profile
            answer.id, answer.sliceCount = number(kind), slices
            answer.instanceCount = whole.slices // slices
            answer.multiprocessorCount = whole.processors * slices // whole.slices
            answer.sharedCopyEngineCount = whole.copies
            answer.sharedDecoderCount, answer.sharedEncoderCount = whole.engines[:2]
            answer.sharedJpegCount, answer.sharedOfaCount = whole.engines[2:]

    @c_function
    def nvmlGpuInstanceCreateComputeInstance(
        self, instance: Argument, profile: Argument, made: Argument
    ) -> None:
        """Make a compute instance."""
        with self._instance(instance) as (gpu, found):
            compute = cutting.make_compute(self.node, gpu, found, number(profile))
            fill_pointer(made, compute.handle)

    @c_function
    def nvmlComputeInstanceDestroy(self, compute: Argument) -> None:
        """Destroy a compute instance."""
        with self._compute(compute) as (gpu, instance, found):
            cutting.end_compute(gpu, instance, found)

    @c_function
    def nvmlGpuInstanceGetComputeInstances(
        self, instance: Argument, profile: Argument, computes: Argument, count: Argument
    ) -> None:
        """List the compute instances of a kind in a GPU instance."""
        with self._instance(instance) as (_, found):
            handles = [it.handle for it in found.computes.values() if it.kind == number(profile)]
            _list_handles(handles, computes, count)

    @c_function
    def nvmlComputeInstanceGetInfo_v2(self, compute: Argument, info: Argument) -> None:
        """Describe a compute instance."""
        with self._compute(compute) as (gpu, instance, found):
            answer = target(info)
            answer.device = ctypes.cast(gpu.handle, type(answer.device))
            answer.gpuInstance = ctypes.cast(instance.handle, type(answer.gpuInstance))
            answer.id, answer.profileId = found.number, found.kind
            answer.placement.start, answer.placement.size = found.start, found.slices

    @contextmanager
    def _mig(self, device: Argument, *, enabled: bool = False) -> Iterator[SimGpu]:
        """Hold the node still and give a GPU that has MIG."""
        with self._gpu(device) as gpu, _refusals():
            self._supported(gpu.board.mig)
            if enabled:
                cutting.check_enabled(gpu)
            yield gpu

    @contextmanager
    def _mig_device(self, handle: Argument) -> Iterator[tuple[SimGpu, SimInstance, SimCompute]]:
        with self._ready():
            found = self._compute_at(address_in(handle))
            if found is None:
                raise Return(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            self._answering(found[0])
            yield found

    @contextmanager
    def _instance(self, handle: Argument) -> Iterator[tuple[SimGpu, SimInstance]]:
        with self._ready(), _refusals():
            for gpu in self.node.gpus:
                for instance in gpu.mig.present.values():
                    if instance.handle == address_in(handle):
                        yield self._answering(gpu), instance
                        return
            raise Return(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    @contextmanager
    def _compute(self, handle: Argument) -> Iterator[tuple[SimGpu, SimInstance, SimCompute]]:
        with self._ready(), _refusals():
            for gpu in self.node.gpus:
                for instance, compute in gpu.mig.computes:
                    if compute.handle == address_in(handle):
                        yield self._answering(gpu), instance, compute
                        return
            raise Return(pynvml.NVML_ERROR_INVALID_ARGUMENT)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except cutting.Refusal as refusal:
        raise Return(refusal.code) from None


def _of_kind(gpu: SimGpu, kind: int) -> SimProfile:
    if not 0 <= kind < pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT:
        raise Return(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    for profile in gpu.mig.profiles:
        if profile.kind == kind:
            return profile
    raise Return(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _describe(profile: SimProfile, info: Any) -> None:  # noqa: ANN401 - a structure of ctypes
    info.id, info.isP2pSupported = profile.number, 0
    info.sliceCount, info.instanceCount = profile.slices, profile.most
    info.multiprocessorCount, info.copyEngineCount = profile.processors, profile.copies
    info.decoderCount, info.encoderCount, info.jpegCount, info.ofaCount = profile.engines
    info.memorySizeMB = profile.memory


def _list_handles(handles: Sequence[int], array: Argument, count: Argument) -> None:
    """Fill an array of pointers; NVML's has room for as many as there can be."""
    target(count).value = len(handles)
    for place, handle in enumerate(handles):
        array[place] = ctypes.cast(handle, array._type_)
