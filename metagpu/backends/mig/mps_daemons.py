"""The MPS control daemons of one GPU: one for each instance that uses MPS.

Each daemon belongs to one instance, known by the uuid of its MIG device: its failure concerns the
shares of that instance alone. Only the removal of an instance waits for its daemon.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import anyio
import structlog
from anyio import to_thread
from anyio.abc import TaskGroup

from metagpu.backends.common.mps_daemon.control import MpsDirectories, leftover_devices
from metagpu.backends.common.mps_daemon.decisions import MpsDaemonTiming
from metagpu.backends.common.mps_daemon.supervisor import LEAVE_DEADLINE, DaemonSupervisor
from metagpu.backends.mig.inventory import InstanceInventory
from metagpu.core.contracts.backend import GpuContext
from metagpu.core.contracts.driver import GpuProcess
from metagpu.core.contracts.programs import Daemons
from metagpu.core.errors import ProgramError
from metagpu.core.model.mig import is_mps_share, slot_of
from metagpu.core.model.snapshot import GpuState

log = structlog.get_logger()


class MigDevice(NamedTuple):
    """A MIG device; `instance` is NVML's number of its GPU instance."""

    slot: str
    uuid: str
    instance: int


def mig_devices(inventory: InstanceInventory) -> list[MigDevice]:
    """List the MIG devices of a GPU."""
    return [
        MigDevice(slot, instance.compute_instances[0].uuid, instance.number)
        for slot, instance in inventory.present.items()
        if instance.compute_instances and instance.compute_instances[0].uuid
    ]


def mps_devices(inventory: InstanceInventory, state: GpuState) -> list[MigDevice]:
    """List the MIG devices that need a control daemon: of the layout, or in use.

    A device of the layout needs one before it is known to be unused: the process on it may be an
    MPS server of an earlier agent.
    """
    of_pods = {slot_of(share) for share in state.leases if is_mps_share(share)}
    of_layout = {slot for slot in inventory.settings.layout or () if inventory.uses_mps(slot)}
    ours = {
        slot
        for slot in inventory.present.keys() - inventory.changing
        if inventory.is_owned(slot) or slot in inventory.unclaimed
    }
    return [
        device for device in mig_devices(inventory) if device.slot in ours & (of_pods | of_layout)
    ]


class DaemonObserver(Protocol):
    """The reconciler of a GPU, as the control daemons of its instances see it."""

    def daemon_changed(self, device: MigDevice, problem: str) -> None:
        """Record why the control daemon of a device takes no clients, empty if it does."""
        ...


class _MigDaemonHost(NamedTuple):
    """A MIG device as the `DaemonHost` of its control daemon."""

    context: GpuContext
    device: MigDevice
    observer: DaemonObserver

    @property
    def daemons(self) -> Daemons:
        return self.context.daemons

    @property
    def leased(self) -> bool:
        state = self.context.state
        held = any(slot_of(share) == self.device.slot for share in state.leases)
        return held or bool(state.kubelet.unknown_leases)

    def suspend(self, reason: str) -> None:
        self.observer.daemon_changed(self.device, reason)

    def resume(self) -> None:
        self.observer.daemon_changed(self.device, "")

    async def processes(self) -> Sequence[GpuProcess]:
        number = self.device.instance
        return [
            process for process in await self.context.processes() if process.gpu_instance == number
        ]

    async def stopping_processes(self) -> Collection[int]:
        return await self.context.stopping_processes()


@dataclass(eq=False, slots=True)
class _ManagedDaemon:
    """A control daemon under supervision.

    Attributes:
        device_gone: its instance is removed, or about to be: the daemon ends with its clients.
        unwanted: it ends as soon as it has no clients.
        querying: a query for its clients is open.
        leased: a container has held a share of the device since its /dev/shm was emptied.
    """

    device: MigDevice
    directories: MpsDirectories
    supervisor: DaemonSupervisor
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)
    device_gone: bool = False
    unwanted: bool = False
    querying: bool = False
    leased: bool = False


class MpsDaemons:
    """The control daemons of one GPU's instances, supervised in a task group.

    At the end of the group, daemons with clients go on for the next agent.
    """

    def __init__(
        self,
        context: GpuContext,
        run_dir: str,
        timing: MpsDaemonTiming,
        observer: DaemonObserver,
        group: TaskGroup,
        *,
        shared_memory: int,
    ) -> None:
        self._context = context
        self._run_dir = run_dir
        self._shared_memory = shared_memory
        self._timing = timing
        self._observer = observer
        self._group = group
        self._daemons: dict[str, _ManagedDaemon] = {}
        self._wanted: set[str] = set()
        self._swept = False

    def follow(self, present: Sequence[MigDevice], wanted: Sequence[MigDevice]) -> None:
        """Start a daemon for each wanted device; end those neither wanted nor used.

        An unwanted daemon goes on while it has clients; one whose device is gone does not.
        """
        # By uuid alone: the slot of an instance may change while NVML reports few profiles.
        present_uuids, self._wanted = (
            {mig_device.uuid for mig_device in present},
            {mig_device.uuid for mig_device in wanted},
        )
        for daemon in self._daemons.values():
            daemon.unwanted = daemon.device.uuid not in self._wanted
            if daemon.device.uuid not in present_uuids:
                daemon.device_gone = True
                daemon.scope.cancel()
        for device in wanted:
            if device.uuid not in self._daemons:
                self._start(device)

        self._follow_leases()

        if self._context.state.kubelet.mig_devices_of_other_plugins is None:
            return  # the kubelet has not reported yet which pods hold devices
        for daemon in self._daemons.values():
            if daemon.unwanted and not daemon.device_gone and not daemon.querying:
                daemon.querying = True
                self._group.start_soon(self._end_if_unused, daemon)
        if not self._swept:
            self._swept = True
            self._group.start_soon(self._sweep, {device.uuid: device for device in present})

    def _follow_leases(self) -> None:
        """Empty the /dev/shm of devices whose last lease has ended."""
        leased = {slot_of(share) for share in self._context.state.leases}
        for daemon in self._daemons.values():
            if daemon.device.slot in leased:
                daemon.leased = True
            elif daemon.leased and not daemon.querying:
                daemon.querying = True
                self._group.start_soon(self._empty_shared_memory, daemon)

    def end_idle_servers(self, slots: Collection[str]) -> None:
        """End MPS servers without clients: they are processes on these instances."""
        for daemon in self._daemons.values():
            if daemon.device.slot in slots and not daemon.querying:
                daemon.querying = True
                self._group.start_soon(self._end_idle_servers_of, daemon)

    async def stop(self, slot: str) -> None:
        """Stop the daemon of an unused instance that is about to be removed."""
        for daemon in list(self._daemons.values()):
            if daemon.device.slot == slot:
                daemon.device_gone = True
                daemon.scope.cancel()
                await daemon.ended.wait()

    def _start(self, device: MigDevice) -> None:
        daemon = self._daemons[device.uuid] = self._daemon_of(device)
        self._group.start_soon(self._run, daemon)

    def _daemon_of(self, device: MigDevice) -> _ManagedDaemon:
        directories = MpsDirectories.for_device(self._run_dir, device.uuid)
        name = f"{self._context.gpu} {device.slot}"
        host = _MigDaemonHost(self._context, device, self._observer)
        supervisor = DaemonSupervisor(
            host,
            device.uuid,
            directories,
            self._timing,
            name=name,
            shared_memory=self._shared_memory,
        )
        return _ManagedDaemon(device, directories, supervisor)

    async def _run(self, daemon: _ManagedDaemon) -> None:
        """Supervise a daemon until its scope is cancelled, or the group is."""
        try:
            with daemon.scope:
                while not await self._has_directories(daemon):  # noqa: ASYNC110 - a disk sends no event
                    await anyio.sleep(self._timing.longest_delay)
                await daemon.supervisor.run()
        finally:
            if not self._context.hands_over:
                with anyio.CancelScope(shield=True), anyio.move_on_after(LEAVE_DEADLINE):
                    await _release(daemon)
            del self._daemons[daemon.device.uuid]
            daemon.ended.set()

    async def _has_directories(self, daemon: _ManagedDaemon) -> bool:
        try:
            await to_thread.run_sync(daemon.directories.create)
            await to_thread.run_sync(daemon.directories.write_gpu, self._context.gpu.id)
        except OSError as error:
            self._observer.daemon_changed(
                daemon.device, f"its MPS directories cannot be created: {error}"
            )
            return False
        return True

    async def _end_if_unused(self, daemon: _ManagedDaemon) -> None:
        """End an unwanted daemon without clients; with clients, the next round asks again."""
        try:
            if await daemon.supervisor.is_unused() and daemon.unwanted:
                daemon.scope.cancel()
        except ProgramError as error:
            log.debug("mps client query failed", device=daemon.device.uuid, error=str(error))
        finally:
            daemon.querying = False

    async def _end_idle_servers_of(self, daemon: _ManagedDaemon) -> None:
        try:
            await daemon.supervisor.end_idle_servers()
        except ProgramError as error:
            log.debug("mps server shutdown failed", device=daemon.device.uuid, error=str(error))
        finally:
            daemon.querying = False

    async def _empty_shared_memory(self, daemon: _ManagedDaemon) -> None:
        """Empty /dev/shm after the last lease, in a later round if a server runs."""
        try:
            if not await daemon.supervisor.end_idle_servers():
                await daemon.supervisor.empty_shared_memory()
                daemon.leased = False
        except ProgramError as error:  # the supervisor logs it, and suspends the shares
            log.debug("mps cleanup delayed", device=daemon.device.uuid, error=str(error))
        finally:
            daemon.querying = False

    async def _sweep(self, present: dict[str, MigDevice]) -> None:
        """Handle the daemons that a killed agent left on gone or unwanted devices."""
        gpu = self._context.gpu.id
        for uuid in await to_thread.run_sync(leftover_devices, self._run_dir, gpu):
            if uuid in self._daemons:
                continue
            device = present.get(uuid)
            # Meanwhile no other daemon starts in its directories.
            leftover = self._daemons[uuid] = self._daemon_of(device or MigDevice("", uuid, -1))
            try:
                runs = device is not None and await leftover.supervisor.find() is not None
                leftover.device_gone |= not runs
                if not runs or leftover.scope.cancel_called:
                    await _release(leftover)
            finally:
                del self._daemons[uuid]
                leftover.ended.set()
            if device is None or leftover.scope.cancel_called:
                continue  # another round starts it, if there is one
            if runs or uuid in self._wanted:
                self._start(device)  # one that is not wanted ends when it has no clients


async def _release(daemon: _ManagedDaemon) -> None:
    """Quit a daemon without clients; stop it with its clients if its device is gone."""
    if not daemon.device_gone:
        await daemon.supervisor.release()
        return

    await _remove(daemon)


async def _remove(daemon: _ManagedDaemon) -> None:
    try:
        await daemon.supervisor.remove()
    except ProgramError as error:
        log.warning("mps control daemon stop failed", device=daemon.device.uuid, error=str(error))
