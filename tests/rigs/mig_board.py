"""A GPU in MIG mode beside a turned clock: its driver has no threads, and knows who uses what.

The GPU outlives the daemons of a schedule. It numbers its instances as NVML does: an instance that
is created where another one was has the number of that one, and another uuid.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import anyio
from anyio.lowlevel import checkpoint
from msgspec.structs import replace

from metagpu.core.contracts.driver import GpuProcess
from metagpu.core.errors import DriverError, DriverTimeout, InsufficientResources
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.mig import ComputeInstance, MigInstance, MigMode, Placement

_LONGEST_REMOVAL: Final = 3.0


@dataclass(eq=False)
class MigBoard:
    """The instances of one GPU.

    Attributes:
        gpu: the GPU, with its profiles.
        used: returns the uuids that running pods use, by an account that is not the daemon's.
        delay: the seconds that the next creations take; removals take 3 s of them at most.
        instances: those that exist, by NVML's number.
        taken: the uuids of instances that were destroyed while a pod used them.
    """

    gpu: Gpu
    used: Callable[[], Collection[str]]
    delay: float = 0.0
    instances: dict[int, MigInstance] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    _uuids: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def devices(self) -> dict[str, str]:
        """The slots, as share ids name them, of all devices, by uuid."""
        names = {profile.number: profile.name for profile in self.gpu.mig_profiles}
        return {
            device.uuid: f"{names[instance.profile]}@{instance.placement.start}"
            for instance in self.instances.values()
            for device in instance.compute_instances
        }

    def begin(self, profile: int, placement: Placement) -> int:
        """Create a GPU instance without a device; return its number.

        Raises:
            InsufficientResources: if another instance is on its slices.
        """
        taken = {
            number for instance in self.instances.values() for number in instance.placement.slices
        }
        if not taken.isdisjoint(placement.slices):
            raise InsufficientResources("an instance is there")
        whole = max(other.size for one in self.gpu.mig_profiles for other in one.placements)
        number = whole // placement.size - 1 + placement.start // placement.size
        self.instances[number] = MigInstance(number, profile, placement)
        return number

    def finish(self, number: int) -> MigInstance:
        """Create the device of a GPU instance."""
        device = ComputeInstance(0, f"MIG-{next(self._uuids)}")
        made = replace(self.instances[number], compute_instances=(device,))
        self.instances[number] = made
        return made

    def destroy(self, number: int) -> None:
        """Destroy an instance; no process refuses that, as pods have not begun to compute."""
        gone = self.instances.pop(number, None)
        uuids = {instance.uuid for instance in gone.compute_instances} if gone else set()
        self.taken += uuids & set(self.used())


class BoardDriver:
    """The calls of one daemon, as much of `Driver` and `MigDriver` as the backend needs.

    A creation has the GPU instance at once and its device at the end, as NVML's two calls have. The
    caller that missed the deadline leaves a thread behind, which finishes unless it is killed.
    """

    def __init__(self, board: MigBoard) -> None:
        self._board = board
        self._killed = anyio.Event()
        self._late: tuple[float, int] | None = None

    def kill(self) -> None:
        """Stop in the middle of whatever it does; an instance may stay half done."""
        self._killed.set()

    @property
    def mig(self) -> "BoardDriver":
        """The MIG calls of this daemon."""
        return self

    async def processes(self, _: GpuId) -> Sequence[GpuProcess]:
        """List no process."""
        await self._enter()
        return ()

    async def mode(self, _: GpuId) -> MigMode:
        """Read the mode, which is on."""
        await self._enter()
        return MigMode(enabled=True, pending=True)

    async def instances(self, _: GpuId) -> Sequence[MigInstance]:
        """List the instances."""
        await self._enter()
        return tuple(self._board.instances.values())

    async def create(
        self, _: GpuId, profile: int, placement: Placement, deadline: float
    ) -> MigInstance:
        """Create an instance, as late as the board says."""
        with anyio.CancelScope(shield=True):
            await self._enter()
            number, delay = self._board.begin(profile, placement), self._board.delay
            with anyio.move_on_after(min(delay, deadline)):
                await self._killed.wait()
            self._check_alive()
            if delay > deadline:
                self._late = anyio.current_time() + delay - deadline, number
                raise DriverTimeout("no answer")
        return self._board.finish(number)

    async def destroy(self, _: GpuId, instance: int) -> None:
        """Destroy an instance."""
        with anyio.CancelScope(shield=True):
            await self._enter()
            with anyio.move_on_after(min(self._board.delay, _LONGEST_REMOVAL)):
                await self._killed.wait()
            self._check_alive()
            self._board.destroy(instance)

    async def _enter(self) -> None:
        """Begin a call, once an earlier one is over.

        Raises:
            DriverError: if it lasts, or this daemon is dead.
        """
        await checkpoint()
        self._check_alive()
        if self._late is not None:
            until, number = self._late
            if anyio.current_time() < until:
                raise DriverTimeout("an earlier call has not returned yet")
            self._late = None
            self._board.finish(number)

    def _check_alive(self) -> None:
        if self._killed.is_set():
            raise DriverError("killed")
