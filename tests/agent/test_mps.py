"""MPS from the configuration to the pod, with real processes as stand-ins for NVIDIA's."""

import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio
import pytest

from metagpu.agent.agent import Agent
from metagpu.agent.config_source import ConfigSource
from metagpu.backends.common.mps_daemon.control import MpsDirectories
from metagpu.core.contracts.driver import ComputeMode
from metagpu.core.reports import status as report
from metagpu.core.reports.schema.status import ResourceReport
from metagpu.nvml.driver import NvmlDriver
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.sim.kubelet.kubelet import AdmissionError, SimPod
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.programs import sim_daemons
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.agent.test_daemon import Daemon, daemon, next_daemon
from tests.rigs.agent import Scene, agent_at_work
from tests.rigs.daemons import DAEMONS, StandIn
from tests.rigs.waiting import until

MPS, WHOLE = "nvidia.com/gpu.mps", "nvidia.com/gpu"
MIXED = """
version: metagpu/v1
health: {quietPeriod: 100ms, rescanPeriod: 100ms}
pools:
  - name: all
    backends: [{backend: mps, offer: all}, {backend: whole}]
"""


def control_of(live_daemon: Scene | Daemon, gpu: str) -> StandIn:
    """Return the control daemon's client of a GPU."""
    if isinstance(live_daemon, Scene):
        return StandIn(MpsDirectories(live_daemon.config_file.parent / "mps" / gpu), gpu)
    # `metagpu run` gives its stand-ins the version of the simulated driver.
    daemons = sim_daemons(SimNode().driver_branch)
    return StandIn(MpsDirectories(live_daemon.folder / "mps" / gpu), gpu, daemons)


@asynccontextmanager
async def mixed(
    folder: Path, gpu_models: str = "a100-40gb:1", kubelet_timing: KubeletTiming | None = None
) -> AsyncIterator[Scene]:
    """Offer GPUs by MPS and whole; no control daemon is left when the block ends."""
    async with agent_at_work(folder, gpu_models, MIXED, kubelet_timing=kubelet_timing) as scene:
        count = len(scene.node.gpus)
        try:
            await scene.until(100 * count, 100 * count, MPS)
            yield scene
        finally:
            with anyio.CancelScope(shield=True):
                for gpu in scene.node.gpus:
                    await control_of(scene, gpu.id).gone()


async def test_unequal_parts_of_one_gpu(tmp_path: Path) -> None:
    """Two pods have 30 and 50 % of a GPU's threads and of its usable memory."""
    async with mixed(tmp_path) as scene:
        small = (await scene.kubelet.admit(SimPod.single("small", {MPS: 30})))["main"]
        large = (await scene.kubelet.admit(SimPod.single("large", {MPS: 50})))["main"]

    gpu = scene.node.gpus[0].id
    assert small.envs["NVIDIA_VISIBLE_DEVICES"] == large.envs["NVIDIA_VISIBLE_DEVICES"] == gpu
    assert small.envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
    assert large.envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert small.envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=12082M"
    assert large.envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20138M"
    assert small.envs["CUDA_MPS_PIPE_DIRECTORY"] == f"{tmp_path}/mps/{gpu}/pipe"
    mounts = {mount.container_path: mount.host_path for mount in small.mounts}
    assert mounts == {
        f"{tmp_path}/mps/{gpu}/pipe": f"{tmp_path}/mps/{gpu}/pipe",
        "/dev/shm": f"{tmp_path}/mps/{gpu}/shm",  # noqa: S108 - MPS's own place
    }


async def test_a_request_lands_on_one_gpu_or_is_refused(tmp_path: Path) -> None:
    """A pod has units of one GPU; a larger request is refused with advice to ask for whole GPUs."""
    async with mixed(tmp_path, "a100-40gb:2") as scene:
        await scene.kubelet.admit(SimPod.single("one", {MPS: 60}))
        two = (await scene.kubelet.admit(SimPod.single("two", {MPS: 60})))["main"]
        assert "," not in two.envs["NVIDIA_VISIBLE_DEVICES"]

        with pytest.raises(AdmissionError, match="MPS serves a container on one GPU") as caught:
            await scene.kubelet.admit(SimPod.single("three", {MPS: 70}))
        assert "free now: GPU 0: 40, GPU 1: 40. Ask for less" in caught.value.message


async def test_claimed_and_given_back(tmp_path: Path) -> None:
    """An idle GPU belongs to MPS with its first pod, and is whole again after its last one."""
    timing = KubeletTiming(poll_period=0.1, contended_period=0.05, settle=0.02)
    async with mixed(tmp_path, kubelet_timing=timing) as scene:
        await scene.until(1, 1, WHOLE)
        pod = SimPod.single("mps", {MPS: 1})
        await scene.kubelet.admit(pod)
        await scene.until(1, 0, WHOLE)

        async def exclusive() -> bool:
            return scene.node.gpus[0].compute_mode == ComputeMode.EXCLUSIVE_PROCESS

        await until(exclusive)
        await scene.wait_holders()

        await scene.kubelet.delete(pod)
        await scene.until(1, 1, WHOLE)
        assert scene.node.gpus[0].compute_mode == ComputeMode.DEFAULT
        whole = (await scene.kubelet.admit(SimPod.single("whole", {WHOLE: 1})))["main"]
        await scene.until(100, 0, MPS)

        assert "CUDA_MPS_PIPE_DIRECTORY" not in whole.envs


async def test_explain_counts_without_starting_control_daemons(tmp_path: Path) -> None:
    """`explain` starts no control daemon, and counts the shares that one serves."""
    file = tmp_path / "metagpu.yaml"
    await anyio.Path(file).write_text(MIXED)
    agent = Agent(ConfigSource((file,)), NvmlDriver(SimLibrary(build_node("a100-40gb:1"))))
    await agent.survey_once()

    resources = report.explain_report(agent.registry.snapshot, agent.layout).resources
    assert resources[MPS] == ResourceReport(100, 100)
    assert resources[WHOLE] == ResourceReport(1, 1)


async def test_control_daemons_of_a_killed_daemon_are_adopted(tmp_path: Path) -> None:
    """After SIGKILL the next daemon adopts the control daemons; clients run on."""
    async with daemon(tmp_path, MIXED) as live_daemon:
        await live_daemon.kubelet.wait_for(
            lambda: live_daemon.kubelet.allocatable().get(MPS) == 200
        )
        options = (await live_daemon.kubelet.admit(SimPod.single("pod", {MPS: 10})))["main"]
        control = control_of(live_daemon, options.envs["NVIDIA_VISIBLE_DEVICES"])
        process = await control.process()
        others = [control_of(live_daemon, name) for name in os.listdir(tmp_path / "mps")]  # noqa: PTH208
        try:
            with closing(socket.socket(socket.AF_UNIX)) as client:
                client.connect(f"{options.envs['CUDA_MPS_PIPE_DIRECTORY']}/control")
                live_daemon.process.kill()
                await live_daemon.kubelet.wait_for(
                    lambda: live_daemon.kubelet.allocatable().get(MPS) == 0
                )

                async with next_daemon(tmp_path) as again:
                    await live_daemon.kubelet.wait_for(
                        lambda: live_daemon.kubelet.allocatable().get(MPS) == 200
                    )
                    assert await control.process() == process
                    assert len(await control.servers()) == 1
                    again.terminate()
                    assert await again.wait() == 0

                assert await control.process() == process
                assert await ends([other for other in others if other.device != control.device])
        finally:
            for other in others:
                await other.gone()


async def test_a_daemon_that_stops_leaves_nothing_idle(tmp_path: Path) -> None:
    """SIGTERM ends the control daemons that have no clients."""
    async with daemon(tmp_path, MIXED) as live_daemon:
        await live_daemon.kubelet.wait_for(
            lambda: live_daemon.kubelet.allocatable().get(MPS) == 200
        )
        controls = [control_of(live_daemon, name) for name in os.listdir(tmp_path / "mps")]  # noqa: PTH208
        processes = [await control.process() for control in controls]

        assert await live_daemon.stop() == 0
        assert None not in processes
        assert await ends(controls)


@pytest.mark.parametrize("place", [os.mkfifo, lambda path: Path(path).symlink_to("/dev/zero")])
async def test_a_container_that_replaces_the_pid_file_stops_nothing(
    tmp_path: Path, place: Callable[[Path], None]
) -> None:
    """A FIFO or an endless file, as pid and lock, costs no thread and no memory: a new daemon runs.

    SIGTERM ends metagpu, and nothing is left.
    """
    async with daemon(tmp_path, MIXED) as live_daemon:
        await live_daemon.kubelet.wait_for(
            lambda: live_daemon.kubelet.allocatable().get(MPS) == 200
        )
        controls = [control_of(live_daemon, name) for name in os.listdir(tmp_path / "mps")]  # noqa: PTH208
        control, first = controls[0], await controls[0].process()
        assert first is not None
        file = control.folders.pipes / "nvidia-cuda-mps-control.pid"
        for replaced_file in (file, control.daemon.lock):
            replaced_file.unlink()
            place(replaced_file)
        os.kill(first.pid, signal.SIGKILL)

        async def replaced() -> bool:
            return await control.process() not in {None, first}

        await until(replaced, 30)
        await live_daemon.kubelet.wait_for(
            lambda: live_daemon.kubelet.allocatable().get(MPS) == 200
        )
        assert file.read_text() == str((await control.process() or first).pid)
        memory = await anyio.Path(f"/proc/{live_daemon.process.pid}/status").read_text()
        [peak] = [int(line.split()[1]) for line in memory.splitlines() if "VmHWM" in line]
        assert peak < 300 * 1024  # KiB

        assert await live_daemon.stop() == 0
        assert await ends(controls)


async def ends(controls: list[StandIn]) -> bool:
    """Wait until no control daemon of these runs."""

    async def is_so() -> bool:
        found = [await control.process() for control in controls]
        return not any(found)

    await until(is_so)
    return True


def test_the_stand_in_is_what_a_simulated_node_runs() -> None:
    """Under --simulate no program of the host's driver is started."""
    command = DAEMONS.programs.substitutes["nvidia-cuda-mps-control"]

    assert Path(command[-1]).name == "mps_control.py"
    assert not DAEMONS.on_host
