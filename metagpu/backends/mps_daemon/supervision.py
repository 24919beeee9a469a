"""Keeps one MPS control daemon: carries out what the supervisor decides about it."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

import anyio
import structlog
from anyio import to_thread

from metagpu.backends.mps_daemon.control import PROGRAM, Control, Folders, control_daemon
from metagpu.backends.mps_daemon.supervisor import (
    Decision,
    Look,
    Step,
    Timing,
    Watch,
    decide,
    not_started,
)
from metagpu.core.companions import Companions, Process
from metagpu.core.driver import GpuProcess
from metagpu.core.errors import DriverError, ToolError, ToolMissing

LEAVE_DEADLINE: Final = 10.0
"""Seconds that whoever keeps a control daemon takes at the end to quit it."""
_FAULT: Final = "FAULT"

log = structlog.get_logger()


class Ground(Protocol):
    """What a control daemon serves, a GPU or a MIG instance, in the hands of its backend."""

    @property
    def companions(self) -> Companions:
        """Programs of the host that run for long."""
        ...

    @property
    def leased(self) -> bool:
        """Whether a container holds a share of it."""
        ...

    def suspend(self, reason: str) -> None:
        """Give no shares of it for now."""
        ...

    def resume(self) -> None:
        """Give shares of it, for the first time or again."""
        ...

    async def processes(self) -> Sequence[GpuProcess]:
        """List the processes on it.

        Raises:
            DriverError: if NVML cannot tell.
        """
        ...


class Supervision:
    """One control daemon, and who uses it.

    Args:
        device: what it serves, as CUDA knows it: the uuid of a GPU or of a MIG device.
        name: the same for people.

    Attributes:
        looked: set once the control daemon was looked at, or for.
        adopted: whether it was running already when we began.
    """

    def __init__(
        self, ground: Ground, device: str, folders: Folders, timing: Timing, *, name: str
    ) -> None:
        self._ground = ground
        self._companions = ground.companions
        self._folders = folders
        self._timing = timing
        self._daemon = control_daemon(device, folders)
        self._control = Control(self._companions, self._daemon, timing.deadline)
        self._process: Process | None = None
        self._servers: frozenset[int] = frozenset()
        self._answered = self._asked_to_end = False
        self._log = log.bind(gpu=name)
        self.looked = anyio.Event()
        self.adopted = False

    async def run(self) -> None:
        """Have a control daemon that answers, for ever."""
        watch = Watch()
        if (found := await self.find()) is not None:
            self.adopted = True
            self._log.info("MPS control daemon adopted", pid=found.pid)

        while True:
            decision = decide(watch, await self._look(), self._timing)
            if decision.step is Step.START:
                decision = await self._start(decision)
            watch = decision.watch
            await self._do(decision)
            self.looked.set()
            await self._wait(decision.wait)

    async def find(self) -> Process | None:
        """Find the control daemon of an earlier daemon of ours, by what it wrote down itself."""
        pid = await to_thread.run_sync(self._folders.pid)
        with suppress(ToolMissing):  # it could not be spoken to
            if pid is not None:
                self._process = await self._companions.find(self._daemon, pid)
        return self._process

    async def unused(self) -> bool:
        """Tell whether nobody can be its client: no container holds a share, and it has none.

        Raises:
            ToolError: if it does not say.
        """
        return not self._ground.leased and not await self._clients()

    async def leave(self) -> None:
        """Quit it if nobody uses it; whoever keeps a control daemon here next finds it else."""
        if self._process is None:
            return

        try:
            if not await self.unused():
                self._log.info("MPS control daemon left to its clients", pid=self._process.pid)
                return
            await self._control.quit()
            await self._companions.ended(self._process)
        except ToolError as error:
            self._log.warning("MPS control daemon left running", error=str(error))

    async def end(self) -> None:
        """End it, asked first, then by force: nobody can use it, or what it served is gone.

        Raises:
            ToolError: if it stays.
        """
        process = self._process or await self.find()
        if process is None:
            return

        self._asked_to_end = True
        with suppress(ToolError, TimeoutError), anyio.fail_after(self._timing.deadline):
            await self._control.quit()
            await self._companions.ended(process)
        await self._companions.kill(process)

    async def left(self) -> str:
        """Let servers end that have no clients; say who of MPS is still there, empty if nobody.

        Raises:
            ToolError: if it does not answer.
        """
        if self._process is None:
            return ""
        if clients := await self._clients():
            return f"MPS clients {listed(clients)}"

        for server in await self._control.servers():
            await self._control.shut_down(server)
        servers = await self._control.servers()
        return f"MPS servers {listed(servers)}" if servers else ""

    async def _clients(self) -> Sequence[int]:
        if self._process is None:
            return []
        servers = await self._control.servers()
        return [pid for server in servers for pid in await self._control.clients(server)]

    async def _look(self) -> Look:
        now = anyio.current_time
        if self._process is None:
            return Look(now(), running=False, problem=await self._end_of_it())

        try:
            await self._control.probe()
            self._answered = True
            fault = await self._fault()
        except ToolError as error:
            return Look(now(), running=True, problem=str(error), used=await self._used())
        return Look(now(), running=True, fault=fault)

    async def _end_of_it(self) -> str:
        """Say how it ended; one that had answered and tidied up after itself was told to end.

        Root of a container may do so: commands are for root, and a container has the pipes.
        """
        words = await self._companions.last_words(self._daemon)
        if self._asked_to_end or not self._answered:
            return words
        if await to_thread.run_sync(self._folders.pid) is not None:
            return words
        return f"it was told to quit, and not by metagpu: a container's root can do so; {words}"

    async def _start(self, decision: Decision) -> Decision:
        try:
            self._process = await self._companions.start(self._daemon)
        except ToolError as error:
            return not_started(
                decision.watch, anyio.current_time(), _how_to_mend(error), self._timing
            )
        self._answered = self._asked_to_end = False
        self._log.info("MPS control daemon started", pid=self._process.pid)
        return decision

    async def _do(self, decision: Decision) -> None:
        match decision.step:
            case Step.SERVE:
                self._ground.resume()
            case Step.SUSPEND:
                self._ground.suspend(decision.reason)
            case Step.END:
                self._ground.suspend(f"{decision.reason}; nobody uses it, it is started again")
                await self._end()
            case Step.START | Step.STAY:
                pass

    async def _wait(self, seconds: float) -> None:
        """Wait so long, or until the control daemon has ended."""
        with anyio.move_on_after(seconds):
            if self._process is None:
                await anyio.sleep_forever()
            else:
                await self._companions.ended(self._process)
                self._process = None

    async def _end(self) -> None:
        """End a control daemon that hangs, unless a share was given while we looked."""
        if self._ground.leased:
            return
        try:
            await self.end()
        except ToolError as error:
            self._ground.suspend(f"the MPS control daemon hangs and stays: {error}")

    async def _fault(self) -> str:
        """Say why the servers take no clients, if a client's fault is why."""
        if not self._ground.leased:
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
        if self._ground.leased:
            return True
        try:
            pids = {process.pid for process in await self._ground.processes()}
        except DriverError:
            return True
        return not pids <= self._servers


def listed(pids: Sequence[int]) -> str:
    """Name processes in a sentence."""
    return ", ".join(map(str, pids))


def _how_to_mend(error: ToolError) -> str:
    if isinstance(error, ToolMissing) and PROGRAM in str(error):
        return (
            f"MPS needs {PROGRAM} of the driver's utilities: install them, or let the daemon's "
            f"container have them through the `utility` capability of NVIDIA's runtime or "
            f"--dev-root ({error})"
        )
    return f"the MPS control daemon could not be started: {error}"
