"""The MPS control daemons of one GPU's instances: one for each that is shared through MPS.

Each is its instance's own, known by the uuid of its MIG device: what becomes of it concerns the
shares of that instance alone. Nobody waits for one here but who removes its instance.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio
import structlog
from anyio import to_thread
from anyio.abc import TaskGroup

from metagpu.backends.mig.division import through_mps
from metagpu.backends.mig.ledger import Ledger
from metagpu.backends.mps_daemon.control import Folders, devices_left_by
from metagpu.backends.mps_daemon.supervision import LEAVE_DEADLINE, Supervision
from metagpu.backends.mps_daemon.supervisor import Timing
from metagpu.core.companions import Companions
from metagpu.core.driver import GpuProcess
from metagpu.core.errors import ToolError
from metagpu.core.mig import slot_of
from metagpu.core.served import ServedGpu

log = structlog.get_logger()


class Device(NamedTuple):
    """A MIG device; `instance` is NVML's number of its GPU instance."""

    slot: str
    uuid: str
    instance: int


def present(known: Ledger) -> list[Device]:
    """List the MIG devices of a GPU."""
    return [
        Device(slot, instance.computes[0].uuid, instance.number)
        for slot, instance in known.present.items()
        if instance.computes and instance.computes[0].uuid
    ]


def wanted(known: Ledger) -> list[Device]:
    """List the MIG devices that need a control daemon: of the layout, or a pod's still.

    Also one of the layout that is not yet known to be nobody's: an MPS server of before may be what
    runs there.
    """
    of_pods = {slot_of(share) for share in known.state.leases if through_mps(share)}
    of_layout = {slot for slot in known.terms.fixed or () if known.through_mps(slot)}
    ours = {it for it in known.present if known.is_ours(it) or it in known.found} - known.busy
    return [it for it in present(known) if it.slot in ours & (of_pods | of_layout)]


class _Ground(NamedTuple):
    """The `mps_daemon.supervision.Ground` of a MIG device."""

    served: ServedGpu
    device: Device
    tell: Callable[[Device, str], None]

    @property
    def companions(self) -> Companions:
        return self.served.companions

    @property
    def leased(self) -> bool:
        return any(slot_of(share) == self.device.slot for share in self.served.state.leases)

    def suspend(self, reason: str) -> None:
        self.tell(self.device, reason)

    def resume(self) -> None:
        self.tell(self.device, "")

    async def processes(self) -> Sequence[GpuProcess]:
        its = self.device.instance
        return [it for it in await self.served.processes() if it.gpu_instance == its]


@dataclass(eq=False, slots=True)
class _Kept:
    """A control daemon that is kept.

    Attributes:
        gone: its instance is, or is about to be: it ends with all it has.
        unwanted: it is to end when it has no clients.
        asked: it is being asked who its clients are.
    """

    device: Device
    folders: Folders
    supervision: Supervision
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    over: anyio.Event = field(default_factory=anyio.Event)
    gone: bool = False
    unwanted: bool = False
    asked: bool = False


@dataclass(slots=True)
class Daemons:
    """Keeps them.

    Attributes:
        run_dir: the daemon's run directory, as the container runtime finds it too.
        tell: called with why a device's control daemon takes no clients, empty when it does.
        group: where they are kept; at its end, those with clients are left to who comes next.
    """

    served: ServedGpu
    run_dir: str
    timing: Timing
    tell: Callable[[Device, str], None]
    group: TaskGroup
    kept: dict[str, _Kept] = field(default_factory=dict)
    swept: bool = False

    def follow(self, there: Sequence[Device], wanted: Sequence[Device]) -> None:
        """Keep one for each device that is wanted; end those that nobody wants and uses.

        One that is not wanted any more is kept for as long as it has clients; one whose device is
        gone is not.
        """
        # By uuid alone: where an instance is said to be may change while NVML tells little.
        here, needed = {it.uuid for it in there}, {it.uuid for it in wanted}
        for it in self.kept.values():
            it.unwanted = it.device.uuid not in needed
            if it.device.uuid not in here:
                it.gone = True
                it.scope.cancel()
        for device in wanted:
            if device.uuid not in self.kept:
                self._keep(device)

        if self.served.state.elsewhere is None:
            return  # who holds what is not known yet
        for it in self.kept.values():
            if it.unwanted and not it.gone and not it.asked:
                it.asked = True
                self.group.start_soon(self._end_unused, it)
        if not self.swept:
            self.swept = True
            self.group.start_soon(self._sweep, {device.uuid: device for device in there})

    def tidy(self, slots: Collection[str]) -> None:
        """Let MPS servers end that have no clients; they are processes on their instances."""
        for it in self.kept.values():
            if it.device.slot in slots and not it.asked:
                it.asked = True
                self.group.start_soon(self._tidy, it)

    async def end(self, slot: str) -> None:
        """End that of an instance that nobody uses, and that is about to be removed."""
        for it in list(self.kept.values()):
            if it.device.slot == slot:
                it.gone = True
                it.scope.cancel()
                await it.over.wait()

    def _keep(self, device: Device) -> None:
        it = self.kept[device.uuid] = self._made(device)
        self.group.start_soon(self._run, it)

    def _made(self, device: Device) -> _Kept:
        folders = Folders.of(self.run_dir, device.uuid)
        name = f"{self.served.gpu} {device.slot}"
        ground = _Ground(self.served, device, self.tell)
        supervision = Supervision(ground, device.uuid, folders, self.timing, name=name)
        return _Kept(device, folders, supervision)

    async def _run(self, it: _Kept) -> None:
        """Keep one until it is to end, or until nobody keeps the GPU any more."""
        try:
            with it.scope:
                while not await self._has_folders(it):  # noqa: ASYNC110 - the disk rings no bell
                    await anyio.sleep(self.timing.longest_pause)
                await it.supervision.run()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(LEAVE_DEADLINE):
                await _leave(it)
            del self.kept[it.device.uuid]
            it.over.set()

    async def _has_folders(self, it: _Kept) -> bool:
        try:
            await to_thread.run_sync(it.folders.make)
            await to_thread.run_sync(it.folders.note_gpu, self.served.gpu.id)
        except OSError as error:
            self.tell(it.device, f"its folders for MPS cannot be made: {error}")
            return False
        return True

    async def _end_unused(self, it: _Kept) -> None:
        """End one that is not wanted, if it has no clients; it is asked again in the next round."""
        try:
            if await it.supervision.unused() and it.unwanted:
                it.scope.cancel()
        except ToolError as error:
            log.debug("an MPS control daemon stays", device=it.device.uuid, error=str(error))
        finally:
            it.asked = False

    async def _tidy(self, it: _Kept) -> None:
        try:
            await it.supervision.left()
        except ToolError as error:
            log.debug("an MPS server may stay", device=it.device.uuid, error=str(error))
        finally:
            it.asked = False

    async def _sweep(self, there: dict[str, Device]) -> None:
        """Take on what a daemon that was killed left: of devices that are gone, or not wanted."""
        gpu = self.served.gpu.id
        for uuid in await to_thread.run_sync(devices_left_by, self.run_dir, gpu):
            if uuid in self.kept:
                continue
            if (device := there.get(uuid)) is None:
                left = self._made(Device("", uuid, -1))
                left.gone = True
                await _leave(left)
            elif await (left := self._made(device)).supervision.find() is None:
                await to_thread.run_sync(left.folders.forget)
            elif uuid not in self.kept:
                self._keep(device)  # it is not wanted, and ends when it has no clients


async def _leave(it: _Kept) -> None:
    if not it.gone:
        await it.supervision.leave()
        return

    try:
        await it.supervision.end()
    except ToolError as error:
        log.warning("MPS control daemon stays", device=it.device.uuid, error=str(error))
    else:
        await to_thread.run_sync(it.folders.forget)
