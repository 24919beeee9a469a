"""The `MigDriver` on NVML: every call in the GPU's worker, with a deadline."""

from collections.abc import Callable, Sequence
from functools import partial

import anyio

from metagpu.core.contracts.driver import MigUsage
from metagpu.core.contracts.sensors import InstanceSensors
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.mig import MigInstance, MigMode, Placement
from metagpu.nvml import mig_calls
from metagpu.nvml.sensors import read_instance_sensors
from metagpu.nvml.session_gpu import SessionGpu
from metagpu.nvml.timing import TIMING, NvmlTiming
from metagpu.nvml.worker import ResultT


class NvmlMigDriver:
    """The `MigDriver` of an open session.

    Args:
        known: finds a GPU of the session; raises the errors of calls about the GPU.
        deadline: seconds that a call may take.
        timing: seconds of the calls that take longer.
    """

    def __init__(
        self,
        known: Callable[[GpuId], SessionGpu],
        deadline: float,
        timing: NvmlTiming = TIMING,
    ) -> None:
        self._known = known
        self._deadline = deadline
        self._timing = timing

    async def mode(self, gpu: GpuId) -> MigMode | None:
        """Read whether MIG is on."""
        known = self._known(gpu)
        return await known.worker.call(partial(mig_calls.read_mode, known.handle), self._deadline)

    async def set_mode(self, gpu: GpuId, *, enabled: bool) -> MigMode:
        """Turn MIG on or off, as far as the GPU can without a reset."""
        known = self._known(gpu)
        change = partial(mig_calls.set_mode, known.handle, enabled=enabled)
        known.needs_recovery = (
            True  # if NVML resets the GPU, it has to be registered for events again
        )
        return await self._finish(known, change, max(self._timing.mode_change, self._deadline))

    async def instances(self, gpu: GpuId) -> Sequence[MigInstance]:
        """List the instances of a GPU."""
        known = self._known(gpu)
        return await known.worker.call(
            partial(mig_calls.list_instances, known.handle), self._deadline
        )

    async def sensors(self, gpu: GpuId) -> Sequence[InstanceSensors]:
        """Read the memory of the instances that have a MIG device."""
        known = self._known(gpu)
        return await known.worker.call(partial(read_instance_sensors, known.handle), self._deadline)

    async def create(
        self, gpu: GpuId, profile: int, placement: Placement, deadline: float
    ) -> MigInstance:
        """Create a GPU instance and its compute instance: both or neither."""
        known = self._known(gpu)
        create = partial(mig_calls.create_instance, known.handle, profile, placement)
        return await self._finish(known, create, deadline)

    async def destroy(self, gpu: GpuId, instance: int) -> None:
        """Destroy a GPU instance and its compute instances."""
        known = self._known(gpu)
        destroy = partial(mig_calls.destroy_instance, known.handle, instance)
        await self._finish(known, destroy, self._deadline)

    async def usage(self, gpu: GpuId, uuid: str) -> MigUsage:
        """Read the memory and processes of one MIG device."""
        known = self._known(gpu)
        return await known.worker.call(partial(mig_calls.read_usage, uuid), self._deadline)

    async def _finish(
        self, known: SessionGpu, change: Callable[[], ResultT], deadline: float
    ) -> ResultT:
        """Make a change; a cancelled caller waits for it, so that none stays half done."""
        with anyio.CancelScope(shield=True):
            result = await known.worker.call(change, deadline)
        return result  # noqa: RET504 - a scope may leave its block, for all that mypy knows
