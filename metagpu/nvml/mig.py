"""MIG on NVML: its calls with our values, and the `MigDriver`.

The functions block, and raise pynvml's errors. Every call reads the handles of instances again:
NVML may reuse the address of a destroyed instance for another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import byref, c_uint
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import anyio
import pynvml

from metagpu.core.contracts.driver import MigUsage
from metagpu.core.contracts.sensors import InstanceSensors
from metagpu.core.errors import DriverError, Unsupported
from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.mig import (
    ComputeInstance,
    MigEngines,
    MigInstance,
    MigMode,
    MigProfile,
    Placement,
    profile_name,
)
from metagpu.nvml.errors import (
    CONCLUSIVE,
    FAILURES,
    NOT_REPORTED,
    error_code,
    or_none,
)
from metagpu.nvml.queries import Handle, read_memory, read_processes
from metagpu.nvml.session_gpu import TIMING, NvmlTiming, SessionGpu
from metagpu.nvml.worker import ResultT

AnswerT = TypeVar("AnswerT")

_SUFFIXES: Final = {
    pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1: "+me",
    pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1: "+me",
    pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_GFX: "+gfx",
    pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE_GFX: "+gfx",
    pynvml.NVML_GPU_INSTANCE_PROFILE_3_SLICE_GFX: "+gfx",
    pynvml.NVML_GPU_INSTANCE_PROFILE_4_SLICE_GFX: "+gfx",
    pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_NO_ME: "-me",
    pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE_NO_ME: "-me",
    pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME: "+me.all",
    pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME: "+me.all",
}
"""Suffixes of profile names by NVML's profile index; double memory shows in the memory itself."""
_NO_SUCH: Final = NOT_REPORTED | {pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_FOUND}
_SHARED: Final = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
_REASONS: Final = {
    pynvml.NVML_ERROR_IN_USE: "programs use the GPU",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the GPU needs a reset first",
}


class _Kind(NamedTuple):
    """One GPU instance profile of NVML; `most` is the number on an empty GPU."""

    suffix: str
    number: int
    slices: int
    memory: int
    most: int
    multiprocessors: int
    engines: MigEngines


def read_profiles(handle: Handle) -> tuple[MigProfile, ...]:
    """List a GPU's MIG profiles, whether MIG is on or not."""
    memory = read_memory(handle)
    if memory is None:
        return ()  # profiles are named after their part of it

    return tuple(
        MigProfile(
            profile_name(kind.slices, kind.memory, memory.total, kind.suffix),
            kind.number,
            kind.slices,
            kind.memory,
            kind.most,
            tuple(sorted(_placements(handle, kind))),
            kind.multiprocessors,
            kind.engines,
        )
        for kind in _kinds(handle)
    )


def read_mode(handle: Handle) -> MigMode | None:
    """Read the MIG mode; `None` on a GPU without MIG."""
    mode = or_none(pynvml.nvmlDeviceGetMigMode, handle)
    return None if mode is None else MigMode(bool(mode[0]), bool(mode[1]))


def set_mode(handle: Handle, *, enabled: bool) -> MigMode:
    """Turn MIG on or off; NVML may defer that to the next reset."""
    status = pynvml.nvmlDeviceSetMigMode(handle, int(enabled))

    now, pending = map(bool, pynvml.nvmlDeviceGetMigMode(handle))
    if now == enabled:
        return MigMode(now, pending)
    unknown = f"NVML says: {pynvml.NVMLError(status)}" if status else "it waits for a reset"
    return MigMode(now, pending, _REASONS.get(status, unknown))


def _is_enabled(handle: Handle) -> bool:
    return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])


def list_instances(handle: Handle) -> tuple[MigInstance, ...]:
    """List the GPU instances, ordered by number; none while MIG is off."""
    mode = or_none(pynvml.nvmlDeviceGetMigMode, handle)
    if not mode or not mode[0]:
        return ()

    uuids = _uuids(handle)
    found = (
        _describe(gpu_instance, uuids)
        for kind in _kinds(handle)
        for gpu_instance in _gpu_instances(handle, kind)
    )
    return tuple(sorted(found, key=lambda instance: instance.number))


def create_instance(handle: Handle, profile: int, placement: Placement) -> MigInstance:
    """Create a GPU instance and one compute instance on all of it: both or neither."""
    place = pynvml.c_nvmlGpuInstancePlacement_t(placement.start, placement.size)
    # By reference: ctypes would pass the structure itself, and NVML needs its address.
    created = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile, byref(place))

    try:
        number = _whole_compute_profile(created, _slices(handle, profile))
        pynvml.nvmlGpuInstanceCreateComputeInstance(created, number)
        return _with_uuids(_describe(created, _uuids(handle)))
    except BaseException as failure:
        try:
            _destroy(created)
        except FAILURES as stays:
            if error_code(stays) in CONCLUSIVE:
                raise failure from None
            # Never as a lack of resources, which means that nothing was created.
            text = f"{failure}; the GPU instance is left over, as its removal failed: {stays}"
            raise DriverError(text) from failure
        raise


def destroy_instance(handle: Handle, number: int) -> None:
    """Destroy a GPU instance and its compute instances; a missing one is no error."""
    try:
        found = pynvml.nvmlDeviceGetGpuInstanceById(handle, number)
    except FAILURES as failure:
        # No other code says that it is gone: its slices would be offered under its programs.
        if error_code(failure) == pynvml.NVML_ERROR_NOT_FOUND or not _is_enabled(handle):
            return
        raise
    _destroy(found)


def read_usage(uuid: str) -> MigUsage:
    """Read the memory and processes of a MIG device."""
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    memory = read_memory(handle)
    if memory is None:
        raise Unsupported(f"NVML reports no memory of the MIG device {uuid}")

    return MigUsage(memory.total, memory.used, tuple(read_processes(handle)))


def _kinds(handle: Handle) -> Iterator[_Kind]:
    for kind in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = _profile_info(handle, kind)
        except FAILURES as failure:
            # A library that does not know a profile may call it an invalid argument.
            if error_code(failure) in _NO_SUCH:
                continue
            raise
        yield _Kind(
            _SUFFIXES.get(kind, ""),
            int(info.id),
            int(info.sliceCount),
            int(info.memorySizeMB) * MIB,
            int(info.instanceCount),
            int(info.multiprocessorCount),
            MigEngines(
                int(info.copyEngineCount),
                int(info.decoderCount),
                int(info.encoderCount),
                int(info.jpegCount),
                int(info.ofaCount),
            ),
        )


def _profile_info(handle: Handle, kind: int) -> Any:  # noqa: ANN401 - pynvml ships no types
    """Read a profile by the newer function, or by the one of all libraries with MIG."""
    read = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    try:
        return read(handle, kind, version=2)
    except FAILURES as failure:
        if error_code(failure) != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        return read(handle, kind, version=1)


def _placements(handle: Handle, kind: _Kind) -> list[Placement]:
    count = c_uint(0)
    ask = pynvml.nvmlDeviceGetGpuInstancePossiblePlacements

    ask(handle, kind.number, None, byref(count))
    found = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    ask(handle, kind.number, found, byref(count))
    return [Placement(int(place.start), int(place.size)) for place in found[: count.value]]


def _gpu_instances(handle: Handle, kind: _Kind) -> list[Handle]:
    count = c_uint(0)
    found = (pynvml.c_nvmlGpuInstance_t * kind.most)()

    try:
        pynvml.nvmlDeviceGetGpuInstances(handle, kind.number, found, byref(count))
    except FAILURES as failure:
        if error_code(failure) in NOT_REPORTED:
            return []
        raise
    return list(found[: count.value])


def _slices(handle: Handle, profile: int) -> int:
    for kind in _kinds(handle):
        if kind.number == profile:
            return kind.slices
    raise Unsupported(f"this GPU has no MIG profile with the number {profile}")


def _whole_compute_profile(gpu_instance: Handle, slices: int) -> int:
    """Return the compute profile on all of a GPU instance: the plainer, where two do."""
    for _, info in _compute_kinds(gpu_instance):
        if info.sliceCount == slices:
            return int(info.id)
    raise DriverError(f"NVML has no compute instance of {slices} slices")


def _compute_kinds(gpu_instance: Handle) -> Iterator[tuple[int, Any]]:
    read = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo

    for kind in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            yield kind, read(gpu_instance, kind, _SHARED, version=1)
        except FAILURES as failure:
            if error_code(failure) not in _NO_SUCH:
                raise


def _compute_instances(gpu_instance: Handle) -> list[Handle]:
    handles: list[Handle] = []

    for _, info in _compute_kinds(gpu_instance):
        count = c_uint(0)
        found = (pynvml.c_nvmlComputeInstance_t * info.instanceCount)()
        pynvml.nvmlGpuInstanceGetComputeInstances(gpu_instance, info.id, found, byref(count))
        handles += found[: count.value]
    return handles


def _describe(gpu_instance: Handle, uuids: Mapping[tuple[int, int], str]) -> MigInstance:
    info = pynvml.nvmlGpuInstanceGetInfo(gpu_instance)
    within = [
        int(pynvml.nvmlComputeInstanceGetInfo(compute).id)
        for compute in _compute_instances(gpu_instance)
    ]

    return MigInstance(
        int(info.id),
        int(info.profileId),
        Placement(int(info.placement.start), int(info.placement.size)),
        tuple(ComputeInstance(id_, uuids.get((info.id, id_), "")) for id_ in sorted(within)),
    )


def _with_uuids(instance: MigInstance) -> MigInstance:
    """Return the instance, whose MIG devices all have uuids: containers need them.

    Raises:
        DriverError: a MIG device has no uuid.
    """
    if not all(compute.uuid for compute in instance.compute_instances):
        raise DriverError(f"NVML has no uuid for the MIG device of GPU instance {instance.number}")
    return instance


def _destroy(gpu_instance: Handle) -> None:
    for compute in _compute_instances(gpu_instance):
        pynvml.nvmlComputeInstanceDestroy(compute)
    pynvml.nvmlGpuInstanceDestroy(gpu_instance)


def _uuids(handle: Handle) -> Mapping[tuple[int, int], str]:
    """Return the uuids of MIG devices, by the numbers of GPU and compute instance."""

    def read(device: Handle) -> tuple[tuple[int, int], str]:
        gpu_instance = int(pynvml.nvmlDeviceGetGpuInstanceId(device))
        compute_instance = int(pynvml.nvmlDeviceGetComputeInstanceId(device))
        return (gpu_instance, compute_instance), pynvml.nvmlDeviceGetUUID(device)

    return dict(read_devices(handle, read))


def read_devices(handle: Handle, read: Callable[[Handle], AnswerT]) -> Iterator[AnswerT]:
    """Yield the answer of each MIG device of a GPU; none while MIG is off."""
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            answer = read(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except FAILURES as failure:
            # The indices have gaps, and another process may destroy a device meanwhile.
            if error_code(failure) in CONCLUSIVE or error_code(failure) not in _NO_SUCH:
                raise
        else:
            yield answer


def read_instance_sensors(handle: Handle) -> tuple[InstanceSensors, ...]:
    """Read the memory of a GPU's MIG instances; the devices of one instance share it."""
    mode = or_none(pynvml.nvmlDeviceGetMigMode, handle)
    if not mode or not mode[0]:
        return ()

    def read(device: Handle) -> InstanceSensors | None:
        number = int(pynvml.nvmlDeviceGetGpuInstanceId(device))
        instance = pynvml.nvmlDeviceGetGpuInstanceById(handle, number)
        profile = int(pynvml.nvmlGpuInstanceGetInfo(instance).profileId)
        if (memory := read_memory(device)) is None:
            return None
        used, free = memory.used - (memory.reserved or 0), memory.total - memory.used
        return InstanceSensors(number, profile, used, free, memory.reserved)

    found = {device.number: device for device in read_devices(handle, read) if device is not None}
    return tuple(found.values())


class NvmlMigDriver:
    """The `MigDriver` of an open session.

    Args:
        known: finds a GPU of the session; raises the errors of calls about the GPU.
        deadline: seconds that a call may take.
        timing: seconds of the calls that take longer.
    """

    def __init__(
        self,
        known: Callable[[GpuId], SessionGpu],
        deadline: float,
        timing: NvmlTiming = TIMING,
    ) -> None:
        self._known = known
        self._deadline = deadline
        self._timing = timing

    async def mode(self, gpu: GpuId) -> MigMode | None:
        """Read whether MIG is on."""
        known = self._known(gpu)
        return await known.worker.call(partial(read_mode, known.handle), self._deadline)

    async def set_mode(self, gpu: GpuId, *, enabled: bool) -> MigMode:
        """Turn MIG on or off, as far as the GPU can without a reset."""
        known = self._known(gpu)
        change = partial(set_mode, known.handle, enabled=enabled)
        known.needs_recovery = (
            True  # if NVML resets the GPU, it has to be registered for events again
        )
        return await self._finish(known, change, max(self._timing.mode_change, self._deadline))

    async def instances(self, gpu: GpuId) -> Sequence[MigInstance]:
        """List the instances of a GPU."""
        known = self._known(gpu)
        return await known.worker.call(partial(list_instances, known.handle), self._deadline)

    async def sensors(self, gpu: GpuId) -> Sequence[InstanceSensors]:
        """Read the memory of the instances that have a MIG device."""
        known = self._known(gpu)
        return await known.worker.call(partial(read_instance_sensors, known.handle), self._deadline)

    async def create(
        self, gpu: GpuId, profile: int, placement: Placement, deadline: float
    ) -> MigInstance:
        """Create a GPU instance and its compute instance: both or neither."""
        known = self._known(gpu)
        create = partial(create_instance, known.handle, profile, placement)
        return await self._finish(known, create, deadline)

    async def destroy(self, gpu: GpuId, instance: int) -> None:
        """Destroy a GPU instance and its compute instances."""
        known = self._known(gpu)
        destroy = partial(destroy_instance, known.handle, instance)
        await self._finish(known, destroy, self._deadline)

    async def usage(self, gpu: GpuId, uuid: str) -> MigUsage:
        """Read the memory and processes of one MIG device."""
        known = self._known(gpu)
        return await known.worker.call(partial(read_usage, uuid), self._deadline)

    async def _finish(
        self, known: SessionGpu, change: Callable[[], ResultT], deadline: float
    ) -> ResultT:
        """Make a change; a cancelled caller waits for it, so that none stays half done."""
        with anyio.CancelScope(shield=True):
            result = await known.worker.call(change, deadline)
        return result  # noqa: RET504 - a scope may leave its block, for all that mypy knows
