"""An MPS control daemon's stand-in for tests: real processes that end with the test."""

import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio import to_thread

from metagpu.backends.common.mps_daemon.control import (
    SHARED_MEMORY,
    MpsControl,
    MpsDirectories,
    control_daemon_spec,
)
from metagpu.core.contracts.programs import DaemonProcess, DaemonSpec
from metagpu.core.errors import ProgramError
from metagpu.host.daemons import HostDaemons
from metagpu.sim.machine.programs import sim_daemons
from tests.rigs.waiting import until

DAEMONS = sim_daemons()


@dataclass
class StandIn:
    """The control daemon's stand-in of a GPU or MIG device, with ways to disturb the stand-in."""

    folders: MpsDirectories
    device: str
    daemons: HostDaemons = DAEMONS
    daemon: DaemonSpec = field(init=False)

    def __post_init__(self) -> None:
        self.daemon = control_daemon_spec(self.device, self.folders, SHARED_MEMORY)

    @property
    def control(self) -> MpsControl:
        """The control daemon's client, with a long timeout for busy machines."""
        return MpsControl(self.daemons, self.daemon, deadline=30.0)

    async def process(self) -> DaemonProcess | None:
        """Return the running process."""
        return await self.daemons.find(self.daemon)

    def steer(self, how: str) -> None:
        """Set the stand-in's misbehaviour; an empty word ends the misbehaviour."""
        (self.folders.logs / "steer").write_text(how)

    @contextmanager
    def client(self) -> Iterator[None]:
        """Run a client while the block lasts, as a CUDA process is."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.folders.pipes / "control"))
            yield

    async def quit(self) -> None:
        """Send `quit`, as a container's root can, until the daemon ends.

        A command is lost while the daemon answers another program, such as metagpu's. One that was
        taken has its answer before the process ends: another one would reach the next daemon.
        """
        process = await self.process()
        assert process is not None
        with anyio.fail_after(30):
            while True:
                with suppress(ProgramError):
                    await self.control.quit()
                with anyio.move_on_after(1):
                    return await self.daemons.wait_ended(process)

    async def servers(self) -> Sequence[int]:
        """Return the servers, once there is one: a command beside metagpu's may be lost."""
        found: Sequence[int] = ()

        async def is_there() -> bool:
            nonlocal found
            with suppress(ProgramError):
                found = await self.control.servers()
            return bool(found)

        await until(is_there, 30)
        return found

    async def answers(self) -> None:
        """Wait for the stand-in's first answer."""

        async def is_so() -> bool:
            with suppress(ProgramError):
                await self.control.probe()
                return True
            return False

        await until(is_so, 30)

    async def gone(self) -> None:
        """End the daemon, by force, if it still runs, and unmount its folders."""
        process = await self.process()
        if process is not None:
            await self.daemons.kill(process)
        await self.daemons.unmount(self.daemon)


@asynccontextmanager
async def stand_in(folder: Path, gpu: str = "GPU-0") -> AsyncIterator[StandIn]:
    """Prepare a folder for a control daemon; end every process of the folder after the block."""
    made = StandIn(MpsDirectories(folder / "mps" / gpu), gpu)
    await to_thread.run_sync(made.folders.create)
    try:
        yield made
    finally:
        with anyio.CancelScope(shield=True):
            await made.gone()


@asynccontextmanager
async def serving(folder: Path, gpu: str = "GPU-0") -> AsyncIterator[StandIn]:
    """Run a control daemon that answers."""
    async with stand_in(folder, gpu) as live_stand_in:
        await DAEMONS.start(live_stand_in.daemon)
        await live_stand_in.answers()
        yield live_stand_in
