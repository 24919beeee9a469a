"""A GPU in MPS's hands: real processes that stand in for NVIDIA's, a simulated GPU under them."""

import stat
from pathlib import Path

import anyio
from anyio import to_thread

from metagpu.backends.mps import keeping
from metagpu.backends.mps_daemon import supervision
from metagpu.core.facts import GpuFaulted, GpuRecovered
from metagpu.core.gpu import MIB
from metagpu.sim.gpu import SimProcess
from tests.backends.mps.rig import ALONE, DEFAULT, EXCLUSIVE, MIXED, mps
from tests.companions_rig import COMPANIONS
from tests.heard import heard

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
