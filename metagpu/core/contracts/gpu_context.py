"""The contract of a GPU that a backend manages: the argument of `serve`."""

from collections.abc import Callable, Sequence
from typing import Protocol

from metagpu.core.contracts.daemons import Daemons
from metagpu.core.contracts.driver import ComputeMode, GpuProcess, MigDriver
from metagpu.core.contracts.programs import Programs
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import ProvisionedState
from metagpu.core.model.snapshot import GpuState


class GpuContext(Protocol):
    """One GPU, as one backend manages it.

    Reports through a context that another one has replaced, as after a change of options, have no
    effect.
    """

    @property
    def gpu(self) -> Gpu:
        """The GPU."""
        ...

    @property
    def backend(self) -> str:
        """The name of the backend."""
        ...

    @property
    def programs(self) -> Programs:
        """Host programs that end by themselves."""
        ...

    @property
    def daemons(self) -> Daemons:
        """Host programs that run for long."""
        ...

    @property
    def state(self) -> GpuState:
        """The present state of the GPU."""
        ...

    @property
    def leased(self) -> bool:
        """True while a container holds a share that this backend offers of the GPU."""
        ...

    @property
    def cleanup_due_since(self) -> float | None:
        """The end of the backend's last lease while the GPU waits for its cleanup.

        In seconds since the epoch; `None` if no cleanup is due.
        """
        ...

    @property
    def hands_over(self) -> bool:
        """True while another daemon takes the GPU over.

        A `serve` that ends then leaves everything as it is.
        """
        ...

    async def wait_until(self, is_so: Callable[[GpuState], bool]) -> GpuState:
        """Wait for a state of the GPU of which `is_so` is true, and return it.

        Returns at once if the present state is such.
        """
        ...

    def suspend(self, reason: str, *, reset: bool = False) -> None:
        """Suspend the backend on this GPU: its shares are unhealthy and are refused.

        The refusal has the reason. Leases stay, and so do shares that other backends offer of the
        GPU. `reset` means that the suspension lasts until an operator resets the GPU; the cluster
        is informed of that.
        """
        ...

    def resume(self) -> None:
        """End the suspension: the backend's shares of this GPU can be granted."""
        ...

    def cleanup_done(self, since: float) -> bool:
        """Report the end of the cleanup that is due since then; the GPU is free again.

        Returns `False` if no such cleanup is due: a share was granted meanwhile, and the GPU is in
        use again.
        """
        ...

    @property
    def mig(self) -> MigDriver:
        """The MIG calls of NVML."""
        ...

    def report(self, provisioned: ProvisionedState) -> None:
        """Report all that this backend has created on the GPU."""
        ...

    def instance_removed(self, device: str) -> None:
        """Report that a MIG device is gone, and its faults with it."""
        ...

    async def processes(self) -> Sequence[GpuProcess]:
        """List the processes on the GPU (see `Driver.processes`).

        Raises:
            DriverError: if NVML cannot list them.
        """
        ...

    async def compute_mode(self) -> ComputeMode | None:
        """Read the compute mode of the GPU; `None` when the driver does not report it.

        Raises:
            DriverError: if NVML cannot read it.
        """
        ...

    async def set_compute_mode(self, mode: ComputeMode) -> None:
        """Set the compute mode, until it is set again or the driver unloads the GPU.

        Raises:
            DriverError: if NVML refuses: without root's rights, or because the GPU cannot.
        """
        ...
