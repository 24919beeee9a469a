"""Keeps the control daemon of one GPU: carries out what the supervisor decides, and cleans up."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import anyio
import structlog
from anyio import to_thread

from metagpu.backends.mps.control import PROGRAM, Control, Folders, control_daemon
from metagpu.backends.mps.supervisor import (
    Decision,
    Look,
    Step,
    Timing,
    Watch,
    decide,
    not_started,
)
from metagpu.core.companions import Process
from metagpu.core.driver import ComputeMode
from metagpu.core.errors import DriverError, ToolError, ToolMissing
from metagpu.core.served import ServedGpu
from metagpu.core.snapshot import GpuState

LEAVE_DEADLINE: Final = 10.0
"""Seconds that the daemon's own end waits for a control daemon that nobody uses."""
_FAULT: Final = "FAULT"

log = structlog.get_logger()


async def keep(served: ServedGpu, folders: Folders, timing: Timing) -> None:
    """Keep a control daemon for a GPU until cancelled.

    It is left alone then if it has clients, or if a container holds a share: whoever keeps the GPU
    next finds it and goes on. Else it is quit.

    Raises:
        OSError: if its folders cannot be made.
    """
    await to_thread.run_sync(folders.make)
    keeping = _Keeping(served, folders, timing)

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(keeping.supervise)
            group.start_soon(keeping.follow_owner)
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(LEAVE_DEADLINE):
            await keeping.leave()


class _Keeping:
    """One GPU, its control daemon, and who uses them."""

    def __init__(self, served: ServedGpu, folders: Folders, timing: Timing) -> None:
        self._served = served
        self._folders = folders
        self._timing = timing
        self._daemon = control_daemon(served.gpu.id, folders)
        self._control = Control(served.companions, self._daemon, timing.deadline)
        self._process: Process | None = None
        self._servers: frozenset[int] = frozenset()
        self._looked = anyio.Event()
        self._adopted = False
        self._log = log.bind(gpu=str(served.gpu))

    async def supervise(self) -> None:
        """Have a control daemon that answers, for ever."""
        watch = Watch()
        self._process = await self._found()
        if self._process is not None:
            self._adopted = True
            self._log.info("MPS control daemon adopted", pid=self._process.pid)

        while True:
            decision = decide(watch, await self._look(), self._timing)
            if decision.step is Step.START:
                decision = await self._start(decision)
            watch = decision.watch
            await self._do(decision)
            self._looked.set()
            await self._wait(decision.wait)

    async def follow_owner(self) -> None:
        """Let MPS alone use the GPU while containers hold shares of it, and give it back clean."""
        served = self._served
        await self._looked.wait()
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

    async def leave(self) -> None:
        """Quit the control daemon if nobody uses it."""
        if self._process is None:
            return

        try:
            if self._served.leased or await self._clients():
                self._log.info("MPS control daemon left to its clients", pid=self._process.pid)
                return
            await self._control.quit()
            await self._served.companions.ended(self._process)
        except ToolError as error:
            self._log.warning("MPS control daemon left running", error=str(error))

    # --- the control daemon ---------------------------------------------------------------------

    async def _found(self) -> Process | None:
        """Find the control daemon of an earlier daemon of ours, by what it wrote down itself."""
        pid = await to_thread.run_sync(self._folders.pid)
        with suppress(ToolMissing):  # it could not be spoken to
            return None if pid is None else await self._served.companions.find(self._daemon, pid)
        return None

    async def _look(self) -> Look:
        now = anyio.current_time
        if self._process is None:
            words = await self._served.companions.last_words(self._daemon)
            return Look(now(), running=False, problem=words)

        try:
            await self._control.probe()
            fault = await self._fault()
        except ToolError as error:
            return Look(now(), running=True, problem=str(error), used=await self._used())
        return Look(now(), running=True, fault=fault)

    async def _start(self, decision: Decision) -> Decision:
        try:
            self._process = await self._served.companions.start(self._daemon)
        except ToolError as error:
            return not_started(
                decision.watch, anyio.current_time(), _how_to_mend(error), self._timing
            )
        self._log.info("MPS control daemon started", pid=self._process.pid)
        return decision

    async def _do(self, decision: Decision) -> None:
        match decision.step:
            case Step.SERVE:
                self._served.resume()
            case Step.SUSPEND:
                self._served.suspend(decision.reason)
            case Step.END:
                self._served.suspend(f"{decision.reason}; nobody uses it, it is started again")
                await self._end()
            case Step.START | Step.STAY:
                pass

    async def _wait(self, seconds: float) -> None:
        """Wait so long, or until the control daemon has ended."""
        with anyio.move_on_after(seconds):
            if self._process is None:
                await anyio.sleep_forever()
            else:
                await self._served.companions.ended(self._process)
                self._process = None

    async def _end(self) -> None:
        """End a control daemon that hangs: asked first, then by force."""
        if self._process is None or self._served.leased:  # a share was given while we looked
            return

        with suppress(ToolError, TimeoutError), anyio.fail_after(self._timing.deadline):
            await self._control.quit()
            await self._served.companions.ended(self._process)
        try:
            await self._served.companions.kill(self._process)
        except ToolError as error:
            self._served.suspend(f"the MPS control daemon hangs and stays: {error}")

    async def _fault(self) -> str:
        """Say why the servers take no clients, if a client's fault is why."""
        if not self._served.leased:
            return ""

        self._servers = frozenset(await self._control.servers())
        for server in self._servers:
            if (await self._control.status(server)).upper() == _FAULT:
                return (
                    f"a fault of one client stopped MPS server {server}; it takes new clients when "
                    "those it has have ended"
                )
        return ""

    async def _used(self) -> bool:
        """Tell whether anybody may be a client of a control daemon that does not say."""
        if self._served.leased:
            return True
        try:
            pids = {process.pid for process in await self._served.processes()}
        except DriverError:
            return True
        return not pids <= self._servers

    def _mine(self, state: GpuState) -> bool:
        return state.owner == self._served.backend

    def _dirty(self, state: GpuState) -> bool:
        return self._served.backend in state.cleaning

    # --- the GPU --------------------------------------------------------------------------------

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
            used = self._mine(self._served.state) or (self._adopted and await self._clients())
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
        if self._process is not None:
            if clients := await self._clients():
                return f"MPS clients {_listed(clients)}"
            for server in await self._control.servers():
                await self._control.shut_down(server)
            if servers := await self._control.servers():
                return f"MPS servers {_listed(servers)}"

        pids = [process.pid for process in await self._served.processes()]
        return f"processes {_listed(pids)}" if pids else ""

    async def _clients(self) -> Sequence[int]:
        if self._process is None:
            return []
        servers = await self._control.servers()
        return [pid for server in servers for pid in await self._control.clients(server)]


def _listed(pids: Sequence[int]) -> str:
    return ", ".join(map(str, pids))


def _how_to_mend(error: ToolError) -> str:
    if isinstance(error, ToolMissing) and PROGRAM in str(error):
        return (
            f"MPS needs {PROGRAM} of the driver's utilities: install them, or let the daemon's "
            f"container have them through the `utility` capability of NVIDIA's runtime or "
            f"--dev-root ({error})"
        )
    return f"the MPS control daemon could not be started: {error}"
