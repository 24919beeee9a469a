"""An MPS control daemon's stand-in for tests: real processes, gone when the test ends."""

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio import to_thread

from metagpu.backends.mps_daemon.control import Control, Folders, control_daemon
from metagpu.core.companions import Companion, Process
from metagpu.core.errors import ToolError
from metagpu.host import running
from metagpu.sim.tools import simulated_companions
from tests.waiting import until

COMPANIONS = simulated_companions()


@dataclass
class StandIn:
    """Where the control daemon of a GPU or MIG device stands, and ways to disturb it."""

    folders: Folders
    device: str
    daemon: Companion = field(init=False)

    def __post_init__(self) -> None:
        self.daemon = control_daemon(self.device, self.folders)

    @property
    def control(self) -> Control:
        """Ways to ask it, as the backend has them; a busy machine is given time."""
        return Control(COMPANIONS, self.daemon, deadline=30.0)

    async def process(self) -> Process | None:
        """Give the process that wrote down its number last, if it still runs."""
        pid = await to_thread.run_sync(self.folders.pid)
        found = None if pid is None else await to_thread.run_sync(running.read, pid)
        return found.process if found else None

    def steer(self, how: str) -> None:
        """Let it misbehave, or behave again (an empty word)."""
        (self.folders.pipes / "steer").write_text(how)

    @contextmanager
    def client(self) -> Iterator[None]:
        """Be a client while the block lasts, as a CUDA process is."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.folders.pipes / "control"))
            yield

    @contextmanager
    def command(self, words: str) -> Iterator[None]:
        """Say something on the socket of commands, as root of a container can; wait for nothing."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.folders.pipes / "control_privileged"))
            connection.sendall(words.encode())
            yield

    async def answers(self) -> None:
        """Wait for its first answer."""

        async def is_so() -> bool:
            with suppress(ToolError):
                await self.control.probe()
                return True
            return False

        await until(is_so, 30)

    async def gone(self) -> None:
        """End it, by force, if it still runs."""
        process = await self.process()
        if process is not None:
            await COMPANIONS.kill(process)


@asynccontextmanager
async def stand_in(folder: Path, gpu: str = "GPU-0") -> AsyncIterator[StandIn]:
    """Give a place for a control daemon; whatever was started there is gone at the end."""
    made = StandIn(Folders(folder / "mps" / gpu), gpu)
    await to_thread.run_sync(made.folders.make)
    try:
        yield made
    finally:
        with anyio.CancelScope(shield=True):
            await made.gone()


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[StandIn]:
    """Have a control daemon that answers."""
    async with stand_in(folder) as it:
        await COMPANIONS.start(it.daemon)
        await it.answers()
        yield it
