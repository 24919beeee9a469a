"""A GPU in MPS's hands: real processes that stand in for NVIDIA's, a simulated GPU under them."""

import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from msgspec.structs import replace

from metagpu.backends import mps as mps_backend
from metagpu.backends.mps import MpsBackend, keeping
from metagpu.backends.mps_daemon import supervision
from metagpu.backends.mps_daemon.control import Control, Folders
from metagpu.backends.mps_daemon.supervisor import Timing
from metagpu.companions import HostCompanions
from metagpu.core import keeper
from metagpu.core.companions import Process
from metagpu.core.driver import ComputeMode
from metagpu.core.facts import GpuFaulted, GpuRecovered
from metagpu.core.gpu import MIB
from metagpu.core.injection import Injection
from metagpu.core.snapshot import GpuState
from metagpu.sim.gpu import SimProcess
from metagpu.sim.spec import simulated
from metagpu.tools import HostTools
from tests.companions_rig import COMPANIONS, StandIn
from tests.heard import heard
from tests.served import Care, in_care
from tests.waiting import until

EXCLUSIVE, DEFAULT = ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.DEFAULT
ALONE = """
version: metagpu/v1
pools: [{name: all, backends: [{backend: mps, unitsPerGpu: 10}]}]
"""
MIXED = """
version: metagpu/v1
pools:
  - name: all
    backends: [{backend: mps, unitsPerGpu: 10}, {backend: whole}]
"""


SHORT = 0.3
TIMING = Timing(
    period=0.05,
    retry=0.02,
    deadline=20.0,
    patience=5.0,
    first_pause=0.05,
    longest_pause=0.2,
    steady=60.0,
)
"""Everything that takes seconds takes a tenth or less, but for an answer: a machine may be busy."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody wait for what takes seconds on a real node."""
    monkeypatch.setattr(MpsBackend, "timing", TIMING)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one that hangs for silent soon, and only that one, however busy the machine is."""
    ask = Control._ask

    async def asked(self: Control, command: str) -> str:
        steer = anyio.Path(self.daemon.env["CUDA_MPS_PIPE_DIRECTORY"]) / "steer"
        hangs = await steer.exists() and await steer.read_text() == "hang"
        return await ask(replace(self, deadline=SHORT) if hangs else self, command)

    monkeypatch.setattr(Control, "_ask", asked)


@dataclass
class Scene:
    """MPS at work on simulated GPUs."""

    care: Care
    folder: Path

    def at(self, index: int = 0) -> StandIn:
        """Give a GPU's control daemon."""
        gpu = self.care.gpus[index].id
        return StandIn(Folders(self.folder / "mps" / gpu), gpu)

    async def becomes(self, wanted: Callable[[GpuState], bool], index: int = 0) -> None:
        """Wait until a GPU's state is so."""
        with anyio.fail_after(30):
            async for state in self.care.registry.watch(
                lambda now: now.gpus[self.care.gpus[index].id]
            ):
                if wanted(state):
                    return

    async def ready(self, index: int = 0) -> None:
        """Wait until MPS gives shares of a GPU."""
        await self.becomes(lambda state: "mps" not in state.suspended, index)

    async def suspended(self, reason: str, index: int = 0) -> None:
        """Wait until MPS gives no shares of a GPU, for a reason that says this."""

        def says(state: GpuState) -> bool:
            pause = state.suspended.get("mps")
            return pause is not None and reason in pause.reason

        await self.becomes(says, index)

    async def mode(self, mode: ComputeMode, index: int = 0) -> None:
        """Wait until a GPU has a compute mode."""

        async def is_so() -> bool:
            return self.care.node.gpus[index].compute_mode == mode

        await until(is_so, 30)

    async def another(self, process: Process, index: int = 0) -> None:
        """Wait until another control daemon than this one runs."""

        async def is_so() -> bool:
            return await self.at(index).process() not in (None, process)

        await until(is_so, 30)

    async def process(self, index: int = 0) -> Process:
        """Give the control daemon that runs."""
        found = await self.at(index).process()
        assert found is not None
        return found


@asynccontextmanager
async def mps(
    folder: Path,
    text: str = ALONE,
    *,
    boards: str = "a100-40gb:1",
    care: Care | None = None,
    stays: bool = False,
) -> AsyncIterator[Scene]:
    """Keep GPUs by MPS while the block lasts; with `stays`, what is left running is left."""
    injection = Injection(run_dir=str(folder))
    node = care.node if care else None

    async with in_care(text, boards=boards, injection=injection, node=node) as made:
        scene = Scene(made, folder)
        try:
            yield scene
        except BaseException:
            stays = False
            raise
    if not stays:
        for index in range(len(made.gpus)):
            await scene.at(index).gone()


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


# --- who has the GPU ----------------------------------------------------------------------------


async def test_the_gpu_is_for_clients_alone_while_it_is_held(tmp_path: Path) -> None:
    """The compute mode is set with the first lease and put back after the last."""
    async with mps(tmp_path) as it:
        await it.ready()
        assert it.care.node.gpus[0].compute_mode == DEFAULT
        share = it.care.share("mps")
        it.care.grant(share)
        await it.mode(EXCLUSIVE)

        it.care.release(share)
        await it.mode(DEFAULT)
        await it.becomes(lambda state: state.owner is None)


async def test_an_operators_own_mode_stays(tmp_path: Path) -> None:
    """What was exclusive before stays exclusive."""
    async with mps(tmp_path) as it:
        it.care.node.gpus[0].compute_mode = EXCLUSIVE
        await it.ready()
        share = it.care.share("mps")
        it.care.grant(share)
        it.care.release(share)
        await it.becomes(lambda state: state.owner is None)

        assert it.care.node.gpus[0].compute_mode == EXCLUSIVE


async def test_without_the_right_shares_are_served(tmp_path: Path) -> None:
    """A mode that cannot be set is told, and costs nobody a share."""
    with heard(keeping) as logs:
        async with mps(tmp_path) as it:
            await it.ready()
            it.care.node.root = False
            share = it.care.share("mps")
            it.care.grant(share)
            it.care.release(share)
            await it.becomes(lambda state: state.owner is None)

    assert "the GPU is not kept for MPS clients alone" in [line["event"] for line in logs]


async def test_a_gpu_is_claimed_and_given_back_clean(tmp_path: Path) -> None:
    """In a mixed pool others get it when the last client, its server and the mode are gone."""
    async with mps(tmp_path, MIXED) as it:
        await it.ready()
        process = await it.process()
        share, whole = it.care.share("mps"), it.care.share("whole")
        it.care.grant(share)
        assert it.care.state().owner == "mps"
        assert whole.id in it.care.state().withheld
        with it.at().client():
            await it.mode(EXCLUSIVE)
            assert await it.at().control.servers() != []
            it.care.release(share)
            await it.care.settled()

            assert it.care.state().owner == "mps"
            assert it.care.node.gpus[0].compute_mode == EXCLUSIVE
        await it.becomes(lambda state: state.owner is None)

        assert whole.id not in it.care.state().withheld
        assert it.care.node.gpus[0].compute_mode == DEFAULT
        assert await it.at().control.servers() == []
        assert await it.process() == process  # the control daemon itself holds nothing


async def test_a_process_that_stays_keeps_the_gpu(tmp_path: Path) -> None:
    """Nobody else gets a GPU on which something still computes."""
    async with mps(tmp_path, MIXED) as it:
        await it.ready()
        share = it.care.share("mps")
        it.care.node.add_process(it.care.node.gpus[0], SimProcess(4711, 100 * MIB))
        it.care.grant(share)
        await it.mode(EXCLUSIVE)
        it.care.release(share)
        await it.becomes(lambda state: "mps" in state.cleaning)
        await it.care.settled()
        assert it.care.state().owner == "mps"

        it.care.node.end_process(it.care.node.gpus[0], 4711)
        await it.becomes(lambda state: state.owner is None)


async def test_a_gpu_that_is_used_again_is_not_given_back(tmp_path: Path) -> None:
    """A container that comes while it is cleaned has it, and it stays exclusive."""
    async with mps(tmp_path, MIXED) as it:
        await it.ready()
        share, other = it.care.share("mps"), it.care.share("mps", 1)
        it.care.grant(share)
        with it.at().client():
            await it.mode(EXCLUSIVE)
            it.care.release(share)
            await it.becomes(lambda state: "mps" in state.cleaning)
            it.care.grant(other)
        await it.care.settled()

        assert it.care.state().owner == "mps"
        assert it.care.node.gpus[0].compute_mode == EXCLUSIVE


async def test_a_reset_gpu_is_made_exclusive_again(tmp_path: Path) -> None:
    """A reset makes a GPU forget its mode; with its recovery it is for clients alone again."""
    async with mps(tmp_path) as it:
        await it.ready()
        it.care.grant(it.care.share("mps"))
        await it.mode(EXCLUSIVE)
        gpu = it.care.gpus[0].id
        it.care.registry.apply(GpuFaulted(gpu, "XID 79", at=1.0))
        it.care.node.gpus[0].compute_mode = DEFAULT
        await it.care.settled()
        it.care.registry.apply(GpuRecovered(gpu, "it passed its checks", at=2.0))

        await it.mode(EXCLUSIVE)


# --- ends and new beginnings --------------------------------------------------------------------


async def test_the_next_daemon_adopts(tmp_path: Path) -> None:
    """A control daemon with clients is left running, found again, and its clients feel nothing."""
    async with mps(tmp_path, stays=True) as first:
        await first.ready()
        process = await first.process()
        connection = first.at().client()
        connection.__enter__()
        first.care.grant(first.care.share("mps"))
        await first.mode(EXCLUSIVE)

    assert await first.process() == process
    with heard(supervision) as logs:
        async with mps(tmp_path, care=first.care) as second:
            await second.ready()
            assert await second.process() == process
            assert len(await second.at().control.servers()) == 1
            second.care.grant(second.care.share("mps"))
            await second.mode(EXCLUSIVE)
            second.care.release(second.care.share("mps"))
            connection.__exit__(None, None, None)
            await second.mode(DEFAULT)

    assert {"event": "MPS control daemon adopted", "pid": process.pid} in [
        {"event": line["event"], "pid": line.get("pid")} for line in logs
    ]


async def test_other_options_adopt_too(tmp_path: Path) -> None:
    """A reload that changes the units of a GPU in use does not touch its control daemon."""
    async with mps(tmp_path) as it:
        await it.ready()
        process = await it.process()
        it.care.grant(it.care.share("mps"))
        it.care.keep(ALONE.replace("10", "5"))
        await it.becomes(lambda state: len(state.shares) == 5)
        await it.ready()

        assert await it.process() == process


async def test_one_that_nobody_uses_ends_with_the_daemon(tmp_path: Path) -> None:
    """Without clients and leases it is quit: its process is gone, and its pid file with it."""
    async with mps(tmp_path) as it:
        await it.ready()
        process = await it.process()

    with anyio.fail_after(30):
        await COMPANIONS.ended(process)
    assert await it.at().process() is None
    assert await to_thread.run_sync(it.at().folders.pid) is None


async def test_a_pool_that_drops_mps_quits_it(tmp_path: Path) -> None:
    """When the last client is gone under a configuration without MPS, all of it is gone."""
    async with mps(tmp_path, MIXED) as it:
        await it.ready()
        process, share = await it.process(), it.care.share("mps")
        it.care.grant(share)
        await it.mode(EXCLUSIVE)
        it.care.keep(MIXED.replace("{backend: mps, unitsPerGpu: 10}, ", ""))
        await it.care.settled()
        assert await it.process() == process

        it.care.release(share)
        with anyio.fail_after(30):
            await COMPANIONS.ended(process)
        assert it.care.node.gpus[0].compute_mode == DEFAULT


async def test_a_killed_daemons_mode_is_put_back(tmp_path: Path) -> None:
    """What was set by a daemon that was killed is put back by the next, if nobody needs it."""
    async with mps(tmp_path) as first:
        await first.ready()
    await to_thread.run_sync(first.at().folders.note_mode, "DEFAULT")
    first.care.node.gpus[0].compute_mode = EXCLUSIVE

    async with mps(tmp_path, care=first.care) as second:
        await second.mode(DEFAULT)
        await second.ready()


async def test_folders_let_in_whom_they_should(tmp_path: Path) -> None:
    """Each GPU's are its own; others pass through the outer ones, and see nothing of them."""
    async with mps(tmp_path) as it:
        await it.ready()
        folders = it.at().folders

        def mode(folder: Path) -> int:
            return stat.S_IMODE(folder.stat().st_mode)

        assert mode(folders.home.parent) == mode(folders.home) == 0o711
        assert mode(folders.pipes) == mode(folders.logs) == 0o755
        assert mode(folders.shm) == 0o1777
