"""A GPU's control daemon: started, watched, told of, replaced."""

from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from msgspec.structs import replace

from metagpu.backends import mps as mps_backend
from metagpu.backends.mps_daemon import supervision
from metagpu.backends.mps_daemon.control import Control, Folders
from metagpu.companions import HostCompanions
from metagpu.core import keeper
from metagpu.core.errors import ToolError
from metagpu.core.gpu import MIB
from metagpu.core.injection import Injection
from metagpu.sim.gpu import SimProcess
from metagpu.sim.spec import simulated
from metagpu.tools import HostTools
from tests.backends.mps.rig import ALONE, Scene, mps
from tests.companions_rig import COMPANIONS, StandIn
from tests.heard import heard
from tests.served import in_care
from tests.waiting import until

SHORT = 0.3


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one that hangs for silent soon, and only that one, however busy the machine is."""
    ask = Control._ask

    async def asked(self: Control, command: str) -> str:
        steer = anyio.Path(self.daemon.env["CUDA_MPS_PIPE_DIRECTORY"]) / "steer"
        answer: str | ToolError | None = None

        async def hangs() -> bool:
            return await steer.exists() and await steer.read_text() == "hang"

        async def until_it_hangs() -> None:
            await until(hangs, 60)
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(until_it_hangs)
            try:
                answer = await ask(self, command)
            except ToolError as error:
                answer = error
            group.cancel_scope.cancel()

        if answer is None:
            return await ask(replace(self, deadline=SHORT), command)
        if isinstance(answer, ToolError):
            raise answer
        return answer

    monkeypatch.setattr(Control, "_ask", asked)


@pytest.mark.usefixtures("impatient")
async def test_shares_wait_for_the_first_answer(tmp_path: Path) -> None:
    """Nothing is healthy before a control daemon of the GPU's own has answered."""
    gpu = simulated("a100-40gb:1").gpus[0].id
    before = StandIn(Folders(tmp_path / "mps" / gpu), gpu)
    await to_thread.run_sync(before.folders.make)
    before.steer("hang")

    async with mps(tmp_path) as it:
        assert it.care.state().suspended["mps"].reason == "it is being made ready"
        assert it.care.state().shut == {share.id for share in it.care.state().shares}

        before.steer("")
        await it.ready()
        assert it.care.state().shut == set()
        assert await COMPANIONS.find(it.at().daemon, (await it.process()).pid) is not None


async def test_each_gpu_has_its_own(tmp_path: Path) -> None:
    """Two GPUs have two control daemons, and the end of one is none of the other's business."""
    async with mps(tmp_path, boards="a100-40gb:2") as it:
        await it.ready(0)
        await it.ready(1)
        first, second = await it.process(0), await it.process(1)
        assert first != second

        it.at(0).steer("refuse")
        await COMPANIONS.kill(first)
        await it.suspended("steered to refuse", 0)
        assert it.care.state(1).suspended == {}
        it.at(0).steer("")
        await it.ready(0)
        assert await it.process(1) == second
        assert await it.process(0) != first


async def test_one_that_crashes_is_started_again(tmp_path: Path) -> None:
    """Its end is known at once; while it does not last, the pauses grow and are told."""
    async with mps(tmp_path) as it:
        await it.ready()
        first = await it.process()
        it.at().steer("refuse")
        await COMPANIONS.kill(first)
        await it.suspended("(steered to refuse); it is tried again in 0.2 s")

        it.at().steer("")
        await it.ready()
        assert await it.process() != first


async def test_one_that_a_container_told_to_quit_is_there_again_at_once(tmp_path: Path) -> None:
    """A container's root may say `quit`: another is started without a pause, and the log says so.

    The first ends when its last client does; no container keeps a GPU without a control daemon.
    """
    with heard(supervision) as lines, heard(keeper) as told:
        async with mps(tmp_path) as it:
            await it.ready()
            first = await it.process()
            it.care.grant(it.care.share("mps"))
            with it.at().client(), it.at().command("quit"):
                pass
            await it.another(first)
            await it.ready()

    assert [line["event"] for line in lines].count("MPS control daemon started") == 2
    [suspended] = [line for line in told if line["event"] == "GPU suspended"]
    assert suspended["reason"] == (
        "the MPS control daemon ended (it was told to quit, and not by metagpu: a container's root "
        "can do so; it printed nothing); it is started again at once"
    )


@pytest.mark.usefixtures("impatient")
async def test_one_that_hangs_is_told_and_heals(tmp_path: Path) -> None:
    """While containers hold shares it is left alone: suspended until it answers again."""
    async with mps(tmp_path) as it:
        await it.ready()
        process = await it.process()
        it.care.grant(it.care.share("mps"))
        it.at().steer("hang")
        await it.suspended("the MPS control daemon failed 3 probes: ")
        assert f"did not end within {SHORT} s" in it.care.state().suspended["mps"].reason

        it.at().steer("")
        await it.ready()
        assert await it.process() == process


async def test_one_that_answers_nonsense_is_told(tmp_path: Path) -> None:
    """An answer that is none counts as no answer."""
    async with mps(tmp_path) as it:
        await it.ready()
        it.care.grant(it.care.share("mps"))
        it.at().steer("garbage")

        await it.suspended("it answered get_default_active_thread_percentage with '?\\x07 not what")
        it.at().steer("")
        await it.ready()


@pytest.mark.usefixtures("impatient")
async def test_one_that_hangs_and_that_nobody_uses_is_replaced(tmp_path: Path) -> None:
    """With no lease and no process on the GPU it is ended by force, and another is started."""
    async with mps(tmp_path) as it:
        await it.ready()
        first = await it.process()
        it.at().steer("hang")
        await it.suspended("nobody uses it, it is started again")
        it.at().steer("")
        await it.ready()

        assert await it.process() != first
        with anyio.fail_after(30):
            await COMPANIONS.ended(first)


@pytest.mark.usefixtures("impatient")
async def test_a_process_on_the_gpu_keeps_one_that_hangs(tmp_path: Path) -> None:
    """Whoever computes there may be its client, lease or not: it is not touched."""
    async with mps(tmp_path) as it:
        await it.ready()
        process = await it.process()
        it.care.node.add_process(it.care.node.gpus[0], SimProcess(4711, 100 * MIB))
        it.at().steer("hang")
        await it.suspended("failed 4 probes")

        assert "started again" not in it.care.state().suspended["mps"].reason
        assert await it.process() == process
        it.at().steer("")
        await it.ready()


async def test_a_fault_of_a_client_is_told(tmp_path: Path) -> None:
    """While its server is in a fault new containers would fail, so none is let in."""
    async with mps(tmp_path) as it:
        await it.ready()
        it.care.grant(it.care.share("mps"))
        with it.at().client():
            it.at().steer("fault")
            await it.suspended("a fault of one client stopped MPS server")
            it.at().steer("")
            await it.ready()


async def test_a_missing_program_is_told(tmp_path: Path) -> None:
    """Shares are unhealthy, and the reason says what to install; it is looked for again."""
    nobody = HostCompanions(HostTools(roots=(tmp_path / "driver",)), mounts=False)
    injection = Injection(run_dir=str(tmp_path))

    async with in_care(ALONE, injection=injection, companions=nobody) as care:
        scene = Scene(care, tmp_path)
        await scene.suspended(
            "MPS needs nvidia-cuda-mps-control of the driver's utilities: install them, or let the "
            "daemon's container have them through the `utility` capability of NVIDIA's runtime or "
            "--dev-root (there is no nvidia-cuda-mps-control here; looked in PATH"
        )
        await scene.suspended("; it is tried again in 0.2 s")


async def test_replicas_that_cannot_be_served_are_told(tmp_path: Path) -> None:
    """A pool that asks for more than a GPU's architecture allows gets what there is, and a line."""
    with heard(mps_backend) as logs:
        text = ALONE.replace("unitsPerGpu: 10", "replicas: 60")
        async with mps(tmp_path, text) as it:
            await it.ready()
            assert len(it.care.state().shares) == 48

    [line] = logs
    assert line["event"].startswith("a GPU serves fewer clients than the pool has replicas")
    assert (line["offered"], line["replicas"]) == (48, 60)
