"""Control daemons that an earlier agent started, with their folders and mounts."""

from collections.abc import Sequence
from pathlib import Path

from anyio import to_thread

from metagpu.backends.common.mps_daemon.control import MpsDirectories
from metagpu.backends.common.mps_daemon.decisions import MpsDaemonTiming
from metagpu.backends.common.mps_daemon.supervisor import DaemonSupervisor, format_pids
from metagpu.core.contracts.driver import ComputeMode, GpuProcess
from metagpu.core.contracts.leftovers import AbandonedNode, Leftover
from metagpu.core.contracts.programs import Daemons
from metagpu.core.errors import ProgramError
from metagpu.core.model.gpu import GpuId


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


async def find_control_daemons(node: AbandonedNode) -> Sequence[Leftover]:
    """Find the control daemon and the folders of each device below the run folder."""
    found = await to_thread.run_sync(_list_directories, node.run_dir)
    return [await _find(node, directories, mode) for directories, mode in found]


def _list_directories(run_dir: Path) -> list[tuple[MpsDirectories, str | None]]:
    """List the directories of control daemons, each with the compute mode to restore."""
    found = (MpsDirectories(home) for home in sorted((run_dir / "mps").glob("*")))
    return [(it, it.read_compute_mode()) for it in found]


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
