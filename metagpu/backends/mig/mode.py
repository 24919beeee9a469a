"""MIG mode: turned on or off on unused GPUs, as the configuration says."""

from typing import Final, NamedTuple, Protocol

import msgspec
import structlog

from metagpu.core.contracts.backend import GpuContext
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import ProvisionedState

_RESET_ARCHITECTURES: Final = frozenset(("ampere",))
"""Architectures on which a change of the mode takes effect at a reset, as NVIDIA's MIG guide says;
from Hopper on it takes effect at once."""

log = structlog.get_logger()


class Blocker(NamedTuple):
    """A reason why a GPU has not the mode that its pool wants.

    Attributes:
        needs_reset: whether the reason lasts until the GPU is reset.
        empties: whether the GPU's idle instances are removed meanwhile.
    """

    reason: str
    needs_reset: bool = False
    empties: bool = False


class MigModePolicy(Protocol):
    """The MIG mode that a pool wants of one GPU."""

    @property
    def enables(self) -> bool:
        """True if the pool wants MIG on: no other backend can use the GPU then."""
        ...

    async def ensure(self) -> Blocker | None:
        """Change the mode if allowed and possible; return why it is not the wanted one.

        Raises:
            DriverError: if NVML cannot report the mode.
        """
        ...


def expected_problem(gpu: Gpu, *, enable: bool, disable: bool = False) -> str:
    """Return why a GPU is not used as its pool wants in its present mode. Pure.

    Empty where the mode is right, or where metagpu changes it as soon as the GPU is unused.
    """
    if disable:
        return _disabling_problem(gpu)
    if gpu.mig_enabled is None:
        return _NO_MIG
    if gpu.mig_enabled:
        return ""
    if not enable:
        return _disabled(gpu)
    if gpu.architecture in _RESET_ARCHITECTURES:
        return (
            "MIG mode is off; metagpu enables it once the GPU is unused, and the GPU then needs a "
            f"reset: {_reset_command(gpu)}"
        )
    return ""


def _disabling_problem(gpu: Gpu) -> str:
    if not gpu.mig_enabled or gpu.architecture not in _RESET_ARCHITECTURES:
        return ""
    return f"{LEAVING}; the GPU then needs a reset: {_reset_command(gpu)}"


class MigModeEnabler(msgspec.Struct, frozen=True):
    """The policy of a GPU with instances; `enable` allows metagpu to turn MIG on."""

    context: GpuContext
    enable: bool

    @property
    def enables(self) -> bool:
        """True."""
        return True

    async def ensure(self) -> Blocker | None:
        """Enable MIG if allowed and possible; return why it is off, `None` if it is on.

        Raises:
            DriverError: if NVML cannot report the mode.
        """
        gpu = self.context.state.gpu
        mode = await self.context.mig.mode(gpu.id)

        if mode is None:
            return Blocker(_NO_MIG)
        if mode.enabled:
            return None
        if mode.pending:
            return _reset(gpu, "it is switched on")
        if not self.enable:
            return Blocker(_disabled(gpu))
        return await self._enable()

    async def _enable(self) -> Blocker | None:
        context, gpu = self.context, self.context.state.gpu
        if context.state.kubelet.mig_devices_of_other_plugins is None:
            return Blocker(
                "MIG mode is off; metagpu enables it after the kubelet has reported which pods "
                "hold the GPU"
            )

        # Reported before the check for use: from now on no container is given another share, and
        # the check sees every earlier lease.
        context.report(ProvisionedState(exclusive=True))
        try:
            if use := await _use(context):
                context.report(ProvisionedState())
                return Blocker(f"MIG mode is off; metagpu enables it once the GPU is unused: {use}")
            mode = await context.mig.set_mode(gpu.id, enabled=True)
        except DriverError as error:
            context.report(ProvisionedState())  # other backends may use the GPU while this fails
            return Blocker(f"MIG mode is off and cannot be enabled: {error}")

        if mode.enabled:
            log.info("mig mode enabled", gpu=str(gpu))
            return None
        context.report(ProvisionedState())
        if not mode.pending:
            return Blocker(f"MIG mode is off and cannot be enabled: {mode.reason}")
        return _reset(gpu, f"it was switched on, but {mode.reason}")


class MigModeDisabler(msgspec.Struct, frozen=True):
    """The policy of a GPU that leaves MIG mode."""

    context: GpuContext

    @property
    def enables(self) -> bool:
        """False."""
        return False

    async def ensure(self) -> Blocker | None:
        """Disable MIG if possible; return why it is on, `None` if it is off.

        Raises:
            DriverError: if NVML cannot report the mode.
        """
        context, gpu = self.context, self.context.state.gpu
        mode = await context.mig.mode(gpu.id)

        if mode is None or not (mode.enabled or mode.pending):
            return None
        if not mode.pending:
            return _reset(gpu, "it is switched off")
        if use := await self._use():
            return Blocker(f"{LEAVING}: {use}", empties=True)
        return await self._disable()

    async def _use(self) -> str:
        """Return what keeps MIG on, empty for nothing."""
        context = self.context
        if context.state.kubelet.mig_devices_of_other_plugins is None:
            return "the kubelet has not reported yet which pods hold it"
        if use := await _use(context, any_backend=True):
            return use
        if instances := await context.mig.instances(context.state.gpu.id):
            return f"it has {len(instances)} instances"
        return ""

    async def _disable(self) -> Blocker | None:
        context, gpu = self.context, self.context.state.gpu
        try:
            mode = await context.mig.set_mode(gpu.id, enabled=False)
        except DriverError as error:
            return Blocker(f"MIG mode is on and cannot be disabled: {error}")

        if not mode.enabled:
            log.info("mig mode disabled", gpu=str(gpu))
            return None
        if mode.pending:
            return Blocker(f"MIG mode is on and cannot be disabled: {mode.reason}")
        return _reset(gpu, f"it was switched off, but {mode.reason}")


async def _use(context: GpuContext, *, any_backend: bool = False) -> str:
    """Return what uses the GPU, empty if it is unused."""
    for lease in context.state.leases.values():
        # A lease of ours has no instance while MIG is off, as after a reboot: it waits for it.
        if any_backend or lease.share.backend != context.backend:
            return f"{lease.holder or 'a pod that is being admitted'} holds {lease.share.id}"
    for process in await context.processes():
        return f"process {process.pid} runs on it"
    return ""


LEAVING: Final = "MIG mode is on; metagpu turns it off once the GPU is unused"
_NO_MIG: Final = "the GPU does not support MIG"


def _disabled(gpu: Gpu) -> str:
    return (
        f"MIG mode is off; turn it on (`nvidia-smi -i {gpu.index} -mig 1`), "
        "or let metagpu do so for idle GPUs with `enableMig: true`"
    )


def _reset(gpu: Gpu, cause: str) -> Blocker:
    text = f"MIG mode waits for a reset: {cause}; {_reset_command(gpu)}"
    return Blocker(text, needs_reset=True)


def _reset_command(gpu: Gpu) -> str:
    return (
        "when no program uses the GPU, run "
        f"`nvidia-smi --gpu-reset -i {gpu.index}`, or reboot the node"
    )
