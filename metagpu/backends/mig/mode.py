"""MIG mode: turned on where the configuration says so and nobody has the GPU; never off again."""

from dataclasses import dataclass

import structlog

from metagpu.core.model import Stock
from metagpu.core.served import ServedGpu

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class MigMode:
    """MIG mode of one GPU, and whether it may be turned on."""

    served: ServedGpu
    enable: bool

    async def hindrance(self) -> str:
        """Say why MIG is off, having turned it on where that may and can be; empty when it is on.

        Raises:
            DriverError: if NVML cannot tell.
        """
        gpu = self.served.state.gpu
        mode = await self.served.mig.mode(gpu.id)

        if mode is None:
            return "there is no MIG on this GPU"
        if mode.enabled:
            return ""
        if mode.pending:
            return self._reset("it is switched on")
        if not self.enable:
            return (
                f"MIG mode is off; turn it on (`nvidia-smi -i {gpu.index} -mig 1`), "
                "or let metagpu do so for idle GPUs with `enableMig: true`"
            )
        return await self._turn_on()

    async def _turn_on(self) -> str:
        served = self.served
        if served.state.elsewhere is None:
            return "MIG mode is off; it is turned on once the kubelet has told who holds the GPU"

        # Before anybody is asked: who had a share in this moment is seen, and nobody gets another.
        served.tell(Stock(alone=True))
        why = await self._used()
        if why:
            served.tell(Stock())
            return f"MIG mode is off, and turned on once nobody uses the GPU: {why}"

        mode = await served.mig.set_mode(served.gpu.id, enabled=True)
        if mode.enabled:
            log.info("MIG mode turned on", gpu=str(served.gpu))
            return ""
        served.tell(Stock())
        return self._reset(f"it was switched on, but {mode.hindrance}")

    async def _used(self) -> str:
        for lease in self.served.state.leases.values():
            # Who holds an instance has none while MIG is off, as after a reboot: it waits for this.
            if lease.share.backend != self.served.backend:
                return f"{lease.holder or 'a pod that is being admitted'} holds {lease.share.id}"
        for process in await self.served.processes():
            return f"process {process.pid} runs on it"
        return ""

    def _reset(self, why: str) -> str:
        index = self.served.state.gpu.index
        return (
            f"MIG mode waits for a reset: {why}; when no program uses the GPU, run "
            f"`nvidia-smi --gpu-reset -i {index}`, or reboot the node"
        )
