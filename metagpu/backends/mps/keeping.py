"""Keeps one GPU for MPS: its control daemon, its compute mode, and clean when it is given back."""

import anyio
import structlog
from anyio import to_thread

from metagpu.backends.mps_daemon.control import Folders
from metagpu.backends.mps_daemon.supervision import LEAVE_DEADLINE, Supervision, listed
from metagpu.backends.mps_daemon.supervisor import Timing
from metagpu.core.driver import ComputeMode
from metagpu.core.errors import DriverError, ToolError
from metagpu.core.served import ServedGpu
from metagpu.core.snapshot import GpuState

log = structlog.get_logger()


async def keep(served: ServedGpu, folders: Folders, timing: Timing) -> None:
    """Keep a control daemon for a GPU until cancelled.

    It is left alone then if it has clients, or if a container holds a share: whoever keeps the GPU
    next finds it and goes on. Else it is quit.

    Raises:
        OSError: if its folders cannot be made.
    """
    await to_thread.run_sync(folders.make)
    supervision = Supervision(served, served.gpu.id, folders, timing, name=str(served.gpu))

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(supervision.run)
            group.start_soon(_Owning(served, folders, timing, supervision).follow)
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(LEAVE_DEADLINE):
            await supervision.leave()


class _Owning:
    """Who has the GPU: MPS alone while containers hold shares of it, then anybody."""

    def __init__(
        self, served: ServedGpu, folders: Folders, timing: Timing, supervision: Supervision
    ) -> None:
        self._served = served
        self._folders = folders
        self._timing = timing
        self._supervision = supervision
        self._log = log.bind(gpu=str(served.gpu))

    async def follow(self) -> None:
        """Let MPS alone use the GPU while containers hold shares of it, and give it back clean."""
        served = self._served
        await self._supervision.looked.wait()
        await self._put_back_what_was_left()

        while True:
            # A GPU that was reset has forgotten its mode: it is looked at again when it recovers.
            await served.until(lambda state: self._mine(state) and state.verdict.healthy)
            await self._make_exclusive()
            await served.until(
                lambda state: (
                    not self._mine(state) or not state.verdict.healthy or self._dirty(state)
                )
            )
            if (since := served.since_last_lease) is not None:
                await self._clean(since)

    def _mine(self, state: GpuState) -> bool:
        return state.owner == self._served.backend

    def _dirty(self, state: GpuState) -> bool:
        return self._served.backend in state.cleaning

    async def _make_exclusive(self) -> None:
        """Keep programs that are no clients off the GPU, and note what to put back."""
        try:
            mode = await self._served.compute_mode()
            if mode in (None, ComputeMode.EXCLUSIVE_PROCESS):
                return
            await to_thread.run_sync(self._folders.note_mode, mode.name)
            await self._served.set_compute_mode(ComputeMode.EXCLUSIVE_PROCESS)
        except DriverError as error:
            await to_thread.run_sync(self._folders.forget_mode)
            self._log.warning("the GPU is not kept for MPS clients alone", error=str(error))

    async def _put_back(self) -> None:
        noted = await to_thread.run_sync(self._folders.noted_mode)
        if noted is not None:
            await self._served.set_compute_mode(
                ComputeMode.__members__.get(noted, ComputeMode.DEFAULT)
            )
            await to_thread.run_sync(self._folders.forget_mode)

    async def _put_back_what_was_left(self) -> None:
        """Put back what a daemon that was killed had set, unless MPS has the GPU still."""
        try:
            adopted = self._supervision.adopted
            used = self._mine(self._served.state) or (
                adopted and not await self._supervision.unused()
            )
            if not used:
                await self._put_back()
        except (ToolError, DriverError) as error:
            self._log.warning("the compute mode was not put back", error=str(error))

    async def _clean(self, since: float) -> None:
        """Give the GPU back once no process is on it; stop if it is used again."""
        began, told = anyio.current_time(), False

        while self._served.since_last_lease == since:
            try:
                left = await self._left_on_gpu()
                if not left:
                    await self._put_back()
                    self._served.returned(since)
                    return
            except (ToolError, DriverError) as error:
                left = str(error)
            if not told and anyio.current_time() - began > self._timing.patience:
                told = True
                self._log.warning("the GPU is not clean and stays with MPS", waits_for=left)
            await anyio.sleep(self._timing.retry)

    async def _left_on_gpu(self) -> str:
        """Let the servers end that have no clients; say who is still there."""
        if left := await self._supervision.left():
            return left
        pids = [process.pid for process in await self._served.processes()]
        return f"processes {listed(pids)}" if pids else ""
