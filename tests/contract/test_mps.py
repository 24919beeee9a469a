"""The contract of MPS's control daemon: the stand-in always, and NVIDIA's own.

NVIDIA's run without a GPU: `make e2e` takes them from Debian's archive. Their servers do not: they
are held against the contract on a GPU, with `-m gpu`. No setting of a GPU is changed, and no client
is started.
"""

import os
import re
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from metagpu.backends.common.mps_daemon.control import (
    PROGRAM,
    SHARED_MEMORY,
    MpsControl,
    MpsDirectories,
    control_daemon_spec,
)
from metagpu.core.contracts.programs import DaemonProcess, DaemonSpec
from metagpu.core.errors import ProgramError, ProgramMissing
from metagpu.core.model.gpu import GpuId
from metagpu.host import processes
from metagpu.host.daemons import HostDaemons
from metagpu.host.programs import HostPrograms
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.programs import sim_daemons
from tests.rigs.real_mps import DRIVERS, real_daemons
from tests.rigs.waiting import until

ANSWER = 30.0
STAND_INS = {"stand-in 535": 535, "stand-in 550": 550}
ARCHIVED = {f"archive {driver}": driver for driver in DRIVERS}


class Scene:
    """A running control daemon and its client."""

    def __init__(
        self, daemons: HostDaemons, gpu: GpuId, folder: Path, *, is_real: bool = False
    ) -> None:
        self.daemons = daemons
        self.is_real = is_real
        self.folders = MpsDirectories(folder / "mps" / gpu)
        self.daemon: DaemonSpec = control_daemon_spec(gpu, self.folders, SHARED_MEMORY)
        self.control = MpsControl(daemons, self.daemon, ANSWER)

    async def start(self) -> DaemonProcess:
        """Start the control daemon, and wait for its first answer."""
        process = await self.daemons.start(self.daemon)

        async def answers() -> bool:
            try:
                await self.control.probe()
            except ProgramError:
                return False
            return True

        await until(answers, ANSWER)
        return process


@pytest.fixture(
    params=[
        *STAND_INS,
        *(pytest.param(name, marks=pytest.mark.e2e) for name in ARCHIVED),
        pytest.param("real", marks=pytest.mark.gpu),
    ]
)
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    """Prepare a folder for a control daemon, which is gone at the end."""
    gpu = GpuId("GPU-0")
    if request.param == "real":
        daemons = HostDaemons(HostPrograms(), on_host=os.geteuid() == 0)
        try:
            await daemons.programs.resolve(PROGRAM)
        except ProgramMissing as error:
            pytest.skip(f"NVIDIA's own control daemon was not held against the contract: {error}")
        driver = NvmlDriver()
        async with driver.session():
            gpu = (await driver.survey()).gpus[0].id
    elif request.param in ARCHIVED:
        daemons = await to_thread.run_sync(real_daemons, ARCHIVED[request.param])
    else:
        daemons = sim_daemons(STAND_INS[request.param])

    made = Scene(daemons, gpu, tmp_path, is_real=request.param == "real")
    await to_thread.run_sync(made.folders.create)
    yield made
    if (left := await daemons.find(made.daemon)) is not None:
        await daemons.kill(left)
    await daemons.unmount(made.daemon)


@asynccontextmanager
async def running(scene: Scene) -> AsyncIterator[DaemonProcess]:
    """Run the control daemon while the block lasts."""
    process = await scene.start()
    yield process
    await scene.control.quit()
    with anyio.fail_after(ANSWER):
        await scene.daemons.wait_ended(process)


async def test_the_daemon_is_found_by_its_number(scene: Scene) -> None:
    """The daemon is found while it runs, and not afterwards."""
    async with running(scene) as process:
        assert await scene.daemons.find(scene.daemon) == process

    assert await scene.daemons.find(scene.daemon) is None


async def test_the_daemon_is_found_by_its_lock(scene: Scene) -> None:
    """The kernel knows the daemon by its lock, in every version: no number needs to be written."""
    async with running(scene) as process:
        scene.daemon.pid_file.unlink()
        assert await scene.daemons.find(scene.daemon) == process

    assert processes.lock_holder(scene.daemon.lock) is None


async def test_a_killed_daemon_leaves_no_lock(scene: Scene) -> None:
    """The files of a killed daemon are there, its lock is not, and another one starts."""
    process = await scene.start()
    await scene.daemons.kill(process)
    assert scene.daemon.lock.exists()
    assert await scene.daemons.find(scene.daemon) is None

    async with running(scene) as another:
        assert another != process


async def test_the_last_line_of_a_daemon_that_received_quit(scene: Scene) -> None:
    """A daemon that received `quit` ends with its status, and prints that: so a `quit` is known."""
    async with running(scene):
        pass

    line = await scene.daemons.last_output_line(scene.daemon)
    assert re.search(r"\] Exit with status \d+$", line)


async def test_an_unknown_server_and_an_unknown_command_are_answers(scene: Scene) -> None:
    """The program prints a sentence, and ends with 0: its text alone says that it failed."""

    async def answer(command: str) -> str:
        return await scene.daemons.send_command(scene.daemon, f"{command}\n", ANSWER)

    async with running(scene):
        assert await answer("get_client_list 1") == "Server 1 not found"
        assert await scene.control.clients(1) == []
        assert await answer("shutdown_server 1") == "Server 1 not found"
        # The last line is CUDA's code, 0 where a client was ended.
        refusal = "Server 1 not found\nServer 1 not found!\n1"
        assert await answer("terminate_client 1 2") == refusal
        with pytest.raises(ProgramError, match="answer to terminate_client 1 2: 'Server 1 not"):
            await scene.control.end_client(1, 2)
        assert await answer("nonsense") == 'Unknown command "nonsense"'
        assert await answer("get_server_status 1") in {
            "Server 1 not found",
            'Unknown command "get_server_status"',  # driver 535
        }


async def test_sockets_are_open_to_clients_and_closed_to_commands(scene: Scene) -> None:
    """Every user may be a client; only root may give commands."""
    async with running(scene):
        modes = {
            name: stat.S_IMODE((await anyio.Path(scene.folders.pipes / name).stat()).st_mode)
            for name in ("control", "control_privileged")
        }

    assert modes["control"] & 0o666 == 0o666
    assert modes["control_privileged"] & 0o022 == 0


async def test_there_is_no_server_before_the_first_client(scene: Scene) -> None:
    """No server runs on the GPU until the first client, or a command, starts one."""
    async with running(scene):
        assert await scene.control.servers() == []


async def test_a_server_comes_and_goes(scene: Scene, request: pytest.FixtureRequest) -> None:
    """A server is listed with its state, has no clients, and ends by a command."""
    if "archive" in request.node.name:
        pytest.skip("a server of NVIDIA's ends without a driver: run with -m gpu on a GPU")
    async with running(scene):
        await scene.daemons.send_command(
            scene.daemon, f"start_server -uid {os.getuid()}\n", deadline=ANSWER
        )
        [server] = await scene.control.servers()

        async def active() -> bool:
            known = {"ACTIVE", 'UNKNOWN COMMAND "GET_SERVER_STATUS"'}  # driver 535
            return (await scene.control.status(server)).upper() in known

        await until(active, ANSWER)
        assert await scene.control.clients(server) == []
        await scene.control.shut_down(server)

        async def gone() -> bool:
            return await scene.control.servers() == []

        await until(gone, ANSWER)


async def test_without_a_daemon_the_probe_fails(scene: Scene) -> None:
    """Before and after the control daemon's life the program fails."""
    with pytest.raises(ProgramError, match="Cannot find MPS control daemon process"):
        await scene.control.probe()
    async with running(scene):
        await scene.control.probe()
    with pytest.raises(ProgramError, match="Cannot find MPS control daemon process"):
        await scene.control.probe()


async def test_commands_at_once_are_all_answered(scene: Scene) -> None:
    """The daemon takes one command at a time and loses the others, so they take turns."""
    async with running(scene), anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(scene.control.probe)


async def test_a_command_beside_that_of_another_program_is_lost(scene: Scene) -> None:
    """Two agents that probe at once: one of the probes says that it had no answer."""
    other = MpsControl(scene.daemons, scene.daemon, ANSWER)
    lost = 0

    async def probe(control: MpsControl) -> None:
        nonlocal lost
        try:
            await control.probe()
        except ProgramError as error:
            lost += "no answer" in str(error) or "Cannot send command" in str(error)

    async with running(scene):
        with anyio.fail_after(ANSWER):
            while not lost:
                async with anyio.create_task_group() as group:
                    group.start_soon(probe, scene.control)
                    group.start_soon(probe, other)


async def test_two_daemons_run_side_by_side(scene: Scene, tmp_path: Path) -> None:
    """Each daemon of a MIG device has folders of its own; one ends, and the other answers."""
    # With the driver of a GPU the name has to be one of CUDA's: the number of the GPU is another.
    other = Scene(scene.daemons, GpuId("0" if scene.is_real else "MIG-1"), tmp_path)
    await to_thread.run_sync(other.folders.create)
    async with running(scene) as process:
        try:
            async with running(other) as second:
                assert second != process
                assert await other.daemons.find(other.daemon) == second
                assert await scene.daemons.find(scene.daemon) == process
            await scene.control.probe()
        finally:
            await other.daemons.unmount(other.daemon)


async def test_a_second_daemon_is_refused(scene: Scene) -> None:
    """A daemon of the host that metagpu did not start so is named; its folder stays as it is."""
    async with running(scene) as process:
        with pytest.raises(ProgramError, match=rf"process {process.pid} holds .*control_lock"):
            await scene.daemons.start(scene.daemon)

        assert await scene.daemons.find(scene.daemon) == process
        await scene.control.probe()
