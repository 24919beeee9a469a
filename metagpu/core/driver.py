"""What we need of NVML, as values and one Protocol.

`None` in a value means that the driver does not say (NVML's NOT_SUPPORTED): unknown, never zero.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from metagpu.core.model import Gpu, GpuId, Topology


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


@dataclass(frozen=True, slots=True)
class RemappedRows:
    """Memory rows that were replaced by spare ones, and whether more are waiting for a reset."""

    correctable: int
    uncorrectable: int
    pending: bool
    failed: bool


@dataclass(frozen=True, slots=True)
class Condition:
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


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with memory on a GPU; `memory` in bytes, `None` when the driver does not say."""

    pid: int
    memory: int | None
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, slots=True)
class Xid:
    """NVML reported an XID error; the instance ids are set when it happened inside MIG.

    `gpu` is `None` when NVML could not say which GPU it was.
    """

    gpu: GpuId | None
    code: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, slots=True)
class EccError:
    """NVML reported memory errors: `double_bit` ones were not corrected."""

    gpu: GpuId | None
    double_bit: bool


@dataclass(frozen=True, slots=True)
class RecoveryActionChanged:
    """NVML reported that what the GPU needs has changed; read its `Condition`."""

    gpu: GpuId | None


DriverEvent = Xid | EccError | RecoveryActionChanged


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A GPU that NVML counts but cannot describe; `index` is all that NVML says of it.

    `gpu` is the GPU that was read at this index before, `None` when there was none.
    """

    index: int
    reason: str
    gpu: GpuId | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """All GPUs of the node that could be read, by index, and those that could not.

    `topology` is read once for each set of GPUs; a pair of which NVML says nothing is left out.
    """

    gpus: tuple[Gpu, ...]
    unreadable: tuple[Unreadable, ...] = ()
    driver_version: str = ""
    cuda_version: tuple[int, int] | None = None
    topology: Topology = field(default_factory=Topology)


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

    async def utilisation(self, gpu: GpuId) -> Mapping[int, int] | None:
        """Tell how busy processes kept one GPU's processors of late, in percent, by their pids.

        A process that is not in it was idle; `None` where the driver does not say, as in MIG mode.
        """
        ...

    async def events(self) -> Sequence[DriverEvent]:
        """Wait for events of any GPU, at most one second; empty when nothing happened."""
        ...
