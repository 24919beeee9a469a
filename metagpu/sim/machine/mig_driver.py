"""The driver's part of MIG: create and destroy instances, or refuse.

The caller holds `SimNode.changed`. MIG modes and instances are kept in a file, as a driver keeps
them without a daemon.
"""

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec
import pynvml

from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.model.gpu import GpuId
from metagpu.sim.machine.error_texts import error_text
from metagpu.sim.machine.gpu import SimGpu
from metagpu.sim.machine.mig_profiles import SimProfile
from metagpu.sim.machine.mig_state import SimComputeInstance, SimGpuInstance
from metagpu.sim.machine.node import SimNode

_UUIDS: Final = uuid.UUID("6d657461-6770-7500-9000-000000000000")
_HANDLES: Final = 0x7F5D_0000_0000

COMPUTE_SLICES: Final = {
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE: 1,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE: 2,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE: 3,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_4_SLICE: 4,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE: 7,
    pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1: 1,
}
"""How many compute slices each kind of compute instance has."""


class MigDriverError(Exception):
    """Raised when the driver refuses a MIG call, with NVML's code."""

    def __init__(self, code: int) -> None:
        super().__init__(error_text(code))
        self.code = code


def set_mode(gpu: SimGpu, *, enabled: bool) -> int:
    """Turn MIG mode on or off; return NVML's status of the activation."""
    mig = gpu.mig
    mig.pending = enabled
    if mig.enabled == enabled:
        return int(pynvml.NVML_SUCCESS)
    if gpu.processes or mig.instances:
        return int(pynvml.NVML_ERROR_IN_USE)
    if not gpu.model.changes_mig_at_once:
        return int(pynvml.NVML_ERROR_RESET_REQUIRED)

    mig.enabled = enabled
    return int(pynvml.NVML_SUCCESS)


def find_profile(gpu: SimGpu, number: int) -> SimProfile:
    """Return the profile of this GPU with an ID.

    Raises:
        MigDriverError: the GPU has no such profile.
    """
    for profile in gpu.mig.profiles:
        if profile.number == number:
            return profile
    raise MigDriverError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def check_enabled(gpu: SimGpu) -> None:
    """Raise an error unless the GPU is in MIG mode.

    Raises:
        MigDriverError: MIG mode is off.
    """
    if not gpu.mig.enabled:
        raise MigDriverError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def create_gpu_instance(
    node: SimNode, gpu: SimGpu, number: int, start: int, size: int
) -> SimGpuInstance:
    """Create a GPU instance; other callers proceed while `SimProvisioning` delays it.

    Raises:
        MigDriverError: the instance does not fit, or the driver fails as configured.
    """
    check_enabled(gpu)
    profile, making = find_profile(gpu, number), gpu.mig.provisioning
    if start not in profile.starts or size != profile.memory_slices:
        raise MigDriverError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    making.requested += 1
    _take(node, lambda: making.duration)
    if gpu.failure is not None:
        raise MigDriverError(gpu.failure)
    _check_idle(gpu)
    fails = making.failures > 0
    making.failures -= fails
    if fails and not making.done:
        raise MigDriverError(pynvml.NVML_ERROR_UNKNOWN)
    if not gpu.mig.is_free(profile, start):
        raise MigDriverError(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)

    made = SimGpuInstance(_number(gpu, profile, start), profile, start, _handle(node))
    gpu.mig.instances[made.number] = made
    node.changed.notify_all()
    if fails:
        raise MigDriverError(pynvml.NVML_ERROR_UNKNOWN)
    return made


def create_compute_instance(
    node: SimNode, gpu: SimGpu, instance: SimGpuInstance, kind: int
) -> SimComputeInstance:
    """Create a compute instance in the first free slices of a GPU instance.

    Other callers proceed while `SimProvisioning` delays the creation.

    Raises:
        MigDriverError: the instance does not fit, or the driver fails as configured.
    """
    slices, making = COMPUTE_SLICES.get(kind, 0), gpu.mig.provisioning
    if not 0 < slices <= instance.profile.compute_slices:
        raise MigDriverError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    _take(node, lambda: making.compute_duration)
    if gpu.mig.instances.get(instance.number) is not instance:
        raise MigDriverError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    fails = making.compute_failures > 0
    making.compute_failures -= fails
    if fails and not making.done:
        raise MigDriverError(pynvml.NVML_ERROR_UNKNOWN)

    used = sum(compute.slices for compute in instance.compute_instances.values())
    if used + slices > instance.profile.compute_slices:
        raise MigDriverError(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)

    number = next(
        n for n in range(len(instance.compute_instances) + 1) if n not in instance.compute_instances
    )
    handle, device = _handle(node), _handle(node)
    # Handles begin again with a new driver: the place keeps the uuids of before a reboot apart.
    place = f"{instance.profile.memory_slices}@{instance.start}"
    name = uuid.uuid5(_UUIDS, f"{gpu.id}/{device}/{place}")
    made = SimComputeInstance(number, kind, slices, used, f"MIG-{name}", handle, device)
    instance.compute_instances[number] = made
    node.changed.notify_all()
    if fails:
        raise MigDriverError(pynvml.NVML_ERROR_UNKNOWN)
    return made


def destroy_compute_instance(
    gpu: SimGpu, instance: SimGpuInstance, compute: SimComputeInstance
) -> None:
    """Destroy a compute instance.

    Raises:
        MigDriverError: a process runs on the instance.
    """
    _check_idle(gpu)
    if any(key[1:] == (instance.number, compute.number) for key in gpu.processes):
        raise MigDriverError(pynvml.NVML_ERROR_IN_USE)
    del instance.compute_instances[compute.number]


def destroy_gpu_instance(gpu: SimGpu, instance: SimGpuInstance) -> None:
    """Destroy a GPU instance.

    Raises:
        MigDriverError: the instance has compute instances or processes, or the driver fails as
            configured.
    """
    _check_idle(gpu)
    if instance.compute_instances or any(key[1] == instance.number for key in gpu.processes):
        raise MigDriverError(pynvml.NVML_ERROR_IN_USE)
    removing = gpu.mig.provisioning
    fails = removing.removal_failures > 0
    removing.removal_failures -= fails
    if not fails or removing.done:
        del gpu.mig.instances[instance.number]
    if fails:
        raise MigDriverError(pynvml.NVML_ERROR_UNKNOWN)


def _take(node: SimNode, seconds: Callable[[], float]) -> None:
    """Wait for some seconds, which may change meanwhile, without the node's lock."""
    begin = time.monotonic()
    while (left := begin + seconds() - time.monotonic()) > 0:
        node.changed.wait(left)


def _check_idle(gpu: SimGpu) -> None:
    if gpu.mig.provisioning.in_use_until > time.monotonic():
        raise MigDriverError(pynvml.NVML_ERROR_IN_USE)


def _number(gpu: SimGpu, profile: SimProfile, start: int) -> int:
    """Return the ID of an instance, as drivers number them.

    The IDs of instances of half the size begin where those of the larger size end: on eight memory
    slices the whole is 0, halves are 1 and 2, quarters 3 to 6, eighths 7 to 14.
    """
    total = max(sim_profile.memory_slices for sim_profile in gpu.mig.profiles)

    return total // profile.memory_slices - 1 + start // profile.memory_slices


def _handle(node: SimNode) -> int:
    """Return an address that no other instance has or had."""
    node.handles_issued += 1
    return _HANDLES + 0x10 * node.handles_issued


_DRAFT: Final = ".new"


class SavedComputeInstance(msgspec.Struct, frozen=True):
    """A compute instance; `start` and `slices` are compute slices of its GPU instance."""

    number: int
    kind: int
    slices: int
    start: int
    uuid: str
    handle: int
    device: int


class SavedGpuInstance(msgspec.Struct, frozen=True):
    """A GPU instance: its ID, its profile's ID, and its first memory slice."""

    number: int
    profile: int
    start: int
    handle: int
    computes: tuple[SavedComputeInstance, ...]


class SavedGpu(msgspec.Struct, frozen=True):
    """MIG on one GPU: the mode now, the mode after a reset, and its instances."""

    enabled: bool
    pending: bool
    instances: tuple[SavedGpuInstance, ...]


class SavedNode(msgspec.Struct, frozen=True):
    """A node: the number of handles issued, and its GPUs by UUID."""

    handles: int
    gpus: dict[GpuId, SavedGpu]


class _SavingCondition(threading.Condition):
    """A node's lock that reads the state file, and writes it before each release.

    So the file has every change that NVML has answered, however the daemon ends, and two daemons
    have one driver. They do not lock each other out: one of them at a time changes instances.
    """

    def __init__(self, node: SimNode, file: Path) -> None:
        super().__init__()
        self._node = node
        self._file = file
        self._written = b""

    def __enter__(self) -> bool:
        """Take the lock, then read the changes of another process."""
        taken = super().__enter__()
        try:
            self._catch_up()
        except BaseException:
            super().__exit__(None, None, None)
            raise
        return taken

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the changes, then release the lock."""
        try:
            self._keep()
        finally:
            super().__exit__(kind, error, trace)

    def _catch_up(self) -> None:
        try:
            text = self._file.read_bytes()
        except FileNotFoundError:  # removed beside the daemon: this node goes on as it is
            return
        if self._written and text != self._written:
            _restore(self._node, msgspec.json.decode(text, type=SavedNode))
            self._written = text

    def _keep(self) -> None:
        gpus = {gpu.id: _saved(gpu) for gpu in self._node.gpus if gpu.model.has_mig}
        text = msgspec.json.encode(SavedNode(self._node.handles_issued, gpus))
        if text != self._written:
            draft = self._file.with_name(self._file.name + _DRAFT)
            draft.write_bytes(text)
            draft.replace(self._file)
            self._written = text


def persist(node: SimNode, file: Path) -> None:
    """Restore a node from its state file, and keep the file up to date from now on.

    Call this before any other use of the node. A GPU that is not in the file stays as it is.

    Raises:
        ConfigError: the file cannot be parsed or written.
    """
    try:
        if file.exists():
            _restore(node, msgspec.json.decode(file.read_bytes(), type=SavedNode))
        node.changed = _SavingCondition(node, file)
        with node.changed:
            pass  # from the first moment on
    except (OSError, msgspec.MsgspecError, MigDriverError) as error:
        reason = getattr(error, "strerror", None) or error
        why = f"cannot keep a simulated driver's instances: {reason}"
        raise ConfigError(why, ConfigReason.UNREADABLE, file=str(file)) from error


def _restore(node: SimNode, kept: SavedNode) -> None:
    node.handles_issued = kept.handles

    for gpu in node.gpus:
        if (known := kept.gpus.get(gpu.id)) is None:
            continue
        gpu.mig.enabled, gpu.mig.pending = known.enabled, known.pending
        gpu.mig.instances = {
            instance.number: SimGpuInstance(
                instance.number,
                find_profile(gpu, instance.profile),
                instance.start,
                instance.handle,
                {
                    compute.number: SimComputeInstance(**msgspec.structs.asdict(compute))
                    for compute in instance.computes
                },
            )
            for instance in known.instances
        }


def _saved(gpu: SimGpu) -> SavedGpu:
    instances = tuple(
        SavedGpuInstance(
            instance.number,
            instance.profile.number,
            instance.start,
            instance.handle,
            tuple(
                SavedComputeInstance(
                    c.number, c.kind, c.slices, c.start, c.uuid, c.handle, c.device
                )
                for c in instance.compute_instances.values()
            ),
        )
        for instance in gpu.mig.instances.values()
    )
    return SavedGpu(gpu.mig.enabled, gpu.mig.pending, instances)
