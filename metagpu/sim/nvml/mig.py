"""NVML's functions for MIG."""

# ruff: noqa: N802 - functions carry the names of NVML's own

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pynvml

from metagpu.sim.machine import mig_driver
from metagpu.sim.machine.gpu import SimGpu
from metagpu.sim.machine.mig_profiles import SimProfile
from metagpu.sim.machine.mig_state import SimComputeInstance, SimGpuInstance
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


class MigFunctions(SimLibraryBase):
    """MIG mode, profiles, GPU instances and compute instances."""

    @c_function
    def nvmlDeviceGetMigMode(self, device: Argument, current: Argument, pending: Argument) -> None:
        """Return whether MIG mode is on, and whether it will be after a reset."""
        with self._mig(device) as gpu:
            write_number(current, gpu.mig.enabled)
            write_number(pending, gpu.mig.pending)

    @c_function
    def nvmlDeviceSetMigMode(self, device: Argument, mode: Argument, status: Argument) -> None:
        """Turn MIG mode on or off; the status names what has to happen first."""
        with self._mig(device) as gpu:
            if read_number(mode) not in (0, 1):
                raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            write_number(status, mig_driver.set_mode(gpu, enabled=bool(read_number(mode))))

    @c_function
    def nvmlDeviceGetMaxMigDeviceCount(self, device: Argument, count: Argument) -> None:
        """Return the largest possible number of MIG devices; 0 with MIG mode off."""
        with self._gpu(device) as gpu:
            most = max((profile.max_count for profile in gpu.mig.profiles), default=0)
            write_number(count, most if gpu.mig.enabled else 0)

    @c_function
    def nvmlDeviceGetMigDeviceHandleByIndex(
        self, device: Argument, index: Argument, handle: Argument
    ) -> None:
        """Return the handle of a MIG device."""
        with self._gpu(device) as gpu:
            found = list(gpu.mig.compute_instances)
            if read_number(index) >= len(found):
                raise NvmlReturn(pynvml.NVML_ERROR_NOT_FOUND)
            write_pointer(handle, found[read_number(index)][1].device)

    @c_function
    def nvmlDeviceIsMigDeviceHandle(self, device: Argument, answer: Argument) -> None:
        """Return whether a handle is a MIG device's."""
        with self._ready():
            write_number(answer, self._compute_at(read_address(device)) is not None)

    @c_function
    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
        self, device: Argument, handle: Argument
    ) -> None:
        """Return the GPU of a MIG device."""
        with self._mig_device(device) as (gpu, _, _):
            write_pointer(handle, gpu.handle)

    @c_function
    def nvmlDeviceGetGpuInstanceId(self, device: Argument, answer: Argument) -> None:
        """Return the number of a MIG device's GPU instance."""
        with self._mig_device(device) as (_, instance, _):
            write_number(answer, instance.number)

    @c_function
    def nvmlDeviceGetComputeInstanceId(self, device: Argument, answer: Argument) -> None:
        """Return the number of a MIG device's compute instance."""
        with self._mig_device(device) as (_, _, compute):
            write_number(answer, compute.number)

    @c_function
    def nvmlDeviceGetGpuInstanceProfileInfo(
        self, device: Argument, kind: Argument, info: Argument
    ) -> None:
        """Return the properties of a GPU instance profile, with MIG mode on or off."""
        with self._mig(device) as gpu:
            _describe(_of_kind(gpu, read_number(kind)), dereference(info))

    @c_function
    def nvmlDeviceGetGpuInstanceProfileInfoV(
        self, device: Argument, kind: Argument, info: Argument
    ) -> None:
        """Return the properties of a profile in the newer structure."""
        with self._mig(device) as gpu:
            if dereference(info).version != pynvml.nvmlGpuInstanceProfileInfo_v2:
                raise NvmlReturn(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
            found = _of_kind(gpu, read_number(kind))
            _describe(found, dereference(info))
            dereference(info).name = f"MIG {gpu.model.profile_name(found)}".encode()

    @c_function
    def nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        self, device: Argument, profile: Argument, placements: Argument, count: Argument
    ) -> None:
        """Return all placements of a profile, occupied ones too, with MIG mode on or off."""
        with self._mig(device) as gpu:
            found = mig_driver.find_profile(gpu, read_number(profile))
            dereference(count).value = len(found.starts)
            for place, start in zip(placements or (), found.starts, strict=False):
                place.start, place.size = start, found.memory_slices

    @c_function
    def nvmlDeviceCreateGpuInstanceWithPlacement(
        self, device: Argument, profile: Argument, placement: Argument, made: Argument
    ) -> None:
        """Create a GPU instance at a placement."""
        with self._mig(device) as gpu:
            place = dereference(placement)
            instance = mig_driver.create_gpu_instance(
                self.node, gpu, read_number(profile), place.start, place.size
            )
            write_pointer(made, instance.handle)

    @c_function
    def nvmlGpuInstanceDestroy(self, instance: Argument) -> None:
        """Destroy a GPU instance."""
        with self._instance(instance) as (gpu, found):
            mig_driver.destroy_gpu_instance(gpu, found)

    @c_function
    def nvmlDeviceGetGpuInstances(
        self, device: Argument, profile: Argument, instances: Argument, count: Argument
    ) -> None:
        """Return the GPU instances of a profile."""
        with self._mig(device, enabled=True) as gpu:
            wanted = mig_driver.find_profile(gpu, read_number(profile))
            found = [
                instance for instance in gpu.mig.instances.values() if instance.profile is wanted
            ]
            _list_handles([instance.handle for instance in found], instances, count)

    @c_function
    def nvmlDeviceGetGpuInstanceById(
        self, device: Argument, wanted: Argument, handle: Argument
    ) -> None:
        """Return the handle of a GPU instance by its ID."""
        with self._mig(device, enabled=True) as gpu:
            found = gpu.mig.instances.get(read_number(wanted))
            if found is None:
                raise NvmlReturn(pynvml.NVML_ERROR_NOT_FOUND)
            write_pointer(handle, found.handle)

    @c_function
    def nvmlGpuInstanceGetInfo(self, instance: Argument, info: Argument) -> None:
        """Return the properties of a GPU instance."""
        with self._instance(instance) as (gpu, found):
            answer = dereference(info)
            answer.device = ctypes.cast(gpu.handle, type(answer.device))
            answer.id, answer.profileId = found.number, found.profile.number
            answer.placement.start, answer.placement.size = found.start, found.profile.memory_slices

    @c_function
    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, instance: Argument, kind: Argument, _engines: Argument, info: Argument
    ) -> None:
        """Return the properties of a compute instance profile; its ID is that of the kind."""
        with self._instance(instance) as (_, found):
            slices = mig_driver.COMPUTE_SLICES.get(read_number(kind), 0)
            self._supported(0 < slices <= found.profile.compute_slices)

            answer, whole = dereference(info), found.profile
            answer.id, answer.sliceCount = read_number(kind), slices
            answer.instanceCount = whole.compute_slices // slices
            answer.multiprocessorCount = whole.multiprocessors * slices // whole.compute_slices
            answer.sharedCopyEngineCount = whole.copy_engines
            answer.sharedDecoderCount, answer.sharedEncoderCount = whole.engines[:2]
            answer.sharedJpegCount, answer.sharedOfaCount = whole.engines[2:]

    @c_function
    def nvmlGpuInstanceCreateComputeInstance(
        self, instance: Argument, profile: Argument, made: Argument
    ) -> None:
        """Create a compute instance."""
        with self._instance(instance) as (gpu, found):
            compute = mig_driver.create_compute_instance(
                self.node, gpu, found, read_number(profile)
            )
            write_pointer(made, compute.handle)

    @c_function
    def nvmlComputeInstanceDestroy(self, compute: Argument) -> None:
        """Destroy a compute instance."""
        with self._compute(compute) as (gpu, instance, found):
            mig_driver.destroy_compute_instance(gpu, instance, found)

    @c_function
    def nvmlGpuInstanceGetComputeInstances(
        self, instance: Argument, profile: Argument, computes: Argument, count: Argument
    ) -> None:
        """Return the compute instances of a kind in a GPU instance."""
        with self._instance(instance) as (_, found):
            handles = [
                compute_instance.handle
                for compute_instance in found.compute_instances.values()
                if compute_instance.kind == read_number(profile)
            ]
            _list_handles(handles, computes, count)

    @c_function
    def nvmlComputeInstanceGetInfo_v2(self, compute: Argument, info: Argument) -> None:
        """Return the properties of a compute instance."""
        with self._compute(compute) as (gpu, instance, found):
            answer = dereference(info)
            answer.device = ctypes.cast(gpu.handle, type(answer.device))
            answer.gpuInstance = ctypes.cast(instance.handle, type(answer.gpuInstance))
            answer.id, answer.profileId = found.number, found.kind
            answer.placement.start, answer.placement.size = found.start, found.slices

    @contextmanager
    def _mig(self, device: Argument, *, enabled: bool = False) -> Iterator[SimGpu]:
        """Hold the node's lock and yield a GPU that supports MIG."""
        with self._gpu(device) as gpu, _refusals():
            self._supported(gpu.model.has_mig)
            if enabled:
                mig_driver.check_enabled(gpu)
            yield gpu

    @contextmanager
    def _mig_device(
        self, handle: Argument
    ) -> Iterator[tuple[SimGpu, SimGpuInstance, SimComputeInstance]]:
        with self._ready():
            found = self._compute_at(read_address(handle))
            if found is None:
                raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            self._answering(found[0])
            yield found

    @contextmanager
    def _instance(self, handle: Argument) -> Iterator[tuple[SimGpu, SimGpuInstance]]:
        with self._ready(), _refusals():
            for gpu in self.node.gpus:
                for instance in gpu.mig.instances.values():
                    if instance.handle == read_address(handle):
                        yield self._answering(gpu), instance
                        return
            raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    @contextmanager
    def _compute(
        self, handle: Argument
    ) -> Iterator[tuple[SimGpu, SimGpuInstance, SimComputeInstance]]:
        with self._ready(), _refusals():
            for gpu in self.node.gpus:
                for instance, compute in gpu.mig.compute_instances:
                    if compute.handle == read_address(handle):
                        yield self._answering(gpu), instance, compute
                        return
            raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except mig_driver.MigDriverError as refusal:
        raise NvmlReturn(refusal.code) from None


def _of_kind(gpu: SimGpu, kind: int) -> SimProfile:
    if not 0 <= kind < pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT:
        raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    for profile in gpu.mig.profiles:
        if profile.kind == kind:
            return profile
    raise NvmlReturn(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _describe(profile: SimProfile, info: Any) -> None:  # noqa: ANN401 - a structure of ctypes
    info.id, info.isP2pSupported = profile.number, 0
    info.sliceCount, info.instanceCount = profile.compute_slices, profile.max_count
    info.multiprocessorCount, info.copyEngineCount = profile.multiprocessors, profile.copy_engines
    info.decoderCount, info.encoderCount, info.jpegCount, info.ofaCount = profile.engines
    info.memorySizeMB = profile.memory


def _list_handles(handles: Sequence[int], array: Argument, count: Argument) -> None:
    """Fill an array of pointers; NVML's has space for the largest possible number."""
    dereference(count).value = len(handles)
    for place, handle in enumerate(handles):
        array[place] = ctypes.cast(handle, array._type_)
