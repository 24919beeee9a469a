"""The contract of a GPU in a backend's hands: what `Backend.serve` sees and may do."""

from collections.abc import Callable, Sequence
from typing import Protocol

from metagpu.core.companions import Companions
from metagpu.core.driver import ComputeMode, GpuProcess, MigDriver
from metagpu.core.gpu import Gpu
from metagpu.core.model import Stock
from metagpu.core.snapshot import GpuState
from metagpu.core.tools import Tools


class ServedGpu(Protocol):
    """One GPU as one backend keeps it.

    What is said through one that another has replaced (the options changed) is not heard.
    """

    @property
    def gpu(self) -> Gpu:
        """The GPU."""
        ...

    @property
    def backend(self) -> str:
        """The name of the backend that keeps it."""
        ...

    @property
    def tools(self) -> Tools:
        """Programs of the host."""
        ...

    @property
    def companions(self) -> Companions:
        """Programs of the host that run for long."""
        ...

    @property
    def state(self) -> GpuState:
        """Everything known about the GPU now."""
        ...

    @property
    def leased(self) -> bool:
        """Whether a container holds a share of it that this backend cut."""
        ...

    @property
    def since_last_lease(self) -> float | None:
        """When this backend's last lease ended, while the GPU waits to be cleaned after it."""
        ...

    async def until(self, is_so: Callable[[GpuState], bool]) -> GpuState:
        """Wait until the GPU's state is so, and give it; at once, if it is so already."""
        ...

    def suspend(self, reason: str, *, reset: bool = False) -> None:
        """Give no shares of it for now: they are listed as unhealthy, and refused with the reason.

        Leases stay, and so do shares that other backends offer of it. `reset` says that this lasts
        until somebody resets the GPU: the cluster is told of that.
        """
        ...

    def resume(self) -> None:
        """Give shares of it, for the first time or again."""
        ...

    def returned(self, since: float) -> bool:
        """Say that the cleaning is done that began then (`since_last_lease`); it is anyone's.

        False if there is no such cleaning: a share was given meanwhile, and it is in use again.
        """
        ...

    @property
    def mig(self) -> MigDriver:
        """What NVML does with MIG."""
        ...

    def tell(self, stock: Stock) -> None:
        """Say what this backend has made of the GPU, all of it."""
        ...

    def removed(self, device: str) -> None:
        """Say that a MIG device is no more: what was wrong with it is over."""
        ...

    async def processes(self) -> Sequence[GpuProcess]:
        """List the processes on it (see `Driver.processes`).

        Raises:
            DriverError: if NVML cannot tell.
        """
        ...

    async def compute_mode(self) -> ComputeMode | None:
        """Read who may use it, `None` when the driver does not say.

        Raises:
            DriverError: if NVML cannot tell.
        """
        ...

    async def set_compute_mode(self, mode: ComputeMode) -> None:
        """Say who may use it. It lasts until it is set again, or the driver forgets the GPU.

        Raises:
            DriverError: if NVML refuses: for want of root's rights, or because the GPU cannot.
        """
        ...
