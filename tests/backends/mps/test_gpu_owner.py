"""A GPU with MPS as its owner: real processes in place of NVIDIA's, on a simulated GPU."""

import stat
from pathlib import Path

import anyio
import pynvml
import pytest
from anyio import to_thread

from metagpu.backends.common.mps_daemon import supervisor
from metagpu.backends.mps import backend
from metagpu.core.availability.conflict import conflicting_shares
from metagpu.core.availability.reasons import availability_of
from metagpu.core.errors import ProgramError
from metagpu.core.model.gpu import MIB
from metagpu.core.model.shares import UNKNOWN_BACKEND, Holder, ShareId
from metagpu.core.state.facts import EarlierLeases, GpuFaulted, GpuRecovered, LeasesObserved
from metagpu.host.daemons import HostDaemons
from metagpu.sim.machine.gpu import SimProcess
from tests.backends.mps.rig import ALONE, DEFAULT, EXCLUSIVE, MIXED, mps
from tests.rigs.daemons import DAEMONS
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes

# --- who has the GPU ----------------------------------------------------------------------------


async def test_the_gpu_is_for_clients_alone_while_it_is_held(tmp_path: Path) -> None:
    """The compute mode is set with the first lease and put back after the last."""
    async with mps(tmp_path) as scene:
        await scene.ready()
        assert scene.care.node.gpus[0].compute_mode == DEFAULT
        share = scene.care.share("mps")
        scene.care.claim(share)
        await scene.mode(EXCLUSIVE)

        scene.care.release(share)
        await scene.mode(DEFAULT)
        await scene.becomes(lambda state: state.owner is None)


async def test_an_operators_own_mode_stays(tmp_path: Path) -> None:
    """An exclusive mode that the operator set stays exclusive."""
    async with mps(tmp_path) as scene:
        scene.care.node.gpus[0].compute_mode = EXCLUSIVE
        await scene.ready()
        share = scene.care.share("mps")
        scene.care.claim(share)
        scene.care.release(share)
        await scene.becomes(lambda state: state.owner is None)

        assert scene.care.node.gpus[0].compute_mode == EXCLUSIVE


async def test_without_permission_shares_are_served(tmp_path: Path) -> None:
    """A mode that cannot be set is logged, and costs no share."""
    with capture_module_logs(backend) as logs:
        async with mps(tmp_path) as scene:
            await scene.ready()
            scene.care.node.root = False
            share = scene.care.share("mps")
            scene.care.claim(share)
            scene.care.release(share)
            await scene.becomes(lambda state: state.owner is None)

    assert "exclusive compute mode not set" in [line["event"] for line in logs]


async def test_a_gpu_is_owned_and_cleaned_up(tmp_path: Path) -> None:
    """In a mixed pool other backends wait for the end of the last client, server and mode."""
    async with mps(tmp_path, MIXED) as scene:
        await scene.ready()
        process = await scene.process()
        share, whole = scene.care.share("mps"), scene.care.share("whole")
        scene.care.claim(share)
        assert scene.care.state().owner == "mps"
        assert whole.id in conflicting_shares(scene.care.state())
        with scene.at().client():
            await scene.mode(EXCLUSIVE)
            await scene.at().servers()
            scene.care.release(share)
            await scene.care.settled()

            assert scene.care.state().owner == "mps"
            assert scene.care.node.gpus[0].compute_mode == EXCLUSIVE
        await scene.becomes(lambda state: state.owner is None)

        assert whole.id not in conflicting_shares(scene.care.state())
        assert scene.care.node.gpus[0].compute_mode == DEFAULT
        assert await scene.at().control.servers() == []
        assert await scene.process() == process  # the control daemon itself holds nothing


async def test_a_process_that_stays_keeps_the_gpu(tmp_path: Path) -> None:
    """No other backend gets a GPU with a process."""
    async with mps(tmp_path, MIXED) as scene:
        await scene.ready()
        share = scene.care.share("mps")
        scene.care.node.start_process(scene.care.node.gpus[0], SimProcess(4711, 100 * MIB))
        scene.care.claim(share)
        await scene.mode(EXCLUSIVE)
        scene.care.release(share)
        await scene.becomes(lambda state: "mps" in state.cleanup.since)
        await scene.care.settled()
        assert scene.care.state().owner == "mps"

        scene.care.node.end_process(scene.care.node.gpus[0], 4711)
        await scene.becomes(lambda state: state.owner is None)


async def test_a_gpu_that_is_used_again_is_not_cleaned_up(tmp_path: Path) -> None:
    """A container during the cleanup gets the GPU, which stays exclusive."""
    async with mps(tmp_path, MIXED) as scene:
        await scene.ready()
        share, other = scene.care.share("mps"), scene.care.share("mps", 1)
        scene.care.claim(share)
        with scene.at().client():
            await scene.mode(EXCLUSIVE)
            scene.care.release(share)
            await scene.becomes(lambda state: "mps" in state.cleanup.since)
            scene.care.claim(other)
        await scene.care.settled()

        assert scene.care.state().owner == "mps"
        assert scene.care.node.gpus[0].compute_mode == EXCLUSIVE


async def test_a_reset_gpu_is_set_exclusive_again(tmp_path: Path) -> None:
    """A reset clears the GPU's mode; the recovery sets it again."""
    async with mps(tmp_path) as scene:
        await scene.ready()
        scene.care.claim(scene.care.share("mps"))
        await scene.mode(EXCLUSIVE)
        gpu = scene.care.gpus[0].id
        scene.care.registry.apply(GpuFaulted(gpu, "XID 79", at=1.0))
        scene.care.node.gpus[0].compute_mode = DEFAULT
        await scene.care.settled()
        scene.care.registry.apply(GpuRecovered(gpu, "it passed its checks", at=2.0))

        await scene.mode(EXCLUSIVE)


async def test_shared_memory_is_emptied_after_the_last_lease(tmp_path: Path) -> None:
    """Files of containers in /dev/shm stay while one of them holds a share, and no longer."""
    async with mps(tmp_path) as scene:
        await scene.ready()
        share, other = scene.care.share("mps"), scene.care.share("mps", 1)
        shm = scene.at().folders.shm
        scene.care.claim(share)
        scene.care.claim(other)
        await scene.mode(EXCLUSIVE)
        (shm / "torch_1").write_bytes(b"x" * 4096)
        (shm / "deep" / "deeper").mkdir(parents=True)
        scene.care.release(share)
        await scene.care.settled()
        assert (shm / "torch_1").exists()

        scene.care.release(other)
        await scene.becomes(lambda state: state.owner is None)
        assert list(shm.iterdir()) == []
        assert stat.S_IMODE(shm.stat().st_mode) == 0o1777


# --- ends and new beginnings --------------------------------------------------------------------


async def test_the_next_daemon_adopts(tmp_path: Path) -> None:
    """A control daemon with clients survives a restart of the agent and is adopted."""
    async with mps(tmp_path, stays=True) as first:
        await first.ready()
        process = await first.process()
        connection = first.at().client()
        connection.__enter__()
        first.care.claim(first.care.share("mps"))
        await first.mode(EXCLUSIVE)

    assert await first.process() == process
    with capture_module_logs(supervisor) as logs:
        async with mps(tmp_path, care=first.care) as second:
            await second.ready()
            assert await second.process() == process
            assert len(await second.at().servers()) == 1
            second.care.claim(second.care.share("mps"))
            await second.mode(EXCLUSIVE)
            second.care.release(second.care.share("mps"))
            connection.__exit__(None, None, None)
            await second.mode(DEFAULT)

    assert {"event": "mps control daemon adopted", "pid": process.pid} in [
        {"event": line["event"], "pid": line.get("pid")} for line in logs
    ]


async def test_other_options_adopt_too(tmp_path: Path) -> None:
    """A reload that changes the units of a GPU in use does not touch its control daemon."""
    async with mps(tmp_path) as scene:
        await scene.ready()
        process = await scene.process()
        scene.care.claim(scene.care.share("mps"))
        scene.care.apply(ALONE.replace("10", "5"))
        await scene.becomes(lambda state: len(state.shares) == 5)
        await scene.ready()

        assert await scene.process() == process


async def test_an_unused_daemon_ends_with_the_agent(tmp_path: Path) -> None:
    """A daemon without clients and leases is quit."""
    async with mps(tmp_path) as scene:
        await scene.ready()
        process = await scene.process()

    with anyio.fail_after(30):
        await DAEMONS.wait_ended(process)
    assert await scene.at().process() is None


@pytest.mark.parametrize("what", ["unread", "renamed"])
async def test_a_daemon_that_may_serve_a_pod_outlives_the_agent(tmp_path: Path, what: str) -> None:
    """A pod that does not compute now is no client, and finds its control daemon later.

    The leases may not be known yet, or name a share that is on offer no more.
    """
    async with mps(tmp_path, stays=True) as scene:
        await scene.ready()
        process, registry = await scene.process(), scene.care.registry
        if what == "unread":
            registry.apply(EarlierLeases("the checkpoint is not read yet"))
        else:
            held = ShareId(f"{scene.care.gpus[0].id}::p99")
            registry.apply(LeasesObserved({held: Holder("team", "alice", "main")}, at=1.0))
            assert scene.care.state().owner == UNKNOWN_BACKEND

    try:
        assert await scene.at().process() == process
    finally:
        await scene.at().gone()


async def test_a_pool_that_drops_mps_quits_it(tmp_path: Path) -> None:
    """After the last client under a configuration without MPS the daemon and its files are gone."""
    async with mps(tmp_path, MIXED) as scene:
        await scene.ready()
        process, share = await scene.process(), scene.care.share("mps")
        scene.care.claim(share)
        await scene.mode(EXCLUSIVE)
        scene.care.apply(MIXED.replace("{backend: mps, unitsPerGpu: 10}, ", ""))
        await scene.care.settled()
        assert await scene.process() == process

        scene.care.release(share)
        with anyio.fail_after(30):
            await DAEMONS.wait_ended(process)
        assert scene.care.node.gpus[0].compute_mode == DEFAULT


@pytest.mark.parametrize("returns", [False, True], ids=["ended", "returned"])
async def test_a_pods_mps_goes_on_where_no_pool_has_mps_any_more(
    tmp_path: Path, *, returns: bool
) -> None:
    """A daemon that starts with other pools serves the pod, and then frees the GPU of all of it.

    Other backends would find an exclusive GPU. A pool that has MPS again takes over.
    """
    async with mps(tmp_path, MIXED, stays=True) as first:
        await first.ready()
        process, share = await first.process(), first.care.share("mps")
        first.care.claim(share)
        await first.mode(EXCLUSIVE)

    alone = MIXED.replace("{backend: mps, unitsPerGpu: 10}, ", "")
    async with mps(tmp_path, alone, care=first.care, unread=True) as second:
        registry = second.care.registry
        registry.apply(LeasesObserved({share.id: Holder("team", "alice", "main")}, at=1.0))
        registry.apply(EarlierLeases(""))
        await second.care.settled()
        if returns:
            second.care.apply(MIXED)
            await second.becomes(lambda state: "mps" in state.suspended)
            await second.ready()
        assert await first.process() == process
        assert first.care.node.gpus[0].compute_mode == EXCLUSIVE

        second.care.release(share)
        await second.becomes(lambda state: state.owner is None)
        await second.mode(DEFAULT)
        if not returns:
            with anyio.fail_after(30):
                await DAEMONS.wait_ended(process)


async def test_a_killed_daemons_mode_is_put_back(tmp_path: Path) -> None:
    """A mode that a killed agent set is reset by the next, if no lease needs it."""
    async with mps(tmp_path) as first:
        await first.ready()
    await to_thread.run_sync(first.at().folders.save_compute_mode, "DEFAULT")
    first.care.node.gpus[0].compute_mode = EXCLUSIVE

    async with mps(tmp_path, care=first.care) as second:
        await second.mode(DEFAULT)
        await second.ready()


async def test_a_failed_reading_does_not_forget_the_mode(tmp_path: Path) -> None:
    """The mode is put back, although NVML did not answer in between."""
    with capture_module_logs(backend) as logs:
        async with mps(tmp_path) as scene:
            await scene.ready()
            share, gpu = scene.care.share("mps"), scene.care.gpus[0].id
            scene.care.claim(share)
            await scene.mode(EXCLUSIVE)
            scene.care.registry.apply(GpuFaulted(gpu, "XID 79", at=1.0))
            await scene.care.settled()
            scene.care.node.gpus[0].failure = pynvml.NVML_ERROR_UNKNOWN
            scene.care.registry.apply(GpuRecovered(gpu, "it passed its checks", at=2.0))
            await becomes(lambda: logs)
            scene.care.node.gpus[0].failure = None
            scene.care.release(share)
            await scene.becomes(lambda state: state.owner is None)

    assert scene.care.node.gpus[0].compute_mode == DEFAULT


async def test_a_mode_that_cannot_be_put_back_is_tried_again(tmp_path: Path) -> None:
    """NVML may not answer at the start of an agent that finds the mode of a killed one."""
    async with mps(tmp_path) as first:
        await first.ready()
    await to_thread.run_sync(first.at().folders.save_compute_mode, "DEFAULT")
    simulated = first.care.node.gpus[0]
    simulated.compute_mode = EXCLUSIVE
    first.care.node.root = False

    with capture_module_logs(backend) as logs:
        async with mps(tmp_path, care=first.care) as second:
            await becomes(lambda: "compute mode not restored" in [line["event"] for line in logs])
            first.care.node.root = True
            await second.mode(DEFAULT)
            await second.ready()


async def test_folders_have_restricted_modes(tmp_path: Path) -> None:
    """Each GPU's folders are its own; other users pass the outer ones, and list nothing."""
    async with mps(tmp_path) as scene:
        await scene.ready()
        folders = scene.at().folders

        def mode(folder: Path) -> int:
            return stat.S_IMODE(folder.stat().st_mode)

        assert mode(folders.home.parent) == mode(folders.home) == 0o711
        assert mode(folders.pipes) == mode(folders.logs) == 0o755
        assert mode(folders.shm) == 0o1777


async def test_shared_memory_that_stays_suspends_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's state has the reason, no container sees the files of another, and it passes."""
    stays = ProgramError("/shm cannot be emptied: Operation not permitted; metagpu needs FOWNER")
    emptied = HostDaemons.empty

    async def empty(daemons: HostDaemons, folder: Path) -> None:
        if folder.name == "shm" and not allowed:
            raise stays
        await emptied(daemons, folder)

    allowed: list[bool] = []
    monkeypatch.setattr(HostDaemons, "empty", empty)
    with capture_module_logs(supervisor) as logs:
        async with mps(tmp_path) as scene:
            await scene.ready()
            share = scene.care.share("mps")
            scene.care.claim(share)
            await scene.mode(EXCLUSIVE)
            scene.care.release(share)
            await scene.suspended(f"what its containers left stays: {stays}")
            await scene.care.settled()
            assert scene.care.state().owner == "mps"
            assert share.id in availability_of(scene.care.state()).unlisted

            allowed.append(True)
            await scene.becomes(lambda state: state.owner is None and "mps" not in state.suspended)
    assert [log["event"] for log in logs].count("mps shared memory not emptied") == 1
