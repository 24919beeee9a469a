"""Control daemons of MIG devices: the stand-in always, NVIDIA's own with `make e2e`."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from metagpu.core.contracts.programs import DaemonProcess
from metagpu.host.daemons import HostDaemons
from metagpu.sim.kubelet.kubelet import SimKubelet
from tests.backends.common.mps_daemon.test_supervisor import ARCHIVED, daemons_of
from tests.rigs.daemons import StandIn
from tests.rigs.mig import a_node, created, mig_pool, placements
from tests.rigs.mig_mps import SHARED, control, devices, hurry_mps, pod, shared
from tests.rigs.waiting import until

LIMIT = 30.0

pytestmark = pytest.mark.long


@pytest.fixture(params=["stand-in 535", "stand-in 550", *ARCHIVED])
async def daemons(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[HostDaemons]:
    """Return the control daemons of a driver; none is left after the test."""
    hurry_mps(monkeypatch)
    made = await to_thread.run_sync(daemons_of, str(request.param))
    yield made
    for device in await devices(tmp_path):
        await control(tmp_path, device, made).gone()


async def running(stand_in: StandIn) -> DaemonProcess:
    """Return the running process of a control daemon."""
    process = await stand_in.process()
    assert process is not None
    return process


async def another(stand_in: StandIn, than: DaemonProcess) -> None:
    """Wait until a control daemon other than this one runs."""

    async def runs() -> bool:
        return await stand_in.process() not in (None, than)

    await until(runs, LIMIT)


async def test_each_instance_has_its_own(daemons: HostDaemons, tmp_path: Path) -> None:
    """A control daemon sees its MIG device alone, and only its folders reach the containers."""
    async with shared(tmp_path, daemons=daemons) as scene:
        await scene.until(12, 12, SHARED)
        ones = {m.device for instance, m in created(scene).items() if instance[0] == "1"}
        assert set(await devices(tmp_path)) == ones
        for device in ones:
            process = await running(control(tmp_path, device, daemons))
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")  # noqa: ASYNC240 - of the kernel
            assert f"CUDA_VISIBLE_DEVICES={device}".encode() in environment

        options = (await scene.kubelet.admit(pod("one")))["main"]
        device = options.envs["NVIDIA_VISIBLE_DEVICES"]
        pipes = control(tmp_path, device, daemons).folders.pipes
        assert options.envs["CUDA_MPS_PIPE_DIRECTORY"] == str(pipes)


async def test_a_crash_takes_the_shares_of_its_instance_until_the_next_start(
    daemons: HostDaemons, tmp_path: Path
) -> None:
    """A killed control daemon is started again; those of other instances run on."""
    async with shared(tmp_path, daemons=daemons) as scene:
        await scene.until(12, 12, SHARED)
        first, *others = [control(tmp_path, device, daemons) for device in await devices(tmp_path)]
        before = [await running(other) for other in others]
        killed = await running(first)
        os.kill(killed.pid, signal.SIGKILL)
        await another(first, killed)
        await scene.until(12, 12, SHARED)
        assert [await running(other) for other in others] == before


async def test_a_quit_of_a_containers_root_is_followed_by_a_start(
    daemons: HostDaemons, tmp_path: Path
) -> None:
    """The command `quit`, which a container's root can send, ends the service of a moment."""
    async with shared(tmp_path, daemons=daemons) as scene:
        await scene.until(12, 12, SHARED)
        device = (await scene.kubelet.admit(pod("one")))["main"].envs["NVIDIA_VISIBLE_DEVICES"]
        its = control(tmp_path, device, daemons)
        first = await running(its)
        await its.quit()
        await another(its, first)
        await scene.until(12, 12, SHARED)


async def test_the_next_agent_adopts_that_of_a_held_instance(
    daemons: HostDaemons, tmp_path: Path
) -> None:
    """Over a restart of the agent a held instance keeps its control daemon; the others end."""
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    async with kubelet.running():
        async with shared(tmp_path, node=node, kubelet=kubelet, daemons=daemons) as live:
            await live.until(12, 12, SHARED)
            options = (await kubelet.admit(pod("kept")))["main"]
            await live.wait_holders()
            held = options.envs["NVIDIA_VISIBLE_DEVICES"]
            process = await running(control(tmp_path, held, daemons))
        for device in await devices(tmp_path):
            left = await control(tmp_path, device, daemons).process()
            assert left == (process if device == held else None)

        async with shared(tmp_path, node=node, kubelet=kubelet, daemons=daemons) as scene:
            await scene.until(12, 12, SHARED)
            assert await running(control(tmp_path, held, daemons)) == process


async def test_those_of_removed_instances_end(daemons: HostDaemons, tmp_path: Path) -> None:
    """Another layout ends them, that of a held instance with its last pod."""
    async with shared(tmp_path, daemons=daemons) as scene:
        await scene.until(12, 12, SHARED)
        last = pod("last")
        held = (await scene.kubelet.admit(last))["main"].envs["NVIDIA_VISIBLE_DEVICES"]
        await scene.wait_holders()
        process = await running(control(tmp_path, held, daemons))

        await anyio.Path(scene.config_file).write_text(mig_pool("layout: {3g.20gb: 2}"))
        await scene.agent.reload()

        async def only_the_held_one() -> bool:
            return await devices(tmp_path) == [held]

        await until(only_the_held_one, LIMIT)
        assert await running(control(tmp_path, held, daemons)) == process

        await scene.kubelet.delete(last)
        await scene.until(2, 2, "nvidia.com/mig-3g.20gb")
        assert placements(scene.node) == ["3g.20gb@0", "3g.20gb@4"]

        async def none() -> bool:
            return await devices(tmp_path) == []

        await until(none, LIMIT)
