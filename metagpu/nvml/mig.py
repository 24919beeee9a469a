"""What NVML says and does about MIG on one GPU, as our values.

These functions block, and raise what pynvml does. Handles of instances are asked for anew in every
call: NVML may give the address of a dead one to another.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from ctypes import byref, c_uint
from typing import Any, Final, NamedTuple

import pynvml

from metagpu.core.driver import MigUsage
from metagpu.core.errors import DriverError, Unsupported
from metagpu.core.gpu import MIB
from metagpu.core.mig import (
    ComputeInstance,
    MigEngines,
    MigInstance,
    MigMode,
    MigProfile,
    Placement,
    profile_name,
)
from metagpu.nvml.codes import CONCLUSIVE, FAILURES, UNSAID, code_of, if_said
from metagpu.nvml.reading import Handle, read_memory, read_processes

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
"""What a kind of NVML's adds to the name; the double-memory kind tells itself by its memory."""
_NO_SUCH: Final = UNSAID | {pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_FOUND}
_SHARED: Final = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
_REASONS: Final = {
    pynvml.NVML_ERROR_IN_USE: "programs use the GPU",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the GPU needs a reset first",
}


class _Kind(NamedTuple):
    """A kind of instance as NVML lists it; `most` is how many an empty GPU has room for."""

    suffix: str
    number: int
    slices: int
    memory: int
    most: int
    multiprocessors: int
    engines: MigEngines


def read_profiles(handle: Handle) -> tuple[MigProfile, ...]:
    """List the kinds of instances a GPU can be cut into, whether MIG is on or not."""
    total = read_memory(handle).total

    return tuple(
        MigProfile(
            profile_name(kind.slices, kind.memory, total, kind.suffix),
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
    """Read whether MIG is on; `None` where there is no MIG."""
    mode = if_said(pynvml.nvmlDeviceGetMigMode, handle)
    return None if mode is None else MigMode(bool(mode[0]), bool(mode[1]))


def set_mode(handle: Handle, *, enabled: bool) -> MigMode:
    """Turn MIG on or off; NVML may leave that to the next reset."""
    status = pynvml.nvmlDeviceSetMigMode(handle, int(enabled))

    now, pending = map(bool, pynvml.nvmlDeviceGetMigMode(handle))
    if now == enabled:
        return MigMode(now, pending)
    unknown = f"NVML says: {pynvml.NVMLError(status)}" if status else "it waits for a reset"
    return MigMode(now, pending, _REASONS.get(status, unknown))


def list_instances(handle: Handle) -> tuple[MigInstance, ...]:
    """List the GPU instances by their numbers; none while MIG is off."""
    mode = if_said(pynvml.nvmlDeviceGetMigMode, handle)
    if not mode or not mode[0]:
        return ()

    uuids = _uuids(handle)
    found = (
        _describe(gpu_instance, uuids)
        for kind in _kinds(handle)
        for gpu_instance in _gpu_instances(handle, kind)
    )
    return tuple(sorted(found, key=lambda instance: instance.number))


def read_capacity(handle: Handle) -> Mapping[int, int]:
    """Count for each profile how many more there is room for."""
    return {
        kind.number: pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, kind.number)
        for kind in _kinds(handle)
    }


def create_instance(handle: Handle, profile: int, placement: Placement) -> MigInstance:
    """Make a GPU instance and one compute instance on all of it: both or neither."""
    place = pynvml.c_nvmlGpuInstancePlacement_t(placement.start, placement.size)
    # By reference: ctypes would pass the structure itself, and NVML wants its address.
    made = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile, byref(place))

    try:
        number = _whole_of(made, _slices(handle, profile))
        pynvml.nvmlGpuInstanceCreateComputeInstance(made, number)
        return _named(_describe(made, _uuids(handle)))
    except BaseException:
        with suppress(*FAILURES):  # what is left then is found in the list of instances
            _destroy(made)
        raise


def destroy_instance(handle: Handle, number: int) -> None:
    """Destroy a GPU instance and what is in it; one that is gone already is no error."""
    try:
        found = pynvml.nvmlDeviceGetGpuInstanceById(handle, number)
    except FAILURES as failure:
        if code_of(failure) in _NO_SUCH:
            return
        raise
    _destroy(found)


def read_usage(uuid: str) -> MigUsage:
    """Read what is on a MIG device."""
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    memory = read_memory(handle)

    return MigUsage(memory.total, memory.used, tuple(read_processes(handle)))


def _kinds(handle: Handle) -> Iterator[_Kind]:
    for kind in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = _profile_info(handle, kind)
        except FAILURES as failure:
            # A library that does not know a kind may call it an invalid argument.
            if code_of(failure) in _NO_SUCH:
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
    """Ask in the newer way, or in the one that every library with MIG has."""
    read = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    try:
        return read(handle, kind, version=2)
    except FAILURES as failure:
        if code_of(failure) != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
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
        if code_of(failure) in UNSAID:
            return []
        raise
    return list(found[: count.value])


def _slices(handle: Handle, profile: int) -> int:
    for kind in _kinds(handle):
        if kind.number == profile:
            return kind.slices
    raise Unsupported(f"the board has no MIG profile with the number {profile}")


def _whole_of(gpu_instance: Handle, slices: int) -> int:
    """Find the compute instance that takes all of a GPU instance; of two such, the plainer."""
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
            if code_of(failure) not in _NO_SUCH:
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


def _named(instance: MigInstance) -> MigInstance:
    """Give an instance that containers can be given: one whose MIG devices have uuids."""
    if not all(compute.uuid for compute in instance.computes):
        raise DriverError(f"NVML does not name the MIG device of GPU instance {instance.number}")
    return instance


def _destroy(gpu_instance: Handle) -> None:
    for compute in _compute_instances(gpu_instance):
        pynvml.nvmlComputeInstanceDestroy(compute)
    pynvml.nvmlGpuInstanceDestroy(gpu_instance)


def _uuids(handle: Handle) -> Mapping[tuple[int, int], str]:
    """Give the uuid of each MIG device, by the numbers of its GPU and compute instance."""
    found: dict[tuple[int, int], str] = {}

    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            key = (
                int(pynvml.nvmlDeviceGetGpuInstanceId(device)),
                int(pynvml.nvmlDeviceGetComputeInstanceId(device)),
            )
            found[key] = pynvml.nvmlDeviceGetUUID(device)
        except FAILURES as failure:
            # There are gaps between them, and one may be destroyed by others meanwhile.
            if code_of(failure) in CONCLUSIVE or code_of(failure) not in _NO_SUCH:
                raise
    return found
