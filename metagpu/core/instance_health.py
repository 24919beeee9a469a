"""Which MIG devices may serve: a fault that stays in one is that one's alone.

NVML names an instance by numbers, and gives them to others later; a verdict belongs to the device
by its uuid. A device is well again when it was made anew, which is its backend's work once nobody
has it, or on an operator's word.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from metagpu.core.driver import Driver
from metagpu.core.errors import DriverError, DriverUnavailable
from metagpu.core.facts import InstanceFaulted, InstanceRecovered
from metagpu.core.gpu import GpuId
from metagpu.core.judgement import Heard, Inside
from metagpu.core.registry import Registry
from metagpu.core.snapshot import GpuState

log = structlog.get_logger()


@dataclass
class InstanceHealth:
    """Keeps the registry's verdicts on MIG devices true.

    Attributes:
        heard: how many faults of each GPU's devices there were.
    """

    driver: Driver
    registry: Registry
    clock: Callable[[], float]
    heard: Counter[GpuId] = field(default_factory=Counter)

    def hear(self, gpu: GpuId, heard: Heard) -> bool:
        """Take the devices out of service that an event names; tell whether they are known."""
        state = self.registry.snapshot.gpus.get(gpu)
        devices = _devices(state, heard.inside) if state and heard.inside else ()
        self._fault(gpu, devices, heard.reason)
        return bool(devices)

    async def seek(self, gpu: GpuId, heard: Heard) -> bool:
        """Ask NVML which devices an event names; false if it means none, or NVML cannot tell.

        Raises:
            DriverUnavailable: if NVML as a whole is gone.
        """
        try:
            mode = await self.driver.mig.mode(gpu)
            if heard.inside is None or mode is None or not mode.enabled:
                return False
            instances = await self.driver.mig.instances(gpu)
        except DriverUnavailable:
            raise
        except DriverError:
            return False

        devices = [
            compute.uuid
            for instance in instances
            for compute in instance.computes
            if _is(heard.inside, instance.number, compute.number) and compute.uuid
        ]
        if not devices:
            log.warning("the MIG instance of an XID is gone", gpu=gpu, news=heard.reason)
        self._fault(gpu, devices, heard.reason)
        return True

    async def forget(self) -> None:
        """End the verdicts on devices that are no more."""
        for gpu, state in self.registry.snapshot.gpus.items():
            if not state.faults:
                continue
            try:
                instances = await self.driver.mig.instances(gpu)
            except DriverError:
                continue  # the GPU's own verdict tells it
            there = {compute.uuid for each in instances for compute in each.computes}
            for device in state.faults.keys() - there:
                self._recovered(gpu, device, "it is no more")

    def acknowledge(self, gpu: GpuId, only: str | None = None) -> None:
        """Take the devices of a GPU, or one of them, back into service on an operator's word."""
        for device in list(self.registry.snapshot.gpus[gpu].faults):
            if only in (None, device):
                self._recovered(gpu, device, "acknowledged by an operator")

    def _fault(self, gpu: GpuId, devices: Sequence[str], reason: str) -> None:
        self.heard[gpu] += len(devices)
        for device in devices:
            if self.registry.apply(InstanceFaulted(gpu, device, reason, self.clock())):
                log.error("MIG instance out of service", gpu=gpu, device=device, reason=reason)

    def _recovered(self, gpu: GpuId, device: str, reason: str) -> None:
        if self.registry.apply(InstanceRecovered(gpu, device, reason, self.clock())):
            log.info("MIG instance back in service", gpu=gpu, device=device, reason=reason)


def _devices(state: GpuState, inside: Inside) -> Sequence[str]:
    """Find the devices of a GPU that backends have told of, each once."""
    made = (made for stock in state.stocks.values() for made in stock.made.values())
    found = (it.device for it in made if _is(inside, it.gpu_instance, it.compute_instance))
    return list(dict.fromkeys(found))


def _is(inside: Inside, gpu_instance: int, compute_instance: int) -> bool:
    return inside.gpu_instance == gpu_instance and inside.compute_instance in (
        None,
        compute_instance,
    )
