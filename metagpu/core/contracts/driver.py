"""The contract of NVML: values, protocols by role, and reads of several GPUs.

`None` in a value means that the driver does not report it (NVML's NOT_SUPPORTED), never zero.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import IntEnum
from typing import Protocol

import anyio
import msgspec

from metagpu.core.contracts.sensors import DetailedSensors, GpuSensors, InstanceSensors
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import Gpu, GpuId, Topology
from metagpu.core.model.mig import MigInstance, MigMode, Placement


class RecoveryAction(IntEnum):
    """The recovery that a GPU needs, in the numbers of NVML.

    The field is `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
    """

    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7

    def __str__(self) -> str:
        """Return the words of a person: `GPU reset`, `node reboot`."""
        return self.name.replace("_", " ").lower().replace("gpu", "GPU").replace("imex", "IMEX")


class RemappedRows(msgspec.Struct, frozen=True):
    """Memory rows that spare ones replaced, and whether others wait for a reset."""

    correctable: int
    uncorrectable: int
    pending: bool
    failed: bool


class GpuCondition(msgspec.Struct, frozen=True):
    """The present condition of a GPU; a GPU that answers has passed the device check.

    Attributes:
        memory_used: bytes in use by processes and the driver together; `None` for a GPU whose
            memory NVML does not know.
        recovery_action: the recovery that the GPU needs; `None` on drivers without that field.
        ecc: whether error correction is on.
        ecc_uncorrected: uncorrected memory errors since the driver was loaded.
        mig_enabled: whether MIG mode is on.
        mig_pending: whether MIG mode will be on after a reset.
    """

    memory_used: int | None
    recovery_action: RecoveryAction | None = None
    ecc: bool | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: RemappedRows | None = None
    mig_enabled: bool | None = None
    mig_pending: bool | None = None


class ComputeMode(IntEnum):
    """The compute mode of a GPU, in NVML's numbers (`nvmlComputeMode_t`)."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3

    def __str__(self) -> str:
        """Return the name that `nvidia-smi` uses, in lower case: `exclusive process`."""
        return self.name.replace("_", " ").lower()


class GpuProcess(msgspec.Struct, frozen=True):
    """A process with memory on a GPU; `memory` in bytes, `None` when unknown."""

    pid: int
    memory: int | None
    gpu_instance: int | None = None
    compute_instance: int | None = None


class GpuActivity(msgspec.Struct, frozen=True):
    """The processes on a GPU, and its sensors.

    Attributes:
        processes: those with memory on the GPU; none where nobody has asked for them.
        sensors: `None` where nobody has asked for them.
    """

    processes: Sequence[GpuProcess]
    sensors: GpuSensors | None = None


class Xid(msgspec.Struct, frozen=True):
    """An XID error; the instance ids are set for an error inside a MIG instance.

    `gpu` is `None` when NVML does not know the GPU.
    """

    gpu: GpuId | None
    code: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


class EccError(msgspec.Struct, frozen=True):
    """Memory errors; `double_bit` errors were not corrected."""

    gpu: GpuId | None
    double_bit: bool


class RecoveryActionChanged(msgspec.Struct, frozen=True):
    """A changed recovery action of a GPU; its `GpuCondition` has the new one."""

    gpu: GpuId | None


class GpuUnavailable(msgspec.Struct, frozen=True):
    """A GPU that does not answer, as NVML reports; read its `GpuCondition`."""

    gpu: GpuId | None


DriverEvent = Xid | EccError | RecoveryActionChanged | GpuUnavailable


class UnreadableGpu(msgspec.Struct, frozen=True):
    """A GPU that NVML counts but cannot describe, apart from its index.

    `gpu` is the GPU that was read at this index before, `None` when there was none.
    """

    index: int
    reason: str
    gpu: GpuId | None = None


class Survey(msgspec.Struct, frozen=True):
    """All GPUs of the node that could be read, by index, and those that could not.

    `topology` is read once for each set of GPUs, without the pairs that NVML knows nothing of.
    """

    gpus: tuple[Gpu, ...]
    unreadable: tuple[UnreadableGpu, ...] = ()
    driver_version: str = ""
    cuda_version: tuple[int, int] | None = None
    topology: Topology = msgspec.field(default_factory=Topology)


class MigUsage(msgspec.Struct, frozen=True):
    """The memory of a MIG device, in bytes, and its processes."""

    memory: int
    memory_used: int
    processes: tuple[GpuProcess, ...] = ()


class MigDriver(Protocol):
    """The MIG calls of NVML, with the errors of `Driver`.

    The calls of one GPU run one after the other: a creation that takes seconds delays the other
    calls for that GPU.
    """

    async def mode(self, gpu: GpuId) -> MigMode | None:
        """Read the MIG mode; `None` for a GPU without MIG."""
        ...

    async def set_mode(self, gpu: GpuId, *, enabled: bool) -> MigMode:
        """Turn MIG on or off, as far as possible without a reset; return the new mode.

        Raises:
            Unsupported: if the GPU has no MIG.
        """
        ...

    async def instances(self, gpu: GpuId) -> Sequence[MigInstance]:
        """List all instances of a GPU, those of other programs too; none while MIG is off."""
        ...

    async def sensors(self, gpu: GpuId) -> Sequence[InstanceSensors]:
        """Read the memory of the instances that have a MIG device; none while MIG is off."""
        ...

    async def create(
        self, gpu: GpuId, profile: int, placement: Placement, deadline: float
    ) -> MigInstance:
        """Create a GPU instance and one compute instance on all of it: both or neither.

        A call that missed its deadline may still succeed: `instances` shows it later.

        Args:
            gpu: a GPU in MIG mode.
            profile: the number of the profile on this GPU.
            placement: one of the profile's placements.
            deadline: seconds; NVML creates an instance more slowly than it answers a query.

        Raises:
            InsufficientResources: if another instance is there, or has the engines it needs.
            InUse: if the driver is busy with the GPU.
            Unsupported: if MIG is off, or the GPU has no such profile.
            DriverTimeout: at the deadline.
        """
        ...

    async def destroy(self, gpu: GpuId, instance: int) -> None:
        """Destroy a GPU instance with its contents; an instance that is gone is no error.

        Raises:
            InUse: while a program runs on it; its compute instances may be gone by then.
        """
        ...

    async def usage(self, gpu: GpuId, uuid: str) -> MigUsage:
        """Read memory and processes of one MIG device, by its uuid."""
        ...


class HealthDriver(Protocol):
    """A session of NVML, and the GPUs in it; errors are those of `Driver`."""

    def session(self) -> AbstractAsyncContextManager[None]:
        """Initialise NVML on entry and shut it down on exit.

        Raises:
            DriverUnavailable: if the library or the driver is missing; the message says which.
        """
        ...

    async def survey(self) -> Survey:
        """Read every GPU, and register for the events of new GPUs.

        The registration precedes the return: NVML drops events that no program has registered for.
        """
        ...

    async def condition(self, gpu: GpuId) -> GpuCondition:
        """Read the condition of one GPU: this is the device check."""
        ...

    async def events(self) -> Sequence[DriverEvent]:
        """Wait for events of any GPU, at most one second; return none if nothing happened."""
        ...

    async def renew_events(self) -> None:
        """Register for the events of every GPU again.

        A reset ends the registration of a GPU, and NVML does not report that. No event is lost or
        delivered twice meanwhile. A failure is logged, and shows in `unheard`.
        """
        ...

    @property
    def unheard(self) -> Mapping[GpuId, str]:
        """The GPUs whose XIDs NVML does not deliver now, and why; without lost GPUs."""
        ...

    @property
    def mig(self) -> MigDriver:
        """The MIG calls."""
        ...


class UsageDriver(Protocol):
    """The processes and sensors of GPUs, with the errors of `Driver`."""

    async def processes(self, gpu: GpuId) -> Sequence[GpuProcess]:
        """List the compute and graphics processes that have memory on one GPU."""
        ...

    async def free_memory(self, gpu: GpuId) -> int | None:
        """Read the free bytes of one GPU; `None` where the driver does not report them."""
        ...

    async def activity(
        self, gpu: GpuId, *, processes: bool = True, sensors: bool = False, costly: bool = True
    ) -> GpuActivity:
        """Read the processes of one GPU, and its sensors if wanted, in one job.

        Processes may be left out, and of the sensors the costly ones: energy and PCIe replays take
        longer than all others.
        """
        ...

    async def utilization(self, gpu: GpuId) -> Mapping[int, int] | None:
        """Read the recent shares of the multiprocessors of one GPU, in percent, by pid.

        A process that is missing was idle; `None` where the driver does not report it, as in MIG
        mode. It costs as much as all else that a scrape reads.
        """
        ...

    async def sensors(self, gpu: GpuId, *, costly: bool = True) -> DetailedSensors:
        """Read the sensors and error counters of one GPU, for monitoring.

        The costly ones may be left out, as in `activity`.
        """
        ...


class LimitDriver(Protocol):
    """The driver's own memory limits, with the errors of `Driver`."""

    async def limit_memory(self, gpu: GpuId, cgroup: str, limit: int | None) -> None:
        """Limit the GPU memory of all processes of a cgroup together, in bytes.

        The limit ends with the cgroup. Memory that the processes have already stays theirs.

        Args:
            gpu: a GPU that is not in MIG mode.
            cgroup: the folder of a cgroup of version 2.
            limit: bytes of this GPU's memory; `None` removes the limit.

        Raises:
            Unsupported: if this driver or GPU has no such limits.
            NotFound: if there is no such cgroup, or the kernel does not count GPU memory in it.
            DriverError: also if this process is not root's, or the limit has no effect; says which.
        """
        ...

    async def memory_limit(self, gpu: GpuId, cgroup: str) -> int | None:
        """Read the memory limit of a cgroup, from any program; `None` without one.

        Raises:
            Unsupported: as `limit_memory`, and by some drivers where no limit is set at all.
            DriverError: as `limit_memory`.
        """
        ...


class Driver(HealthDriver, UsageDriver, LimitDriver, Protocol):
    """NVML. Calls run in worker threads, each with a deadline.

    Every call may raise `DriverUnavailable` (leave the session and open a new one). Calls for one
    GPU may raise `GpuLost` or `DriverTimeout`, which concern that GPU alone, and `DriverError` for
    any other answer of NVML.
    """

    @property
    def unanswered_calls(self) -> Sequence[str]:
        """The calls that NVML did not answer before their deadline."""
        ...

    @property
    def has_threads(self) -> bool:
        """True while a thread is inside NVML; it keeps the process alive."""
        ...

    async def compute_mode(self, gpu: GpuId) -> ComputeMode | None:
        """Read the compute mode of a GPU; `None` when the driver does not report it."""
        ...

    async def set_compute_mode(self, gpu: GpuId, mode: ComputeMode) -> None:
        """Set the compute mode of a GPU.

        Raises:
            DriverError: also if this process is not root's, or the GPU cannot; says which.
        """
        ...


async def read_instances(
    driver: MigDriver, gpus: Iterable[GpuId]
) -> Mapping[GpuId, Sequence[MigInstance] | DriverError]:
    """Read the instances of each GPU, or the error that the driver has for it.

    All GPUs are asked at once: those that hang cost one deadline together, and delay no answer of
    another. A cancelled caller leaves at once.
    """
    gpus = tuple(gpus)
    answers: dict[GpuId, Sequence[MigInstance] | DriverError] = {}

    async def read(gpu: GpuId) -> None:
        try:
            answers[gpu] = await driver.instances(gpu)
        except DriverError as error:
            answers[gpu] = error

    async with anyio.create_task_group() as group:
        for gpu in gpus:
            group.start_soon(read, gpu)
    return {gpu: answers[gpu] for gpu in gpus}
