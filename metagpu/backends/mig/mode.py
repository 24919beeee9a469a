"""MIG mode: turned on where the configuration says so and nobody has the GPU; never off again."""

from typing import Final, NamedTuple

import msgspec
import structlog

from metagpu.core.errors import DriverError
from metagpu.core.gpu import Gpu
from metagpu.core.model import Stock
from metagpu.core.served import ServedGpu

_RESETS: Final = frozenset(("ampere",))
"""Architectures on which a change of the mode waits for a reset, as NVIDIA's MIG guide says; from
Hopper on it takes effect at once."""

log = structlog.get_logger()


class Hindrance(NamedTuple):
    """Why MIG is off, and whether it stays so until somebody resets the GPU."""

    why: str
    reset: bool = False


def foreseen(gpu: Gpu, *, enable: bool) -> str:
    """Say why a GPU will give no instances as it is now, before anybody touches it. Pure.

    Empty where MIG is on, or will be as soon as nobody uses the GPU.
    """
    if gpu.mig_enabled is None:
        return _NONE
    if gpu.mig_enabled:
        return ""
    if not enable:
        return _off(gpu)
    if gpu.architecture in _RESETS:
        return (
            "MIG mode is off; metagpu turns it on once nobody uses the GPU, and it waits for a "
            f"reset then: {_command(gpu)}"
        )
    return ""


class MigMode(msgspec.Struct, frozen=True):
    """MIG mode of one GPU, and whether it may be turned on."""

    served: ServedGpu
    enable: bool

    async def hindrance(self) -> Hindrance | None:
        """Say why MIG is off, having turned it on where that may and can be; `None` when it is on.

        Raises:
            DriverError: if NVML cannot tell.
        """
        gpu = self.served.state.gpu
        mode = await self.served.mig.mode(gpu.id)

        if mode is None:
            return Hindrance(_NONE)
        if mode.enabled:
            return None
        if mode.pending:
            return _reset(gpu, "it is switched on")
        if not self.enable:
            return Hindrance(_off(gpu))
        return await self._turn_on()

    async def _turn_on(self) -> Hindrance | None:
        served, gpu = self.served, self.served.state.gpu
        if served.state.elsewhere is None:
            return Hindrance(
                "MIG mode is off; it is turned on once the kubelet has told who holds the GPU"
            )

        # Before anybody is asked: who had a share in this moment is seen, and nobody gets another.
        served.tell(Stock(alone=True))
        try:
            if why := await self._used():
                served.tell(Stock())
                why = f"MIG mode is off, and turned on once nobody uses the GPU: {why}"
                return Hindrance(why)
            mode = await served.mig.set_mode(gpu.id, enabled=True)
        except DriverError as error:
            served.tell(Stock())  # others may have the GPU for as long as this fails
            return Hindrance(f"MIG mode is off and cannot be turned on: {error}")

        if mode.enabled:
            log.info("MIG mode turned on", gpu=str(gpu))
            return None
        served.tell(Stock())
        if not mode.pending:
            return Hindrance(f"MIG mode is off and cannot be turned on: {mode.hindrance}")
        return _reset(gpu, f"it was switched on, but {mode.hindrance}")

    async def _used(self) -> str:
        for lease in self.served.state.leases.values():
            # Who holds an instance has none while MIG is off, as after a reboot: it waits for this.
            if lease.share.backend != self.served.backend:
                return f"{lease.holder or 'a pod that is being admitted'} holds {lease.share.id}"
        for process in await self.served.processes():
            return f"process {process.pid} runs on it"
        return ""


_NONE: Final = "there is no MIG on this GPU"


def _off(gpu: Gpu) -> str:
    return (
        f"MIG mode is off; turn it on (`nvidia-smi -i {gpu.index} -mig 1`), "
        "or let metagpu do so for idle GPUs with `enableMig: true`"
    )


def _reset(gpu: Gpu, why: str) -> Hindrance:
    return Hindrance(f"MIG mode waits for a reset: {why}; {_command(gpu)}", reset=True)


def _command(gpu: Gpu) -> str:
    return (
        "when no program uses the GPU, run "
        f"`nvidia-smi --gpu-reset -i {gpu.index}`, or reboot the node"
    )
