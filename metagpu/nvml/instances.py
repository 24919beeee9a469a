"""MIG behind `core.driver.MigDriver`: every call in the lane of its GPU, with a deadline."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from metagpu.core.driver import MigUsage
from metagpu.core.gpu import GpuId
from metagpu.core.mig import MigInstance, MigMode, Placement
from metagpu.nvml import mig
from metagpu.nvml.session import Known

_CHANGING: Final = 30.0
"""Seconds for a change of mode: NVML may reset the GPU for it."""


class Instances:
    """The `MigDriver` of an open session.

    Args:
        known: finds a GPU of the session, or raises as calls about it do.
        deadline: seconds that a call may take.
    """

    def __init__(self, known: Callable[[GpuId], Known], deadline: float) -> None:
        self._known = known
        self._deadline = deadline

    async def mode(self, gpu: GpuId) -> MigMode | None:
        """Read whether MIG is on."""
        known = self._known(gpu)
        return await known.lane.call(partial(mig.read_mode, known.handle), self._deadline)

    async def set_mode(self, gpu: GpuId, *, enabled: bool) -> MigMode:
        """Turn MIG on or off, as far as the GPU can without a reset."""
        known = self._known(gpu)
        change = partial(mig.set_mode, known.handle, enabled=enabled)
        known.ailing = True  # if NVML resets the GPU, who listened to it has to register again
        return await known.lane.call(change, max(_CHANGING, self._deadline))

    async def instances(self, gpu: GpuId) -> Sequence[MigInstance]:
        """List the instances of a GPU."""
        known = self._known(gpu)
        return await known.lane.call(partial(mig.list_instances, known.handle), self._deadline)

    async def capacity(self, gpu: GpuId) -> Mapping[int, int]:
        """Count how many more instances of each profile there is room for."""
        known = self._known(gpu)
        return await known.lane.call(partial(mig.read_capacity, known.handle), self._deadline)

    async def create(
        self, gpu: GpuId, profile: int, placement: Placement, deadline: float
    ) -> MigInstance:
        """Make a GPU instance and its compute instance: both or neither."""
        known = self._known(gpu)
        make = partial(mig.create_instance, known.handle, profile, placement)
        return await known.lane.call(make, deadline)

    async def destroy(self, gpu: GpuId, instance: int) -> None:
        """Destroy a GPU instance and what is in it."""
        known = self._known(gpu)
        await known.lane.call(partial(mig.destroy_instance, known.handle, instance), self._deadline)

    async def usage(self, gpu: GpuId, uuid: str) -> MigUsage:
        """Read what is on one MIG device."""
        known = self._known(gpu)
        return await known.lane.call(partial(mig.read_usage, uuid), self._deadline)
