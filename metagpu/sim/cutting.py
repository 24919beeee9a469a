"""What the driver does when it is told to cut a simulated GPU by MIG, and when it refuses.

The caller holds `SimNode.changed`.
"""

import time
import uuid
from typing import Final

import pynvml

from metagpu.sim.gpu import SimGpu
from metagpu.sim.instances import SimCompute, SimInstance
from metagpu.sim.mig_boards import SimProfile
from metagpu.sim.node import SimNode
from metagpu.sim.texts import error_text

_UUIDS: Final = uuid.UUID("6d657461-6770-7500-9000-000000000000")
_HANDLES: Final = 0x7F5D_0000_0000

COMPUTES: Final = {
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE: 1,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE: 2,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE: 3,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_4_SLICE: 4,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE: 7,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1: 1,
}
"""How many compute slices each kind of compute instance has."""


class Refusal(Exception):
    """Raised when the driver refuses, with NVML's code."""

    def __init__(self, code: int) -> None:
        super().__init__(error_text(code))
        self.code = code


def set_mode(gpu: SimGpu, *, enabled: bool) -> int:
    """Turn MIG on or off; give NVML's status of the activation."""
    mig = gpu.mig
    mig.pending = enabled
    if mig.enabled == enabled:
        return int(pynvml.NVML_SUCCESS)
    if gpu.processes or mig.present:
        return int(pynvml.NVML_ERROR_IN_USE)
    if not gpu.board.mig_at_once:
        return int(pynvml.NVML_ERROR_RESET_REQUIRED)

    mig.enabled = enabled
    return int(pynvml.NVML_SUCCESS)


def profile_of(gpu: SimGpu, number: int) -> SimProfile:
    """Find a profile by its number on this board."""
    for profile in gpu.mig.profiles:
        if profile.number == number:
            return profile
    raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)


def check_enabled(gpu: SimGpu) -> None:
    """Refuse what needs MIG mode."""
    if not gpu.mig.enabled:
        raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)


def remaining(gpu: SimGpu, profile: SimProfile) -> int:
    """Count how many more instances of a profile there is room for."""
    places = sum(gpu.mig.free(profile, start) for start in profile.starts)

    return min(places, gpu.mig.engines_for(profile))


def make(node: SimNode, gpu: SimGpu, number: int, start: int, size: int) -> SimInstance:
    """Make a GPU instance; takes as long as `Making` says, and lets others in meanwhile."""
    check_enabled(gpu)
    profile, making = profile_of(gpu, number), gpu.mig.making
    if start not in profile.starts or size != profile.size:
        raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    making.begun += 1
    _take(node, making.takes)
    if gpu.failure is not None:
        raise Refusal(gpu.failure)
    _check_idle(gpu)
    if making.failures > 0:
        making.failures -= 1
        raise Refusal(pynvml.NVML_ERROR_UNKNOWN)
    if not gpu.mig.free(profile, start):
        raise Refusal(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)

    made = SimInstance(_number(gpu, profile, start), profile, start, _handle(node))
    gpu.mig.present[made.number] = made
    node.changed.notify_all()
    return made


def make_compute(node: SimNode, gpu: SimGpu, instance: SimInstance, kind: int) -> SimCompute:
    """Make a compute instance at the first slices of a GPU instance that are free.

    Takes as long as `Making` says, and lets others in meanwhile.
    """
    slices, making = COMPUTES.get(kind, 0), gpu.mig.making
    if not 0 < slices <= instance.profile.slices:
        raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
    _take(node, making.compute_takes)
    if gpu.mig.present.get(instance.number) is not instance:
        raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    if making.compute_failures > 0:
        making.compute_failures -= 1
        raise Refusal(pynvml.NVML_ERROR_UNKNOWN)

    used = sum(compute.slices for compute in instance.computes.values())
    if used + slices > instance.profile.slices:
        raise Refusal(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)

    number = next(n for n in range(len(instance.computes) + 1) if n not in instance.computes)
    handle, device = _handle(node), _handle(node)
    name = uuid.uuid5(_UUIDS, f"{gpu.id}/{device}")
    made = SimCompute(number, kind, slices, used, f"MIG-{name}", handle, device)
    instance.computes[number] = made
    node.changed.notify_all()
    return made


def end_compute(gpu: SimGpu, instance: SimInstance, compute: SimCompute) -> None:
    """Destroy a compute instance that no process runs on."""
    _check_idle(gpu)
    if any(key[1:] == (instance.number, compute.number) for key in gpu.processes):
        raise Refusal(pynvml.NVML_ERROR_IN_USE)
    del instance.computes[compute.number]


def end(gpu: SimGpu, instance: SimInstance) -> None:
    """Destroy a GPU instance that has no compute instance any more."""
    _check_idle(gpu)
    if instance.computes or any(key[1] == instance.number for key in gpu.processes):
        raise Refusal(pynvml.NVML_ERROR_IN_USE)
    del gpu.mig.present[instance.number]


def _take(node: SimNode, seconds: float) -> None:
    """Let time pass, and others in."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        node.changed.wait(left)


def _check_idle(gpu: SimGpu) -> None:
    if gpu.mig.making.in_use_until > time.monotonic():
        raise Refusal(pynvml.NVML_ERROR_IN_USE)


def _number(gpu: SimGpu, profile: SimProfile, start: int) -> int:
    """Number an instance as drivers do: those of half the size begin where there is no larger one.

    On eight memory slices the whole is 0, halves are 1 and 2, quarters 3 to 6, eighths 7 to 14.
    """
    total = max(it.size for it in gpu.mig.profiles)

    return total // profile.size - 1 + start // profile.size


def _handle(node: SimNode) -> int:
    """Give an address that no other instance has or had."""
    node.handles += 1
    return _HANDLES + 0x10 * node.handles
