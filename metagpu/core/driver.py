"""What we need of NVML, as values and one Protocol.

`None` in a value means that the driver does not say (NVML's NOT_SUPPORTED): unknown, never zero.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import IntEnum
from typing import Protocol

import msgspec

from metagpu.core.gpu import Gpu, GpuId, Topology
from metagpu.core.mig import MigInstance, MigMode, Placement


class RecoveryAction(IntEnum):
    """What NVML says a GPU needs (`NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`), in NVML's numbers."""

    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7

    def __str__(self) -> str:
        """Say it as a person would: `GPU reset`, `node reboot`."""
        return self.name.replace("_", " ").lower().replace("gpu", "GPU").replace("imex", "IMEX")


class RemappedRows(msgspec.Struct, frozen=True):
    """Memory rows that were replaced by spare ones, and whether more are waiting for a reset."""

    correctable: int
    uncorrectable: int
    pending: bool
    failed: bool


class Condition(msgspec.Struct, frozen=True):
    """How a GPU is at this moment; a GPU that can answer this has passed the device check.

    Attributes:
        memory_used: bytes in use by processes and the driver together.
        recovery_action: what the GPU needs, `None` on drivers that do not report it.
        ecc: whether error correction is on.
        ecc_uncorrected: uncorrected memory errors since the driver was loaded.
        mig_enabled: whether MIG mode is on; `mig_pending` what it will be after a reset.
    """

    memory_used: int
    recovery_action: RecoveryAction | None = None
    ecc: bool | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: RemappedRows | None = None
    mig_enabled: bool | None = None
    mig_pending: bool | None = None


class ComputeMode(IntEnum):
    """Who may use a GPU for computing, in NVML's numbers (`nvmlComputeMode_t`)."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3

    def __str__(self) -> str:
        """Name it as `nvidia-smi` does, in lower case: `exclusive process`."""
        return self.name.replace("_", " ").lower()


class GpuProcess(msgspec.Struct, frozen=True):
    """A process with memory on a GPU; `memory` in bytes, `None` when the driver does not say."""

    pid: int
    memory: int | None
    gpu_instance: int | None = None
    compute_instance: int | None = None


class Xid(msgspec.Struct, frozen=True):
    """NVML reported an XID error; the instance ids are set when it happened inside MIG.

    `gpu` is `None` when NVML could not say which GPU it was.
    """

    gpu: GpuId | None
    code: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


class EccError(msgspec.Struct, frozen=True):
    """NVML reported memory errors: `double_bit` ones were not corrected."""

    gpu: GpuId | None
    double_bit: bool


class RecoveryActionChanged(msgspec.Struct, frozen=True):
    """NVML reported that what the GPU needs has changed; read its `Condition`."""

    gpu: GpuId | None


class GpuUnavailable(msgspec.Struct, frozen=True):
    """NVML reported that a GPU does not answer; read its `Condition`."""

    gpu: GpuId | None


DriverEvent = Xid | EccError | RecoveryActionChanged | GpuUnavailable


class Unreadable(msgspec.Struct, frozen=True):
    """A GPU that NVML counts but cannot describe; `index` is all that NVML says of it.

    `gpu` is the GPU that was read at this index before, `None` when there was none.
    """

    index: int
    reason: str
    gpu: GpuId | None = None


class Survey(msgspec.Struct, frozen=True):
    """All GPUs of the node that could be read, by index, and those that could not.

    `topology` is read once for each set of GPUs; a pair of which NVML says nothing is left out.
    """

    gpus: tuple[Gpu, ...]
    unreadable: tuple[Unreadable, ...] = ()
    driver_version: str = ""
    cuda_version: tuple[int, int] | None = None
    topology: Topology = msgspec.field(default_factory=Topology)


class MigUsage(msgspec.Struct, frozen=True):
    """What is on a MIG device: bytes of memory, and the processes."""

    memory: int
    memory_used: int
    processes: tuple[GpuProcess, ...] = ()


class MigDriver(Protocol):
    """What NVML does with MIG; calls, and what they raise, are as of `Driver`.

    One GPU's calls follow each other, in its lane: a creation that takes seconds delays what else
    is asked about that GPU.
    """

    async def mode(self, gpu: GpuId) -> MigMode | None:
        """Read whether MIG is on; `None` where there is no MIG."""
        ...

    async def set_mode(self, gpu: GpuId, *, enabled: bool) -> MigMode:
        """Turn MIG on or off, as far as the GPU can without a reset; tell what came of it.

        Raises:
            Unsupported: if there is no MIG on this GPU.
        """
        ...

    async def instances(self, gpu: GpuId) -> Sequence[MigInstance]:
        """List the instances of a GPU, whoever made them; none while MIG is off."""
        ...

    async def capacity(self, gpu: GpuId) -> Mapping[int, int]:
        """Count for each profile's number how many more instances of it there is room for."""
        ...

    async def create(
        self, gpu: GpuId, profile: int, placement: Placement, deadline: float
    ) -> MigInstance:
        """Make a GPU instance at a place and one compute instance on all of it: both or neither.

        A call that is late may still succeed: the list of instances tells, once the GPU answers.

        Args:
            gpu: which MIG is on.
            profile: the number of the profile on this board.
            placement: one of the profile's.
            deadline: seconds; making one takes NVML longer than answering a question.

        Raises:
            NoRoom: if another instance is there, or has the engines it needs.
            InUse: if the driver is busy with the GPU.
            Unsupported: if MIG is off, or the board has no such profile.
            DriverTimeout: at the deadline.
        """
        ...

    async def destroy(self, gpu: GpuId, instance: int) -> None:
        """Destroy a GPU instance and what is in it, by its number; one that is gone is no error.

        Raises:
            InUse: while a program runs on it; its compute instances may be gone by then.
        """
        ...

    async def usage(self, gpu: GpuId, uuid: str) -> MigUsage:
        """Read what is on one MIG device, by its uuid."""
        ...


class Driver(Protocol):
    """NVML as metagpu uses it. Calls run in worker threads, each with a deadline.

    Every call may raise `DriverUnavailable` (leave the session and open a new one); calls that
    name a GPU may raise `GpuLost` or `DriverTimeout`, which concern that GPU alone, and
    `DriverError` for anything else that NVML answers.
    """

    @property
    def overdue(self) -> Sequence[str]:
        """Name what NVML was asked and never answered; its threads keep the process alive."""
        ...

    @property
    def mig(self) -> MigDriver:
        """What NVML does with MIG."""
        ...

    def session(self) -> AbstractAsyncContextManager[None]:
        """Initialise NVML on entry and shut it down on exit.

        Raises:
            DriverUnavailable: if the library or the driver is missing; the message says which.
        """
        ...

    async def survey(self) -> Survey:
        """Read every GPU, and listen to the events of those not listened to yet.

        Listening starts before this returns, because NVML forgets events nobody listens to.
        """
        ...

    async def condition(self, gpu: GpuId) -> Condition:
        """Read how one GPU is now: this is the device check."""
        ...

    async def processes(self, gpu: GpuId) -> Sequence[GpuProcess]:
        """List the compute and graphics processes that have memory on one GPU."""
        ...

    async def compute_mode(self, gpu: GpuId) -> ComputeMode | None:
        """Read who may use a GPU for computing; `None` when the driver does not say."""
        ...

    async def set_compute_mode(self, gpu: GpuId, mode: ComputeMode) -> None:
        """Say who may use a GPU for computing.

        Raises:
            DriverError: also if this process is not root's, or the GPU cannot; says which.
        """
        ...

    async def limit_memory(self, gpu: GpuId, cgroup: str, limit: int | None) -> None:
        """Have the driver refuse all processes of a cgroup together more than so many bytes.

        It goes with the cgroup. What they have already stays theirs.

        Args:
            gpu: which is not in MIG mode.
            cgroup: its folder, of cgroup v2.
            limit: bytes of this GPU; `None` takes a limit away.

        Raises:
            Unsupported: if this driver or GPU knows no such limits.
            NotThere: if there is no such cgroup, or the kernel does not count GPU memory in it.
            DriverError: also if this process is not root's, or the limit has no effect; says which.
        """
        ...

    async def memory_limit(self, gpu: GpuId, cgroup: str) -> int | None:
        """Read what `limit_memory`, or somebody else, set for a cgroup; `None` for nothing.

        Raises:
            Unsupported: as `limit_memory`, and by some drivers where no limit is set at all.
            DriverError: as `limit_memory`.
        """
        ...

    async def utilisation(self, gpu: GpuId) -> Mapping[int, int] | None:
        """Tell how busy processes kept one GPU's processors of late, in percent, by their pids.

        A process that is not in it was idle; `None` where the driver does not say, as in MIG mode.
        """
        ...

    async def events(self) -> Sequence[DriverEvent]:
        """Wait for events of any GPU, at most one second; empty when nothing happened."""
        ...
