"""What we rely on in MPS's control daemon: the stand-in always, NVIDIA's own with `-m gpu`.

No setting of a GPU is changed, and no client is started.
"""

import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from metagpu.backends.mps_daemon.control import PROGRAM, Control, Folders, control_daemon
from metagpu.companions import HostCompanions
from metagpu.core.companions import Companion, Process
from metagpu.core.errors import ToolError, ToolMissing
from metagpu.core.gpu import GpuId
from metagpu.nvml import Nvml
from metagpu.sim.tools import simulated_companions
from metagpu.tools import HostTools
from tests.waiting import until

ANSWER = 30.0


class Scene:
    """A control daemon that was started, and how it is spoken to."""

    def __init__(self, companions: HostCompanions, gpu: GpuId, folder: Path) -> None:
        self.companions = companions
        self.folders = Folders(folder / "mps" / gpu)
        self.daemon: Companion = control_daemon(gpu, self.folders)
        self.control = Control(companions, self.daemon, ANSWER)

    async def start(self) -> Process:
        """Start it, and wait for its first answer."""
        process = await self.companions.start(self.daemon)

        async def answers() -> bool:
            try:
                await self.control.probe()
            except ToolError:
                return False
            return True

        await until(answers, ANSWER)
        return process

    async def pid(self) -> int | None:
        """Read the number it wrote down."""
        return await to_thread.run_sync(self.folders.pid)


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.gpu)])
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    """Give a place for a control daemon, which is gone at the end."""
    if request.param == "real":
        companions = HostCompanions(HostTools(), mounts=os.geteuid() == 0)
        try:
            await companions.tools.command(PROGRAM)
        except ToolMissing as error:
            pytest.skip(f"NVIDIA's own control daemon was not held against the contract: {error}")
        driver = Nvml()
        async with driver.session():
            gpu = (await driver.survey()).gpus[0].id
    else:
        companions, gpu = simulated_companions(), GpuId("GPU-0")

    made = Scene(companions, gpu, tmp_path)
    await to_thread.run_sync(made.folders.make)
    yield made
    pid = await made.pid()
    left = None if pid is None else await companions.find(made.daemon, pid)
    if left is not None:
        await companions.kill(left)


@asynccontextmanager
async def running(scene: Scene) -> AsyncIterator[Process]:
    """Have it running while the block lasts."""
    process = await scene.start()
    yield process
    await scene.control.quit()
    with anyio.fail_after(ANSWER):
        await scene.companions.ended(process)


async def test_it_is_found_by_what_it_wrote_down(scene: Scene) -> None:
    """Its number stands in its folder while it runs, is that of the process, and goes with it."""
    async with running(scene) as process:
        assert await scene.pid() == process.pid
        assert await scene.companions.find(scene.daemon, process.pid) == process

    assert await scene.pid() is None


async def test_its_sockets_let_clients_in_and_commands_not(scene: Scene) -> None:
    """Every user may be a client; only root may give commands."""
    async with running(scene):
        modes = {
            name: stat.S_IMODE((await anyio.Path(scene.folders.pipes / name).stat()).st_mode)
            for name in ("control", "control_privileged")
        }

    assert modes["control"] & 0o666 == 0o666
    assert modes["control_privileged"] & 0o022 == 0


async def test_there_is_no_server_before_it_is_asked_for(scene: Scene) -> None:
    """Nothing is on the GPU until the first client comes, or somebody starts a server."""
    async with running(scene):
        assert await scene.control.servers() == []


async def test_a_server_comes_and_goes(scene: Scene) -> None:
    """It is listed with its state, has no clients, and ends when it is told to."""
    async with running(scene):
        await scene.companions.ask(
            scene.daemon, f"start_server -uid {os.getuid()}\n", deadline=ANSWER
        )
        [server] = await scene.control.servers()

        async def active() -> bool:
            return (await scene.control.status(server)).upper() == "ACTIVE"

        await until(active, ANSWER)
        assert await scene.control.clients(server) == []
        await scene.control.shut_down(server)

        async def gone() -> bool:
            return await scene.control.servers() == []

        await until(gone, ANSWER)


async def test_nobody_answers_before_and_after(scene: Scene) -> None:
    """Where no control daemon runs the program fails, which is a probe that failed."""
    with pytest.raises(ToolError, match="Cannot find MPS control daemon process"):
        await scene.control.probe()
    async with running(scene):
        await scene.control.probe()
    with pytest.raises(ToolError, match="Cannot find MPS control daemon process"):
        await scene.control.probe()


async def test_a_second_one_in_its_place_ends(scene: Scene) -> None:
    """Two never share a folder: the second ends, and the first goes on."""
    async with running(scene) as process:
        try:
            second = await scene.companions.start(scene.daemon)
        except ToolError:
            pass  # it had ended already
        else:
            with anyio.fail_after(ANSWER):
                await scene.companions.ended(second)

        assert await scene.pid() == process.pid
        await scene.control.probe()
