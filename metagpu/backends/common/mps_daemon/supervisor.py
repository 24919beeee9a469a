"""The supervisor of one MPS control daemon, and the removal of those left behind."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import anyio
import structlog
from anyio import to_thread

from metagpu.backends.common.mps_daemon.control import (
    PROGRAM,
    SHARED_MEMORY,
    MpsControl,
    MpsDirectories,
    control_daemon_spec,
    format_pids,
)
from metagpu.backends.common.mps_daemon.decisions import (
    DaemonAction,
    DaemonDecision,
    DaemonObservation,
    DaemonState,
    MpsDaemonTiming,
    decide,
    decide_after_failed_start,
)
from metagpu.core.contracts.driver import ComputeMode, GpuProcess
from metagpu.core.contracts.leftovers import AbandonedNode, Leftover
from metagpu.core.contracts.programs import DaemonProcess, Daemons
from metagpu.core.errors import DriverError, ProgramError, ProgramMissing
from metagpu.core.model.driver_roots import MOUNT_HOST
from metagpu.core.model.gpu import GpuId

LEAVE_DEADLINE: Final = 10.0
"""Seconds that a backend gives its supervisor at the end, to quit the control daemon."""
_FAULT: Final = "FAULT"
_QUIT: Final = "Exit with status"

log = structlog.get_logger()


class DaemonHost(Protocol):
    """The GPU or MIG instance of a control daemon, as its backend manages it."""

    @property
    def daemons(self) -> Daemons:
        """The long-running programs of the host."""
        ...

    @property
    def leased(self) -> bool:
        """True while a container holds a share of the device, or may hold one."""
        ...

    def suspend(self, reason: str) -> None:
        """Suspend the device's shares."""
        ...

    def resume(self) -> None:
        """Offer the device's shares, for the first time or again."""
        ...

    async def processes(self) -> Sequence[GpuProcess]:
        """List the processes on the device.

        Raises:
            DriverError: if NVML cannot list them.
        """
        ...

    async def stopping_processes(self) -> Collection[int]:
        """Wait until pods are about to be killed; return their processes on the GPU.

        Raises:
            DriverError: if NVML cannot list the processes.
        """
        ...


class DaemonSupervisor:
    """One control daemon: started, probed, suspended, restarted, and ended.

    Args:
        device: CUDA's name of the device: the uuid of a GPU or of a MIG device.
        name: the device's name in logs.
        shared_memory: the bytes of /dev/shm of the daemon and its clients.

    Attributes:
        checked: set after the first check.
        adopted: whether the daemon ran before this supervisor began.
    """

    def __init__(
        self,
        host: DaemonHost,
        device: str,
        directories: MpsDirectories,
        timing: MpsDaemonTiming,
        *,
        name: str,
        shared_memory: int = SHARED_MEMORY,
    ) -> None:
        self._host = host
        self._daemons = host.daemons
        self._directories = directories
        self._timing = timing
        self._daemon = control_daemon_spec(device, directories, shared_memory)
        self._control = MpsControl(self._daemons, self._daemon, timing.deadline)
        self._process: DaemonProcess | None = None
        self._servers: frozenset[int] = frozenset()
        self._answered = self._stopping = False
        self._unclean = ""
        self._log = log.bind(gpu=name)
        self.checked = anyio.Event()
        self.adopted = False

    async def run(self) -> None:
        """Keep a control daemon running, and end clients before they are killed."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._end_stopping_clients)
            await self._keep_running()

    async def _keep_running(self) -> None:
        state = DaemonState()
        if (found := await self.find()) is not None:
            self.adopted = True
            self._log.info("mps control daemon adopted", pid=found.pid)

        while True:
            decision = decide(state, await self._check(), self._timing)
            if decision.action is DaemonAction.START:
                decision = await self._start(decision)
            state = decision.state
            await self._carry_out(decision)
            self.checked.set()
            await self._wait(decision.wait)

    async def find(self) -> DaemonProcess | None:
        """Find the control daemon of an earlier agent."""
        with suppress(ProgramMissing):  # without the program, no command would reach the daemon
            self._process = await self._daemons.find(self._daemon)
        return self._process

    async def is_unused(self) -> bool:
        """Return whether no container holds a share and the daemon has no client.

        Raises:
            ProgramError: if the daemon does not list its clients.
        """
        return not self._host.leased and not await self.clients()

    async def release(self) -> bool:
        """Quit an unused daemon, leave others to the next agent; tell whether it ended."""
        try:
            if self._process is None:
                await self.find()  # `run` was cancelled before it had found one
            if not await self.is_unused():
                self._log.info("mps control daemon left to its clients")
                return False
            if self._process is not None:
                await self._quit(self._process)
            await self._daemons.unmount(self._daemon)
        except (ProgramError, TimeoutError) as error:
            self._log.warning("mps control daemon left running", error=str(error))
            return False
        return True

    async def stop(self) -> None:
        """Stop an unused daemon, or one whose device is gone, if need be by force.

        Raises:
            ProgramError: if the process stays.
        """
        process = self._process or await self.find()
        if process is None:
            return

        self._stopping = True
        with suppress(TimeoutError):
            await self._quit(process)
        await self._daemons.kill(process)

    async def remove(self) -> None:
        """Stop the daemon of a device that is gone, and remove its directories.

        Raises:
            ProgramError: if the process stays, or something stays mounted.
        """
        await self.stop()
        await self._daemons.unmount(self._daemon)
        await to_thread.run_sync(self._directories.remove)

    async def empty_shared_memory(self) -> None:
        """Remove what clients left in /dev/shm, unless a container holds a share.

        Until it is removed, the shares are suspended: the next container would see it.

        Raises:
            ProgramError: if something cannot be removed.
        """
        if self._host.leased:
            return
        try:
            await self._daemons.empty(self._directories.shm)
        except ProgramError as error:
            if self._unclean != (reason := f"what its containers left stays: {error}"):
                self._log.warning("mps shared memory not emptied", error=str(error))
            self._unclean = reason
            self._host.suspend(reason)
            raise
        self._unclean = ""

    async def end_idle_servers(self) -> str:
        """Shut down servers without clients; return the MPS processes that remain, if any.

        Raises:
            ProgramError: if the daemon does not answer.
        """
        if self._process is None:
            return ""
        if clients := await self.clients():
            return f"MPS clients {format_pids(clients)}"

        for server in await self._control.servers():
            await self._control.shut_down(server)
        servers = await self._control.servers()
        return f"MPS servers {format_pids(servers)}" if servers else ""

    async def _quit(self, process: DaemonProcess) -> None:
        """Send `quit`, again if it was lost, and wait for the end, whatever the answer is.

        Raises:
            TimeoutError: it did not end in time.
        """
        with anyio.fail_after(self._timing.deadline):
            while True:
                with suppress(ProgramError):
                    await self._control.quit()
                with anyio.move_on_after(self._timing.retry):
                    return await self._daemons.wait_ended(process)

    async def clients(self) -> Sequence[int]:
        """List the client processes of the daemon.

        Raises:
            ProgramError: if the daemon does not list them.
        """
        return list(await self._control.servers_by_client()) if self._process else []

    async def _end_stopping_clients(self) -> None:
        """End the clients of pods that the kubelet is about to kill.

        A client that is killed amid its work may fail all others, and let new ones hang.
        """
        tried: set[int] = set()
        while True:
            try:
                stopping = frozenset(await self._host.stopping_processes())
                tried &= stopping
                if stopping - tried and self._process is not None:
                    servers = await self._control.servers_by_client()
                    for pid in stopping & servers.keys() - tried:
                        tried.add(pid)
                        try:
                            await self._control.end_client(servers[pid], pid)
                            self._log.info("mps client ended", pid=pid)
                        except ProgramError as error:
                            self._log.warning("mps client not ended", pid=pid, error=str(error))
            except (ProgramError, DriverError) as error:
                self._log.warning("mps client not ended", error=str(error))
            await anyio.sleep(self._timing.retry)

    async def _check(self) -> DaemonObservation:
        now = anyio.current_time
        await self._daemons.limit_output(self._daemon)
        if self._process is None:
            return DaemonObservation(now(), running=False, problem=await self._end_reason())

        try:
            await self._control.probe()
            self._answered = True
            fault = await self._fault()
        except ProgramError as error:
            used = await self._may_be_used()
            return DaemonObservation(now(), running=True, problem=str(error), used=used)
        return DaemonObservation(now(), running=True, fault=fault)

    async def _end_reason(self) -> str:
        """Return how the daemon ended.

        NVIDIA's daemon writes its status as its last line if it received the command `quit`. Root
        of a container can send it: the commands are for root, and a container has the pipes.
        """
        output = await self._daemons.last_output_line(self._daemon)
        if self._stopping or not self._answered or _QUIT not in output:
            return output
        return "it received `quit`, but not from metagpu: a container's root can send it"

    async def _start(self, decision: DaemonDecision) -> DaemonDecision:
        try:
            with anyio.CancelScope(shield=True):  # or it runs, and nobody knows its process
                self._process = process = await self._daemons.start(self._daemon)
        except ProgramError as error:
            return decide_after_failed_start(
                decision.state, anyio.current_time(), _start_problem(error), self._timing
            )
        self._answered = self._stopping = False
        self._log.info("mps control daemon started", pid=process.pid)
        return decision

    async def _carry_out(self, decision: DaemonDecision) -> None:
        match decision.action:
            case DaemonAction.SERVE if self._unclean:
                self._host.suspend(self._unclean)
            case DaemonAction.SERVE:
                self._host.resume()
            case DaemonAction.SUSPEND:
                self._host.suspend(decision.reason)
            case DaemonAction.STOP:
                self._host.suspend(f"{decision.reason}; it is unused, and metagpu restarts it")
                await self._stop_hanging()
            case DaemonAction.START | DaemonAction.WAIT:
                pass

    async def _wait(self, seconds: float) -> None:
        """Wait until the time is over or the daemon has ended."""
        with anyio.move_on_after(seconds):
            if self._process is None:
                await anyio.sleep_forever()
            else:
                await self._daemons.wait_ended(self._process)
                self._process = None

    async def _stop_hanging(self) -> None:
        """Stop a daemon that hangs, unless a container was given a share during the check."""
        if self._host.leased:
            return
        try:
            await self.stop()
        except ProgramError as error:
            self._host.suspend(f"the MPS control daemon hangs and cannot be stopped: {error}")

    async def _fault(self) -> str:
        """Return why the servers take no clients after a client's fault; empty if they do."""
        if not self._host.leased:
            return ""

        self._servers = frozenset(await self._control.servers())
        for server in self._servers:
            if (await self._control.status(server)).upper() == _FAULT:
                return (
                    f"a fault of one client stopped MPS server {server}; it takes new clients when "
                    "those it has have ended"
                )
        return ""

    async def _may_be_used(self) -> bool:
        """Return whether a daemon that does not answer may have clients."""
        if self._host.leased:
            return True
        try:
            pids = {process.pid for process in await self._host.processes()}
        except DriverError:
            return True
        return not pids <= self._servers


def _start_problem(error: ProgramError) -> str:
    if isinstance(error, ProgramMissing) and PROGRAM in str(error):
        return (
            f"MPS needs {PROGRAM} of the driver's utilities: install them, {MOUNT_HOST} in the "
            f"container, or name the driver's root with --driver-root ({error})"
        )
    return f"the MPS control daemon could not be started: {error}"


class _Abandoned:
    """The host of a control daemon that no backend manages any more."""

    leased = False

    def __init__(self, daemons: Daemons) -> None:
        self.daemons = daemons

    def suspend(self, reason: str) -> None:
        """Offer nothing, as before."""

    def resume(self) -> None:
        """Offer nothing, as before."""

    async def processes(self) -> Sequence[GpuProcess]:
        """Return no process: only clients use the daemon."""
        return ()

    async def stopping_processes(self) -> Collection[int]:
        """Return no process: the daemon's clients are left alone."""
        return ()


async def find_control_daemons(node: AbandonedNode) -> Sequence[Leftover]:
    """Find the control daemon and the folders of each device below the run folder."""
    found = await to_thread.run_sync(_list_directories, node.run_dir)
    return [await _find(node, directories, mode) for directories, mode in found]


def _list_directories(run_dir: Path) -> list[tuple[MpsDirectories, str | None]]:
    """List the directories of control daemons, each with the compute mode to restore."""
    found = (MpsDirectories(home) for home in sorted((run_dir / "mps").glob("*")))
    return [(directories, directories.read_compute_mode()) for directories in found]


async def _find(node: AbandonedNode, directories: MpsDirectories, mode: str | None) -> Leftover:
    device = directories.home.name
    supervisor = DaemonSupervisor(
        _Abandoned(node.daemons), device, directories, MpsDaemonTiming(), name=device
    )
    process = await supervisor.find()

    async def remove() -> None:
        await supervisor.remove()
        if mode is not None and GpuId(device) in node.snapshot.gpus:
            before = ComputeMode.__members__.get(mode, ComputeMode.DEFAULT)
            await node.driver.set_compute_mode(GpuId(device), before)

    if process is None:
        return Leftover("MPS folder", str(directories.home), remove)
    stays = await _reason_to_stay(node, device, supervisor)
    where = f"{device}, process {process.pid}"
    return Leftover("MPS control daemon", where, remove, stays, forced=True)


async def _reason_to_stay(node: AbandonedNode, device: str, supervisor: DaemonSupervisor) -> str:
    """Return who uses a control daemon, or may; empty if nobody does.

    The device of a pod under MPS is a GPU, or a MIG device of any GPU.
    """
    try:
        clients = await supervisor.clients()
    except ProgramError as error:
        return f"it does not list its clients: {error}"
    if clients:
        return f"it has clients: {format_pids(clients)}"
    state = node.snapshot.gpus.get(GpuId(device))
    if state is not None and not state.leases and node.holders is not None:
        return ""
    return node.used_by
