"""A GPU's control daemon: started, probed, reported, replaced."""

import os
import signal
import time
from pathlib import Path

import anyio
import pynvml
import pytest
from anyio import to_thread
from msgspec.structs import replace

from metagpu.backends.common.mps_daemon import supervisor
from metagpu.backends.common.mps_daemon.control import MpsControl, MpsDirectories
from metagpu.backends.mps import backend as mps_backend
from metagpu.backends.mps.backend import MpsBackend
from metagpu.core.availability.reasons import availability_of
from metagpu.core.contracts.programs import DaemonProcess
from metagpu.core.errors import ProgramError
from metagpu.core.grants.injection import Injection
from metagpu.core.layout import backend_runner
from metagpu.core.model.gpu import MIB
from metagpu.host import processes
from metagpu.host.daemons import HostDaemons
from metagpu.host.programs import HostPrograms
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.spec import build_node
from tests.backends.mps.rig import ALONE, SELDOM, TIMING, Scene, mps
from tests.rigs.daemons import DAEMONS, StandIn
from tests.rigs.gpu_context import run_backends
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import until

SHORT = 0.3


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timeout of a hanging daemon alone, however busy the machine is."""
    ask = MpsControl._send

    async def asked(self: MpsControl, command: str) -> str:
        steer = anyio.Path(self.daemon.env["CUDA_MPS_LOG_DIRECTORY"]) / "steer"
        answer: str | ProgramError | None = None

        async def hangs() -> bool:
            return await steer.exists() and await steer.read_text() == "hang"

        async def until_it_hangs() -> None:
            await until(hangs, 60)
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(until_it_hangs)
            try:
                answer = await ask(self, command)
            except ProgramError as error:
                answer = error
            group.cancel_scope.cancel()

        if answer is None:
            return await ask(replace(self, deadline=SHORT), command)
        if isinstance(answer, ProgramError):
            raise answer
        return answer

    monkeypatch.setattr(MpsControl, "_send", asked)


@pytest.mark.usefixtures("impatient")
async def test_shares_wait_for_the_first_answer(tmp_path: Path) -> None:
    """Shares become Healthy when the GPU's own control daemon has answered."""
    gpu = build_node("a100-40gb:1").gpus[0].id
    before = StandIn(MpsDirectories(tmp_path / "mps" / gpu), gpu)
    await to_thread.run_sync(before.folders.create)
    before.steer("hang")

    async with mps(tmp_path) as scene:
        assert scene.care.state().suspended["mps"].reason == "it is being made ready"
        assert availability_of(scene.care.state()).unlisted == {
            share.id for share in scene.care.state().shares
        }

        before.steer("")
        await scene.ready()
        assert availability_of(scene.care.state()).unlisted == set()
        assert await DAEMONS.find(scene.at().daemon) is not None


async def test_each_gpu_has_its_own(tmp_path: Path) -> None:
    """Two GPUs have two control daemons, and the end of one does not concern the other."""
    async with mps(tmp_path, gpu_models="a100-40gb:2") as scene:
        await scene.ready(0)
        await scene.ready(1)
        first, second = await scene.process(0), await scene.process(1)
        assert first != second

        scene.at(0).steer("refuse")
        await DAEMONS.kill(first)
        await scene.suspended("steered to refuse", 0)
        assert scene.care.state(1).suspended == {}
        scene.at(0).steer("")
        await scene.ready(0)
        assert await scene.process(1) == second
        assert await scene.process(0) != first


async def test_a_crashed_daemon_is_started_again(tmp_path: Path) -> None:
    """A crash is known at once; daemons that end soon are started after growing delays."""
    async with mps(tmp_path) as scene:
        await scene.ready()
        first = await scene.process()
        scene.at().steer("refuse")
        await DAEMONS.kill(first)
        await scene.suspended("(steered to refuse); it is tried again in 0.2 s")

        scene.at().steer("")
        await scene.ready()
        assert await scene.process() != first


async def test_the_end_of_a_daemon_is_known_on_a_busy_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the process that takes longer than the wait for its end still finds the end."""
    opened = processes.open_pidfd

    def open_slowly(process: DaemonProcess) -> int | None:
        time.sleep(4 * TIMING.period)
        return opened(process)

    monkeypatch.setattr(processes, "open_pidfd", open_slowly)
    with capture_module_logs(backend_runner) as reports:
        async with mps(tmp_path) as scene:
            await scene.ready()
            first = await scene.process()
            os.kill(first.pid, signal.SIGKILL)
            await scene.another(first)
            await scene.ready()

    reasons = [line["reason"] for line in reports if line["event"] == "gpu suspended"]
    assert ["the MPS control daemon ended" in reason for reason in reasons] == [True]


async def test_a_daemon_that_a_container_quit_is_restarted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's root may send `quit`: another daemon starts at once, and a log event has it.

    The first ends when its last client does; no container keeps a GPU without a control daemon.
    """
    monkeypatch.setattr(MpsBackend, "timing", SELDOM)
    with capture_module_logs(supervisor) as lines, capture_module_logs(backend_runner) as reports:
        async with mps(tmp_path) as scene:
            await scene.ready()
            first = await scene.process()
            scene.care.claim(scene.care.share("mps"))
            async with anyio.create_task_group() as group:
                with scene.at().client():
                    group.start_soon(scene.at().quit)
                    await anyio.wait_all_tasks_blocked()
            await scene.another(first)
            await scene.ready()

    assert [line["event"] for line in lines].count("mps control daemon started") == 2
    [suspended] = [line for line in reports if line["event"] == "gpu suspended"]
    assert suspended["reason"] == (
        "the MPS control daemon ended (it received `quit`, but not from metagpu: a container's "
        "root can send it); it is started again at once"
    )


@pytest.mark.usefixtures("impatient")
async def test_a_daemon_that_hangs_is_reported_and_recovers(tmp_path: Path) -> None:
    """While containers hold shares the daemon is left alone, suspended until it answers again."""
    async with mps(tmp_path) as scene:
        await scene.ready()
        process = await scene.process()
        scene.care.claim(scene.care.share("mps"))
        scene.at().steer("hang")
        await scene.suspended("the MPS control daemon failed 3 probes: ")
        assert f"did not end within {SHORT} s" in scene.care.state().suspended["mps"].reason

        scene.at().steer("")
        await scene.ready()
        assert await scene.process() == process


async def test_a_wrong_answer_is_reported(tmp_path: Path) -> None:
    """A wrong answer counts as no answer."""
    async with mps(tmp_path) as scene:
        await scene.ready()
        scene.care.claim(scene.care.share("mps"))
        scene.at().steer("garbage")

        await scene.suspended(
            "unexpected answer to get_default_active_thread_percentage: '?\\x07 not what"
        )
        scene.at().steer("")
        await scene.ready()


@pytest.mark.usefixtures("impatient")
async def test_a_hanging_daemon_without_clients_is_replaced(tmp_path: Path) -> None:
    """Without a lease and a process on the GPU a hanging daemon is killed and replaced."""
    async with mps(tmp_path) as scene:
        await scene.ready()
        first = await scene.process()
        scene.at().steer("hang")
        await scene.suspended("it is unused, and metagpu restarts it")
        scene.at().steer("")
        await scene.ready()

        assert await scene.process() != first
        with anyio.fail_after(30):
            await DAEMONS.wait_ended(first)


@pytest.mark.usefixtures("impatient")
async def test_a_process_on_the_gpu_keeps_a_hanging_daemon(tmp_path: Path) -> None:
    """A process on the GPU may be a client, with or without a lease: the daemon stays."""
    async with mps(tmp_path) as scene:
        await scene.ready()
        process = await scene.process()
        scene.care.node.start_process(scene.care.node.gpus[0], SimProcess(4711, 100 * MIB))
        scene.at().steer("hang")
        await scene.suspended("failed 4 probes")

        assert "started again" not in scene.care.state().suspended["mps"].reason
        assert await scene.process() == process
        scene.at().steer("")
        await scene.ready()


@pytest.mark.usefixtures("impatient")
async def test_a_hanging_daemon_that_may_have_clients_is_left_alone(tmp_path: Path) -> None:
    """While NVML lists no processes either, it is suspended; it is replaced once it has none."""
    async with mps(tmp_path) as scene:
        await scene.ready()
        first = await scene.process()
        scene.care.node.gpus[0].failure = pynvml.NVML_ERROR_UNKNOWN
        scene.at().steer("hang")
        await scene.suspended("failed 4 probes")
        assert await scene.at().process() == first

        scene.care.node.gpus[0].failure = None
        await scene.suspended("it is unused, and metagpu restarts it")
        scene.at().steer("")
        await scene.ready()
        assert await scene.process() != first


async def test_a_fault_of_a_client_is_reported(tmp_path: Path) -> None:
    """While the server is in a fault the GPU accepts no new containers: they would fail."""
    async with mps(tmp_path) as scene:
        await scene.ready()
        scene.care.claim(scene.care.share("mps"))
        with scene.at().client():
            scene.at().steer("fault")
            await scene.suspended("a fault of one client stopped MPS server")
            scene.at().steer("")
            await scene.ready()


async def test_a_missing_program_is_reported(tmp_path: Path) -> None:
    """Shares are Unhealthy, the reason has the fix, and the program is searched again."""
    nobody = HostDaemons(HostPrograms(roots=(tmp_path / "driver",)), on_host=False)
    injection = Injection(run_dir=str(tmp_path))

    async with run_backends(ALONE, injection=injection, daemons=nobody) as care:
        scene = Scene(care, tmp_path)
        await scene.suspended(
            "MPS needs nvidia-cuda-mps-control of the driver's utilities: install them, mount the "
            "host's /usr, /lib, /dev and /run/nvidia below /host in the container, or name the "
            "driver's root with --driver-root (there is no nvidia-cuda-mps-control here; looked in"
        )
        await scene.suspended("; it is tried again in 0.2 s")


async def test_replicas_that_cannot_be_served_are_logged(tmp_path: Path) -> None:
    """A pool with more replicas than the GPU's architecture allows gets fewer, and a log event."""
    with capture_module_logs(mps_backend) as logs:
        text = ALONE.replace("unitsPerGpu: 10", "replicas: 60")
        async with mps(tmp_path, text) as scene:
            await scene.ready()
            assert len(scene.care.state().shares) == 48

    [line] = logs
    assert line["event"] == "mps replicas limited to the clients of a gpu"
    assert (line["offered"], line["replicas"]) == (48, 60)
