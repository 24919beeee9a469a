"""The whole agent, from NVML to the kubelet: GPUs that come and go, and leases that last."""

from pathlib import Path

import anyio
import pytest

from metagpu.agent.agent import Agent
from metagpu.agent.config_source import ConfigSource
from metagpu.agent.timing import AgentTiming
from metagpu.core.availability.reasons import count_free
from metagpu.core.errors import MetagpuError
from metagpu.core.model.shares import ResourceName
from metagpu.core.reports.status import explain_report
from metagpu.core.state.facts import SharesReleased
from metagpu.nvml.driver import NvmlDriver
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.plugins.pod_api.server import PodMgctlServer
from metagpu.sim.kubelet.kubelet import SimKubelet, SimPod
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.rigs.agent import METAGPU, QUICK, agent_at_work


async def test_operator_cordons_and_uncordons(tmp_path: Path) -> None:
    """A cordoned GPU gives no new shares, its pods stay, and a reload does not uncordon it."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        await scene.kubelet.admit(SimPod.single("train", {METAGPU: 3}))
        used = scene.state(0) if scene.state(0).leases else scene.state(1)
        name, gpu = {"gpu": used.gpu.pci_bus_id}, used.gpu

        assert await scene.agent.operator_commands.cordon(
            {**name, "reason": " fan\n to be replaced"}
        ) == (f"GPU {gpu} is cordoned; 3 shares are still in use")
        await scene.until(20, 13)
        await scene.agent.reload()
        cordon = scene.agent.registry.snapshot.gpus[gpu.id].cordon
        assert cordon is not None
        assert cordon.reason == "fan to be replaced"
        assert [pod.name for pod in scene.kubelet.pods] == ["train"]

        assert (
            await scene.agent.operator_commands.uncordon(name)
            == f"GPU {gpu} gives new shares again"
        )
        await scene.until(20, 20)
        with pytest.raises(MetagpuError, match=rf"^GPU {gpu.index} \({gpu.id}\) is not cordoned$"):
            await scene.agent.operator_commands.uncordon(name)
        with pytest.raises(MetagpuError, match="there is no GPU '9' here"):
            await scene.agent.operator_commands.cordon({"gpu": "9"})


async def test_explain_provisions_nothing(tmp_path: Path) -> None:
    """An explanation shows the shares as they are when every backend is ready."""
    file = tmp_path / "mps.yaml"
    await anyio.Path(file).write_text(
        "version: metagpu/v1\npools: [{name: a, backends: [{backend: mps}]}]\n"
    )
    agent = Agent(ConfigSource((file,)), NvmlDriver(SimLibrary(build_node("t4:1"))))
    await agent.survey_once()

    [state] = agent.registry.snapshot.gpus.values()
    assert state.suspended == {}
    assert count_free(state, ResourceName("nvidia.com/gpu.mps")) == 100


@pytest.mark.parametrize(
    ("board", "options", "free", "reason"),
    [
        ("a100-40gb:1", "", 0, "MIG mode is off; turn it on (`nvidia-smi -i 0 -mig 1`)"),
        ("a100-40gb:1", ", enableMig: true", 0, "the GPU then needs a reset"),
        ("h100-80gb:1", "", 0, "MIG mode is off; turn it on"),
        ("h100-80gb:1", ", enableMig: true", 7, ""),
    ],
)
async def test_explain_shows_no_share_that_mig_mode_prevents(
    tmp_path: Path, board: str, options: str, free: int, reason: str
) -> None:
    """An explanation shows no share as free that the daemon gives only once MIG is on."""
    file = tmp_path / "mig.yaml"
    profile = "1g.5gb" if "a100" in board else "1g.10gb"
    cut = f"{{backend: mig, profiles: [{profile}]{options}}}"
    await anyio.Path(file).write_text(
        f"version: metagpu/v1\npools: [{{name: a, backends: [{cut}]}}]\n"
    )
    agent = Agent(ConfigSource((file,)), NvmlDriver(SimLibrary(build_node(board))))
    await agent.survey_once()

    [state] = agent.registry.snapshot.gpus.values()
    assert count_free(state, ResourceName(f"nvidia.com/mig-{profile}")) == free
    pause = state.suspended.get("mig")
    assert (reason in pause.reason) if pause else not reason
    report = explain_report(agent.registry.snapshot, agent.layout)
    assert [resource.allocatable for resource in report.resources.values()] == [free]


async def test_gpu_added_while_running(tmp_path: Path) -> None:
    """A GPU that NVML lists later is offered without another registration."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        scene.node.add_gpu(scene.node.gpus[0].model)
        await scene.until(30, 30)

        assert scene.kubelet.registrations[METAGPU] == 1


async def test_gpu_of_another_plugin_is_left_alone(tmp_path: Path) -> None:
    """A GPU that a pod holds through another plugin is not offered until that pod ends."""
    timing = KubeletTiming(poll_period=0.02, contended_period=0.05, settle=0.02)
    theirs = "nvidia.com/gpu"
    both = QUICK + f"  - name: other\n    backends: [{{backend: fraction, resource: {theirs}}}]\n"

    async with agent_at_work(
        tmp_path,
        config=both.replace("all", "all\n    gpus: {index: 1}"),
        kubelet_timing=timing,
    ) as scene:
        await scene.until(10, 10)
        await scene.until(100, 100, theirs)
        foreign = SimPod.single("foreign", {theirs: 1})
        await scene.kubelet.admit(foreign)
        await scene.wait_holders()
        await anyio.Path(scene.config_file).write_text(QUICK)
        await scene.agent.reload()
        await scene.until(20, 10)
        await scene.kubelet.delete(foreign)
        await scene.until(20, 20)


async def test_gpu_taken_out_of_the_node(tmp_path: Path) -> None:
    """A GPU that NVML lists no more stays on the list, unhealthy (case 15)."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        scene.node.remove_gpu(scene.node.gpu("1"))
        await scene.until(20, 10)

        # A caller that counted the GPU just before its removal gets an error for its index.
        reasons = ("NVML does not list it any more", "Invalid Argument")
        assert scene.state(1).verdict.reason.endswith(reasons)


async def test_device_node_that_comes_late_is_given(tmp_path: Path) -> None:
    """A device node that was missing at the start is given to the next pod."""
    timing = AgentTiming(device_nodes=0.01)
    uvm = tmp_path / "dev" / "nvidia-uvm"

    async with agent_at_work(tmp_path, timing=timing) as scene:
        await scene.until(20, 20)
        before = await scene.kubelet.admit(SimPod.single("before", {METAGPU: 1}))
        first_layout = scene.agent.layout
        await anyio.Path(uvm.parent).mkdir()
        await anyio.Path(uvm).touch()
        with anyio.fail_after(30):
            while scene.agent.layout is first_layout:  # noqa: ASYNC110 - no event: no offer changed
                await anyio.sleep(0.01)
        after = await scene.kubelet.admit(SimPod.single("after", {METAGPU: 1}))

    assert before["main"].devices == ()
    assert [node.container_path for node in after["main"].devices] == ["/dev/nvidia-uvm"]


async def test_gpu_in_mig_mode_has_no_fractions(tmp_path: Path) -> None:
    """A GPU in MIG mode has no fractions, and the layout states the reason."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        scene.node.gpus[0].mig.enabled = True
        await scene.until(10, 10)

        assert scene.agent.layout.pool_assignments[0].reason.endswith("no shares: MIG mode is on")


async def test_leases_follow_the_kubelet(tmp_path: Path) -> None:
    """A lease gets its holder from PodResources and ends when the pod is gone."""
    timing = KubeletTiming(poll_period=0.02, contended_period=0.05, settle=0.01)

    async with agent_at_work(tmp_path, kubelet_timing=timing) as scene:
        await scene.until(20, 20)
        train = SimPod.single("train", {METAGPU: 5})
        await scene.kubelet.admit(train)

        await scene.wait_holders()

        [holder] = {str(lease.holder) for lease in scene.state(0).leases.values()}
        assert holder == "default/train (main)"
        assert scene.state(0).owner == "fraction"

        async with anyio.create_task_group() as group:
            group.start_soon(scene.next_event, SharesReleased)
            await anyio.wait_all_tasks_blocked()
            await scene.kubelet.delete(train)

        assert scene.state(0).leases == {}
        assert scene.state(0).owner is None


async def test_restarted_daemon_knows_the_holders(tmp_path: Path) -> None:
    """After a restart the leases are read from the kubelet, by the ids of the shares alone."""
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")

    async with kubelet.running():
        async with agent_at_work(tmp_path, kubelet=kubelet) as agent:
            await agent.until(20, 20)
            await kubelet.admit(SimPod.single("train", {METAGPU: 15}))

        async with agent_at_work(tmp_path, kubelet=kubelet) as scene:
            await scene.wait_snapshot(lambda now: any(gpu.leases for gpu in now.gpus.values()))

            assert sorted(len(scene.state(n).leases) for n in range(2)) == [5, 10]


@pytest.mark.parametrize("has_kubelet", [True, False])
async def test_the_kubelet_comes_before_mgctl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_kubelet: bool
) -> None:
    """`mgctl` in containers starts after the first registration, or after a wait for it."""
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    begun = anyio.Event()
    registered: list[int] = []

    async def run(_: PodMgctlServer) -> None:
        registered.append(sum(kubelet.registrations.values()))
        begun.set()

    monkeypatch.setattr(PodMgctlServer, "run", run)
    timing = AgentTiming(first_registration=1e9 if has_kubelet else 0.01)
    async with kubelet.running():
        if not has_kubelet:
            await kubelet.crash()
        async with agent_at_work(tmp_path, kubelet=kubelet, timing=timing):
            with anyio.fail_after(30):
                await begun.wait()

    assert registered == [int(has_kubelet)]


async def test_whole_gpus_are_the_best_connected(tmp_path: Path) -> None:
    """Two whole V100s are the pair with the most NVLinks; one leaves the best pairs."""
    config = "version: metagpu/v1\npools: [{name: all, backends: [{backend: whole}]}]\n"
    gpu = "nvidia.com/gpu"

    async with agent_at_work(tmp_path, gpu_models="v100-16gb:8", config=config) as scene:
        await scene.until(8, 8, gpu)
        [pair] = (await scene.kubelet.admit(SimPod.single("pair", {gpu: 2}))).values()
        ids = [scene.node.gpu(index).id for index in (2, 3)]

        assert pair.envs["NVIDIA_VISIBLE_DEVICES"] == ",".join(ids)
        assert pair.envs["METAGPU_MEMORY_MIB"] == ",".join(f"{i}=16384" for i in ids)
        [alone] = (await scene.kubelet.admit(SimPod.single("alone", {gpu: 1}))).values()
        assert alone.envs["NVIDIA_VISIBLE_DEVICES"] == scene.node.gpu(0).id
