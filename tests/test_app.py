"""The agent as a whole, from NVML to the kubelet: what comes, what stays, who holds what."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from metagpu import app, laying
from metagpu.app import Agent
from metagpu.backends.fraction import FractionBackend
from metagpu.core.errors import MetagpuError
from metagpu.core.facts import SharesReleased
from metagpu.core.model import ResourceName
from metagpu.core.report import explanation
from metagpu.nvml import Nvml
from metagpu.plugins import podresources
from metagpu.sim.kubelet import Pod, SimKubelet
from metagpu.sim.library import Library
from metagpu.sim.spec import simulated
from metagpu.sources import Source
from tests.agent_rig import METAGPU, QUICK, agent_at_work


async def test_operator_cordons_and_uncordons(tmp_path: Path) -> None:
    """A cordoned GPU gives nothing new, its pods stay, and a reload does not lift it."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        await it.kubelet.admit(Pod.single("train", {METAGPU: 3}))
        used = it.state(0) if it.state(0).leases else it.state(1)
        name, gpu = {"gpu": used.gpu.pci_bus_id}, used.gpu

        assert await it.agent.orders.cordon({**name, "reason": " fan\n to be replaced"}) == (
            f"GPU {gpu} gives no new shares; held of it now: 3"
        )
        await it.until(20, 13)
        await it.agent.reload()
        cordon = it.agent.registry.snapshot.gpus[gpu.id].cordon
        assert cordon is not None
        assert cordon.reason == "fan to be replaced"
        assert [pod.name for pod in it.kubelet.pods] == ["train"]

        assert await it.agent.orders.uncordon(name) == f"GPU {gpu} gives new shares again"
        await it.until(20, 20)
        with pytest.raises(MetagpuError, match=rf"^GPU {gpu.index} \({gpu.id}\) is not cordoned$"):
            await it.agent.orders.uncordon(name)
        with pytest.raises(MetagpuError, match="there is no GPU '9' here"):
            await it.agent.orders.cordon({"gpu": "9"})


async def test_looking_makes_nothing_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be offered is told as it would be when everything is ready."""
    monkeypatch.setattr(FractionBackend, "readies", True)
    agent = Agent(Source(), Nvml(Library(simulated("t4:1"))))
    await agent.look()

    [state] = agent.registry.snapshot.gpus.values()
    assert state.suspended == {}
    assert state.free(ResourceName(METAGPU)) == 100


@pytest.mark.parametrize(
    ("board", "options", "free", "reason"),
    [
        ("a100-40gb:1", "", 0, "MIG mode is off; turn it on (`nvidia-smi -i 0 -mig 1`)"),
        ("a100-40gb:1", ", enableMig: true", 0, "it waits for a reset then"),
        ("h100-80gb:1", "", 0, "MIG mode is off; turn it on"),
        ("h100-80gb:1", ", enableMig: true", 7, ""),
    ],
)
async def test_looking_foresees_what_mig_mode_hinders(
    tmp_path: Path, board: str, options: str, free: int, reason: str
) -> None:
    """Nothing is told as free that the daemon would not give before MIG is on."""
    file = tmp_path / "mig.yaml"
    profile = "1g.5gb" if "a100" in board else "1g.10gb"
    cut = f"{{backend: mig, profiles: [{profile}]{options}}}"
    await anyio.Path(file).write_text(
        f"version: metagpu/v1\npools: [{{name: a, backends: [{cut}]}}]\n"
    )
    agent = Agent(Source((file,)), Nvml(Library(simulated(board))))
    await agent.look()

    [state] = agent.registry.snapshot.gpus.values()
    assert state.free(ResourceName(f"nvidia.com/mig-{profile}")) == free
    pause = state.suspended.get("mig")
    assert (reason in pause.reason) if pause else not reason
    told = explanation(agent.registry.snapshot, agent.layout)
    assert [it["allocatable"] for it in told["resources"].values()] == [free]


async def test_gpu_added_while_running(tmp_path: Path) -> None:
    """A GPU that NVML lists later is offered without another registration."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        it.node.add_gpu(it.node.gpus[0].board)
        await it.until(30, 30)

        assert it.kubelet.registrations[METAGPU] == 1


async def test_gpu_of_another_plugin_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that a pod holds through another plugin is not offered until that pod ends."""
    monkeypatch.setattr(podresources, "PERIOD", 0.02)
    theirs = "nvidia.com/gpu"
    both = QUICK + f"  - name: other\n    backends: [{{backend: fraction, resource: {theirs}}}]\n"

    async with agent_at_work(
        tmp_path, config=both.replace("all", "all\n    gpus: {index: 1}")
    ) as it:
        await it.until(10, 10)
        await it.until(100, 100, theirs)
        foreign = Pod.single("foreign", {theirs: 1})
        await it.kubelet.admit(foreign)
        await it.told()
        await anyio.Path(it.config_file).write_text(QUICK)
        await it.agent.reload()
        await it.until(20, 10)
        await it.kubelet.delete(foreign)
        await it.until(20, 20)


async def test_gpu_taken_out_of_the_node(tmp_path: Path) -> None:
    """A GPU that NVML lists no more stays on the list, unhealthy (case 15)."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        it.node.remove_gpu(it.node.gpu("1"))
        await it.until(20, 10)

        # Who counted it just before it went hears that its index is none.
        reasons = ("NVML does not list it any more", "Invalid Argument")
        assert it.state(1).verdict.reason.endswith(reasons)


async def test_device_node_that_comes_late_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device node that was not there at the start is given to the next pod."""
    monkeypatch.setattr(laying, "NODES_PERIOD", 0.01)
    uvm = tmp_path / "dev" / "nvidia-uvm"

    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        before = await it.kubelet.admit(Pod.single("before", {METAGPU: 1}))
        laid = it.agent.layout
        await anyio.Path(uvm.parent).mkdir()
        await anyio.Path(uvm).touch()
        with anyio.fail_after(30):
            while it.agent.layout is laid:  # noqa: ASYNC110 - nothing tells of it: no offer changed
                await anyio.sleep(0.01)
        after = await it.kubelet.admit(Pod.single("after", {METAGPU: 1}))

    assert before["main"].devices == ()
    assert [node.container_path for node in after["main"].devices] == ["/dev/nvidia-uvm"]


async def test_gpu_in_mig_mode_is_cut_by_nobody(tmp_path: Path) -> None:
    """A GPU in MIG mode has no fractions, and the layout says why."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        it.node.gpus[0].mig.enabled = True
        await it.until(10, 10)

        assert it.agent.layout.assignments[0].why.endswith("nothing is cut: MIG mode is on")


async def test_leases_follow_the_kubelet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease gets its holder from PodResources and ends when the pod is gone."""
    monkeypatch.setattr(podresources, "PERIOD", 0.02)
    monkeypatch.setattr(podresources, "SETTLE", 0.01)

    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        train = Pod.single("train", {METAGPU: 5})
        await it.kubelet.admit(train)

        await it.told()

        [holder] = {str(lease.holder) for lease in it.state(0).leases.values()}
        assert holder == "default/train (main)"
        assert it.state(0).owner == "fraction"

        async with anyio.create_task_group() as group:
            group.start_soon(it.news, SharesReleased)
            await anyio.wait_all_tasks_blocked()
            await it.kubelet.delete(train)

        assert it.state(0).leases == {}
        assert it.state(0).owner is None


async def test_restarted_daemon_knows_who_holds_what(tmp_path: Path) -> None:
    """After a restart the leases are read from the kubelet, ids alone saying what they are."""
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")

    async with kubelet.running():
        async with agent_at_work(tmp_path, kubelet=kubelet) as it:
            await it.until(20, 20)
            await kubelet.admit(Pod.single("train", {METAGPU: 15}))

        async with agent_at_work(tmp_path, kubelet=kubelet) as it:
            await it.settles(lambda now: any(gpu.leases for gpu in now.gpus.values()))

            assert sorted(len(it.state(n).leases) for n in range(2)) == [5, 10]


async def test_what_may_conflict_is_offered_once_it_is_known_who_holds_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted daemon gives no whole GPU away whose shares a pod of before holds."""
    mixed = QUICK.replace("sharesPerGpu: 10}]", "sharesPerGpu: 10}, {backend: whole}]")
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    observed, early = podresources.observed, []

    async with kubelet.running():
        async with agent_at_work(tmp_path, config=mixed, kubelet=kubelet) as it:
            await it.until(20, 20)
            await kubelet.admit(Pod.single("train", {METAGPU: 5}))
        before = sum(kubelet.registrations.values())

        async def slow(*arguments: Any) -> Any:  # noqa: ANN401 - as the function's own
            monkeypatch.setattr(podresources, "observed", observed)  # the first look alone
            with anyio.move_on_after(0.3):
                await kubelet.wait_for(lambda: sum(kubelet.registrations.values()) > before)
                early.append("registered")
            return await observed(*arguments)

        monkeypatch.setattr(app, "FIRST_LOOK", 1e9)
        monkeypatch.setattr(podresources, "observed", slow)
        async with agent_at_work(tmp_path, config=mixed, kubelet=kubelet) as it:
            await it.until(20, 20)

            assert not early
            assert any(state.withheld for state in it.agent.registry.snapshot.gpus.values())


async def test_whole_gpus_are_the_best_connected(tmp_path: Path) -> None:
    """Two whole V100s are the pair with the most NVLinks, and one is taken where it hurts least."""
    config = "version: metagpu/v1\npools: [{name: all, backends: [{backend: whole}]}]\n"
    gpu = "nvidia.com/gpu"

    async with agent_at_work(tmp_path, boards="v100-16gb:8", config=config) as it:
        await it.until(8, 8, gpu)
        [pair] = (await it.kubelet.admit(Pod.single("pair", {gpu: 2}))).values()
        ids = [it.node.gpu(index).id for index in (2, 3)]

        assert pair.envs["NVIDIA_VISIBLE_DEVICES"] == ",".join(ids)
        assert pair.envs["METAGPU_MEMORY_MIB"] == ",".join(f"{i}=16384" for i in ids)
        [alone] = (await it.kubelet.admit(Pod.single("alone", {gpu: 1}))).values()
        assert alone.envs["NVIDIA_VISIBLE_DEVICES"] == it.node.gpu(0).id
