"""Health of MIG devices: a fault in a MIG instance takes that instance alone out.

NVML names an instance by numbers, and uses the numbers again for later instances; a verdict belongs
to a MIG device by its uuid. A faulty device is replaced: its backend creates the instance again
once no container holds it. Or an operator acknowledges the fault.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from metagpu.core.contracts.driver import HealthDriver, read_instances
from metagpu.core.errors import DriverError, DriverUnavailable
from metagpu.core.health.fault_assessment import FaultAssessment, MigInstanceRef
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.snapshot import GpuState
from metagpu.core.state.facts import InstanceFaulted, InstanceRecovered
from metagpu.core.state.registry import Registry

log = structlog.get_logger()


@dataclass
class MigHealth:
    """The owner of the registry's verdicts on MIG devices.

    Attributes:
        fault_count: number of faults of each GPU's MIG devices so far.
    """

    driver: HealthDriver
    registry: Registry
    clock: Callable[[], float]
    fault_count: Counter[GpuId] = field(default_factory=Counter)

    def apply_fault(self, gpu: GpuId, assessment: FaultAssessment) -> bool:
        """Take the MIG devices of an event out of service; return whether they are known."""
        state = self.registry.snapshot.gpus.get(gpu)
        devices = (
            _devices(state, assessment.mig_instance) if state and assessment.mig_instance else ()
        )
        self._fault(gpu, devices, assessment.reason)
        return bool(devices)

    async def find_and_fault(self, gpu: GpuId, assessment: FaultAssessment) -> bool:
        """Find the MIG devices of an event through NVML, and take them out of service.

        Returns false if the event names no MIG instance, or NVML cannot list the instances.

        Raises:
            DriverUnavailable: NVML as a whole is gone.
        """
        reference = assessment.mig_instance
        try:
            mode = await self.driver.mig.mode(gpu)
            if reference is None or mode is None or not mode.enabled:
                return False
            instances = await self.driver.mig.instances(gpu)
        except DriverUnavailable:
            raise
        except DriverError:
            return False

        devices = [
            compute.uuid
            for instance in instances
            for compute in instance.compute_instances
            if _is_instance(reference, instance.number, compute.number) and compute.uuid
        ]
        if not devices:
            log.warning("mig instance of an event is gone", gpu=gpu, description=assessment.reason)
        self._fault(gpu, devices, assessment.reason)
        return True

    async def recover_removed(self) -> None:
        """End the verdicts on MIG devices that no longer exist, nor in a backend's report.

        A share whose device is gone would be in service until its backend has noticed.
        """
        gpus = self.registry.snapshot.gpus
        faulty = [gpu for gpu, state in gpus.items() if state.mig_faults]
        if not faulty:
            return
        for gpu, answer in (await read_instances(self.driver.mig, faulty)).items():
            if isinstance(answer, DriverError):
                continue  # the GPU's own verdict has the reason
            existing = {compute.uuid for each in answer for compute in each.compute_instances}
            state = self.registry.snapshot.gpus[gpu]
            for backend in state.provisioned.values():
                existing |= {it.device for it in backend.devices.values()}
            for device in state.mig_faults.keys() - existing:
                self._recovered(gpu, device, "the MIG device no longer exists")

    def acknowledge(self, gpu: GpuId, only: str | None = None) -> None:
        """Take the MIG devices of a GPU, or `only` one, back into service for an operator."""
        for device in list(self.registry.snapshot.gpus[gpu].mig_faults):
            if only in (None, device):
                self._recovered(gpu, device, "acknowledged by an operator")

    def _fault(self, gpu: GpuId, devices: Sequence[str], reason: str) -> None:
        self.fault_count[gpu] += len(devices)
        for device in devices:
            if self.registry.apply(InstanceFaulted(gpu, device, reason, self.clock())):
                log.error("mig device out of service", gpu=gpu, device=device, reason=reason)

    def _recovered(self, gpu: GpuId, device: str, reason: str) -> None:
        if self.registry.apply(InstanceRecovered(gpu, device, reason, self.clock())):
            log.info("mig device back in service", gpu=gpu, device=device, reason=reason)


def _devices(state: GpuState, reference: MigInstanceRef) -> Sequence[str]:
    """Return the MIG devices of an instance that backends have reported, each once."""
    provisioned = (it for backend in state.provisioned.values() for it in backend.devices.values())
    found = (
        it.device
        for it in provisioned
        if _is_instance(reference, it.gpu_instance, it.compute_instance)
    )
    return list(dict.fromkeys(found))


def _is_instance(reference: MigInstanceRef, gpu_instance: int, compute_instance: int) -> bool:
    return reference.gpu_instance == gpu_instance and reference.compute_instance in (
        None,
        compute_instance,
    )
