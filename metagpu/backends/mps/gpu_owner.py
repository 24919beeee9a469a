"""The owner of one GPU under MPS: control daemon, compute mode, and cleanup."""

import anyio
import structlog
from anyio import to_thread

from metagpu.backends.common.mps_daemon.control import MpsDirectories
from metagpu.backends.common.mps_daemon.decisions import MpsDaemonTiming
from metagpu.backends.common.mps_daemon.supervisor import (
    LEAVE_DEADLINE,
    DaemonSupervisor,
    format_pids,
)
from metagpu.core.contracts.backend import GpuContext
from metagpu.core.contracts.driver import ComputeMode
from metagpu.core.errors import DriverError, ProgramError
from metagpu.core.model.snapshot import GpuState

log = structlog.get_logger()


async def run_gpu_owner(
    context: GpuContext, directories: MpsDirectories, timing: MpsDaemonTiming, shared_memory: int
) -> None:
    """Keep a control daemon for a GPU until cancelled.

    At the end the daemon quits if it is unused. If it has clients, or a container holds a share,
    or another metagpu takes the GPU over, it goes on, and the next owner of the GPU adopts it.

    Raises:
        OSError: if its directories cannot be created.
    """
    await to_thread.run_sync(directories.create)
    name, device = str(context.gpu), context.gpu.id
    supervisor = DaemonSupervisor(
        context, device, directories, timing, name=name, shared_memory=shared_memory
    )

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(supervisor.run)
            group.start_soon(_GpuOwner(context, directories, timing, supervisor).run)
    finally:
        if not context.hands_over:
            with anyio.CancelScope(shield=True), anyio.move_on_after(LEAVE_DEADLINE):
                await supervisor.release()


class _GpuOwner:
    """The compute mode of a GPU: exclusive while shares are held, then restored."""

    def __init__(
        self,
        context: GpuContext,
        directories: MpsDirectories,
        timing: MpsDaemonTiming,
        supervisor: DaemonSupervisor,
    ) -> None:
        self._context = context
        self._directories = directories
        self._timing = timing
        self._supervisor = supervisor
        self._log = log.bind(gpu=str(context.gpu))

    async def run(self) -> None:
        """Make the GPU exclusive while containers hold shares; clean it up after."""
        context = self._context
        await self._supervisor.checked.wait()
        await self._restore_leftover_mode()

        while True:
            # A reset GPU has forgotten its mode: the loop sets it again when the GPU recovers.
            await context.wait_until(lambda state: self._owns(state) and state.verdict.healthy)
            await self._make_exclusive()
            await context.wait_until(
                lambda state: (
                    not self._owns(state) or not state.verdict.healthy or self._needs_cleanup(state)
                )
            )
            if (since := context.cleanup_due_since) is not None:
                await self._clean_up(since)

    def _owns(self, state: GpuState) -> bool:
        return state.owner == self._context.backend

    def _needs_cleanup(self, state: GpuState) -> bool:
        return self._context.backend in state.cleaning

    async def _make_exclusive(self) -> None:
        """Keep programs that are no MPS clients off the GPU, and save the mode of before."""
        try:
            mode = await self._context.compute_mode()
            if mode in (None, ComputeMode.EXCLUSIVE_PROCESS):
                return
            await to_thread.run_sync(self._directories.save_compute_mode, mode.name)
            await self._context.set_compute_mode(ComputeMode.EXCLUSIVE_PROCESS)
        except DriverError as error:
            await to_thread.run_sync(self._directories.discard_compute_mode)
            self._log.warning("exclusive compute mode not set", error=str(error))

    async def _restore_mode(self) -> None:
        saved = await to_thread.run_sync(self._directories.read_compute_mode)
        if saved is not None:
            await self._context.set_compute_mode(
                ComputeMode.__members__.get(saved, ComputeMode.DEFAULT)
            )
            await to_thread.run_sync(self._directories.discard_compute_mode)

    async def _restore_leftover_mode(self) -> None:
        """Restore the mode that a killed agent changed, unless MPS still has the GPU."""
        try:
            adopted = self._supervisor.adopted
            used = self._owns(self._context.state) or (
                adopted and not await self._supervisor.is_unused()
            )
            if not used:
                await self._restore_mode()
        except (ProgramError, DriverError) as error:
            self._log.warning("compute mode not restored", error=str(error))

    async def _clean_up(self, since: float) -> None:
        """Return the GPU once no process is on it; stop if a container is given a share."""
        began, logged = anyio.current_time(), False

        while self._context.cleanup_due_since == since:
            try:
                remaining = await self._remaining_processes()
                if not remaining:
                    await self._restore_mode()
                    await self._supervisor.empty_shared_memory()
                    self._context.cleanup_done(since)
                    return
            except (ProgramError, DriverError) as error:
                remaining = str(error)
            if not logged and anyio.current_time() - began > self._timing.start_timeout:
                logged = True
                self._log.warning("mps cleanup delayed", waits_for=remaining)
            await anyio.sleep(self._timing.retry)

    async def _remaining_processes(self) -> str:
        """End servers without clients; return the remaining processes, empty if none."""
        if remaining := await self._supervisor.end_idle_servers():
            return remaining
        pids = [process.pid for process in await self._context.processes()]
        return f"processes {format_pids(pids)}" if pids else ""
