"""MPS on the instances of a fixed layout: the whole agent, with stand-ins for NVIDIA's daemons."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from metagpu.backends.mig import backend as mig
from metagpu.core.contracts.driver import ComputeMode
from metagpu.core.errors import ProgramError
from metagpu.core.reports import status as report
from metagpu.host.daemons import HostDaemons
from metagpu.sim.kubelet.kubelet import AdmissionError, SimKubelet, SimPod
from metagpu.sim.machine import foreign_instances as foreign
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.mig_state import SimProvisioning
from tests.rigs.agent import Scene, agent_at_work
from tests.rigs.daemons import DAEMONS
from tests.rigs.logs import capture_module_logs
from tests.rigs.mig import a_node, created, mig_pool, placements
from tests.rigs.mig_mps import (
    LAYOUT,
    QUARTERS,
    SHARED,
    TWO,
    control,
    devices,
    hurry_mps,
    pod,
    shared,
)
from tests.rigs.waiting import becomes, until

UNITS = f"{LAYOUT}, mps: {{unitsPerInstance: {{1g.5gb: 10}}}}"
LIMIT = 30.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timings that last seconds on a real node."""
    hurry_mps(monkeypatch)


@pytest.fixture
async def left(tmp_path: Path) -> AsyncIterator[None]:
    """Assert that no control daemon is left after the test."""
    yield
    for device in await devices(tmp_path):
        await control(tmp_path, device).gone()


def paused(scene: Scene) -> dict[str, str]:
    """Return the unavailable shares and their reasons, by instance and unit."""
    return {share.partition("::")[2]: why for share, why in scene.state(0).paused_shares.items()}


pytestmark = [pytest.mark.usefixtures("left"), pytest.mark.long]


async def test_existing_instances_have_control_daemons(tmp_path: Path) -> None:
    """Pods compute on an instance of another program, which stays."""
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true, instances: [1g.5gb@0]}")
    async with shared(tmp_path, "existing: true, mps: {replicas: 4}", node=node) as scene:
        await scene.until(4, 4, SHARED)
        granted = [(await scene.kubelet.admit(pod(f"pod{n}")))["main"] for n in range(4)]
        assert {one.envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for one in granted} == {"25"}
        for n in range(4):
            await scene.kubelet.delete(pod(f"pod{n}"))
    assert placements(node) == ["1g.5gb@0"]


async def test_four_pods_compute_on_one_instance(tmp_path: Path) -> None:
    """Each instance has its own control daemon; a pod has a quarter of one instance."""
    async with shared(tmp_path) as scene:
        await scene.until(12, 12, SHARED)
        await scene.until(2, 2, TWO)
        here = {i: m.device for i, m in created(scene).items()}
        assert await devices(tmp_path) == sorted({d for i, d in here.items() if i[0] == "1"})

        granted = [(await scene.kubelet.admit(pod(f"pod{n}")))["main"] for n in range(4)]
        [device] = {one.envs["NVIDIA_VISIBLE_DEVICES"] for one in granted}
        home = f"{tmp_path}/mps/{device}"
        assert granted[0].envs == {
            "NVIDIA_VISIBLE_DEVICES": device,
            "METAGPU_MEMORY_MIB": f"{device}=1200",
            "CUDA_MPS_PIPE_DIRECTORY": f"{home}/pipe",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1200M",
        }
        assert {mount.container_path: mount.host_path for mount in granted[0].mounts} == {
            f"{home}/pipe": f"{home}/pipe",
            "/dev/shm": f"{home}/shm",  # noqa: S108 - MPS's own place
        }
        assert scene.node.gpus[0].compute_mode == ComputeMode.DEFAULT  # no other there is under MIG


async def test_a_fault_inside_an_instance_is_of_its_units_alone(tmp_path: Path) -> None:
    """All units of the instance are out, until it exists again with another control daemon."""
    fatal = mig_pool(QUARTERS).replace("health: {", "health: {xids: {94: fatal}, ")
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    async with agent_at_work(tmp_path, node, fatal) as scene:
        await scene.until(12, 12, SHARED)
        one = pod("one")
        device = (await scene.kubelet.admit(one))["main"].envs["NVIDIA_VISIBLE_DEVICES"]
        await scene.wait_holders()
        [(gi, ci)] = {
            (m.gpu_instance, m.compute_instance)
            for m in created(scene).values()
            if m.device == device
        }
        node.raise_xid(node.gpus[0], 94, gi, ci)
        await scene.until(12, 8, SHARED)
        await scene.until(2, 2, TWO)
        assert list(scene.state(0).mig_faults) == [device]

        await scene.kubelet.delete(one)
        await scene.until(12, 12, SHARED)
        assert not scene.state(0).mig_faults
        assert device not in {m.device for m in created(scene).values()}
        assert device not in await devices(tmp_path)


async def test_the_shared_memory_of_an_instance_is_emptied_after_its_last_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that a pod left in /dev/shm go with its instance's last lease, or no pod gets it."""
    emptied, allowed = HostDaemons.empty, list[bool]()

    async def empty(daemons: HostDaemons, folder: Path) -> None:
        if folder.name == "shm" and not allowed:
            raise ProgramError("not permitted")
        await emptied(daemons, folder)

    monkeypatch.setattr(HostDaemons, "empty", empty)
    async with shared(tmp_path) as scene:
        await scene.until(12, 12, SHARED)
        one = pod("one")
        device = (await scene.kubelet.admit(one))["main"].envs["NVIDIA_VISIBLE_DEVICES"]
        await scene.wait_holders()
        file = control(tmp_path, device).folders.shm / "torch_1"
        file.write_bytes(b"x" * 4096)

        await scene.kubelet.delete(one)
        await scene.until(12, 8, SHARED)
        [gpu] = report.explain_report(scene.agent.registry.snapshot, scene.agent.layout).gpus
        assert "what its containers left stays: not permitted" in gpu.paused[0]
        assert file.exists()

        allowed.append(True)
        await scene.until(12, 12, SHARED)
        assert not file.exists()
        assert await control(tmp_path, device).process() is not None


async def test_a_failed_control_daemon_takes_the_shares_of_its_instance(tmp_path: Path) -> None:
    """The shares are Unhealthy, held ones too, and refused with the reason; others stay."""
    async with shared(tmp_path) as scene:
        await scene.until(12, 12, SHARED)
        device = (await scene.kubelet.admit(pod("held")))["main"].envs["NVIDIA_VISIBLE_DEVICES"]
        control(tmp_path, device).steer("refuse")
        process = await control(tmp_path, device).process()
        assert process is not None
        await DAEMONS.kill(process)
        await scene.until(12, 8, SHARED)
        await scene.until(2, 2, TWO)

        await becomes(lambda: any("steered to refuse" in why for why in paused(scene).values()))
        [slot] = {i.partition("-p")[0] for i, m in created(scene).items() if m.device == device}
        assert set(paused(scene)) == {f"{slot}-p{n}" for n in range(4)}
        [granted] = report.explain_report(scene.agent.registry.snapshot, scene.agent.layout).gpus
        assert any(why.startswith(f"instance {slot}: ") for why in granted.blocked)

        control(tmp_path, device).steer("")
        await scene.until(12, 12, SHARED)


async def test_a_container_has_units_of_one_instance(tmp_path: Path) -> None:
    """A container's units are of one instance; a larger request is refused with what there is."""
    async with shared(tmp_path, UNITS) as scene:
        await scene.until(30, 30, SHARED)
        large = (await scene.kubelet.admit(pod("large", 7)))["main"].envs
        small = (await scene.kubelet.admit(pod("small", 3)))["main"].envs
        assert large["NVIDIA_VISIBLE_DEVICES"] == small["NVIDIA_VISIBLE_DEVICES"]
        assert large["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "70"
        assert small["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=1440M"

        with pytest.raises(AdmissionError, match="MPS serves a container on one MIG inst") as no:
            await scene.kubelet.admit(pod("huge", 11))
        most = "the largest has 10; ask for at most 10, or for larger instances"
        assert most in no.value.message

        for name in ("left", "right"):
            await scene.kubelet.admit(pod(name, 6))
        with pytest.raises(AdmissionError, match="MPS serves a container on one MIG inst") as no:
            await scene.kubelet.admit(pod("wide", 5))
        free = "free now: GPU 0 1g.5gb@0: 0, GPU 0 1g.5gb@1: 4, GPU 0 1g.5gb@6: 4."
        assert f"{free} Ask for less, wait for a pod to end, or ask for larger" in no.value.message


async def test_replicas_that_cannot_be_served_are_logged(tmp_path: Path) -> None:
    """A pool of more replicas than MPS serves gets the maximum, and a log event."""
    with capture_module_logs(mig) as logs:
        async with shared(tmp_path, "layout: {1g.5gb: 1}, mps: {replicas: 9}") as scene:
            await scene.until(6, 6, SHARED)

    [line] = logs
    assert line["event"] == "mps replicas limited to the clients of an instance"
    assert (line["profile"], line["offered"]) == ("1g.5gb", 6)


async def test_the_next_daemon_adopts(tmp_path: Path) -> None:
    """Clients of instances run on over a restart; unused control daemons end with the daemon."""
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    async with kubelet.running():
        async with shared(tmp_path, node=node, kubelet=kubelet) as running:
            await running.until(12, 12, SHARED)
            options = (await kubelet.admit(pod("kept")))["main"]
            await running.wait_holders()
            device = options.envs["NVIDIA_VISIBLE_DEVICES"]
            process = await control(tmp_path, device).process()
        for one in await devices(tmp_path):
            assert (await control(tmp_path, one).process() is not None) == (one == device)

        with control(tmp_path, device).client():
            async with shared(tmp_path, node=node, kubelet=kubelet) as scene:
                await scene.until(12, 12, SHARED)
                assert await control(tmp_path, device).process() == process
                assert len(await control(tmp_path, device).servers()) == 1


async def test_an_unused_server_is_no_program_on_its_instance(tmp_path: Path) -> None:
    """With the last pod of an instance its MPS server ends, and all units are given again."""
    async with shared(tmp_path, "layout: {7g.40gb: 1}, mps: {unitsPerInstance: 2}") as scene:
        name = "nvidia.com/mig-7g.40gb.shared"
        await scene.until(2, 2, name)
        last = SimPod.single("last", {name: 1})
        device = (await scene.kubelet.admit(last))["main"].envs["NVIDIA_VISIBLE_DEVICES"]
        await scene.wait_holders()
        beside = control(tmp_path, device)
        with beside.client():
            [server] = await beside.servers()
            [(instance, compute)] = scene.node.gpus[0].mig.compute_instances
            on = SimProcess(server, None, instance.number, compute.number)
            scene.node.start_process(scene.node.gpus[0], on)
            await scene.kubelet.delete(last)
            await scene.until(2, 0, name)
            assert await beside.servers() == [server]

        async def ended() -> bool:
            return await beside.control.servers() == []

        await until(ended, LIMIT)
        scene.node.end_process(scene.node.gpus[0], server)
        await scene.until(2, 2, name)
        await becomes(lambda: scene.state(0).owner is None)


async def test_a_change_of_the_layout_ends_control_daemons_of_removed_instances(
    tmp_path: Path,
) -> None:
    """A pod that has a unit keeps its control daemon under the new configuration until its end."""
    async with shared(tmp_path) as scene:
        await scene.until(12, 12, SHARED)
        last = pod("last")
        device = (await scene.kubelet.admit(last))["main"].envs["NVIDIA_VISIBLE_DEVICES"]
        await scene.wait_holders()
        process = await control(tmp_path, device).process()

        await anyio.Path(scene.config_file).write_text(mig_pool("layout: {3g.20gb: 2}"))
        await scene.agent.reload()
        await scene.until(2, 0, "nvidia.com/mig-3g.20gb")
        await until(lambda: alone(tmp_path, device), LIMIT)
        assert await control(tmp_path, device).process() == process

        await scene.kubelet.delete(last)
        await scene.until(2, 2, "nvidia.com/mig-3g.20gb")
        assert placements(scene.node) == ["3g.20gb@0", "3g.20gb@4"]
        await until(lambda: none(tmp_path), LIMIT)


async def test_an_instance_that_is_created_again_gets_another_control_daemon(
    tmp_path: Path,
) -> None:
    """After a reset the new device has a new control daemon, and the old daemon is gone."""
    async with shared(tmp_path) as scene:
        await scene.until(12, 12, SHARED)
        before = await devices(tmp_path)
        scene.node.gpus[0].mig.provisioning = SimProvisioning(failures=1000)
        scene.node.reset_gpu(scene.node.gpus[0])
        await scene.until(12, 0, SHARED)
        scene.node.gpus[0].mig.provisioning = SimProvisioning()
        await scene.until(12, 12, SHARED)

        async def only_new() -> bool:
            now = await devices(tmp_path)
            return len(now) == len(before) and not set(now) & set(before)

        await until(only_new, LIMIT)


async def test_control_daemons_of_instances_that_are_gone_end(tmp_path: Path) -> None:
    """A killed daemon's control daemon without a MIG device is found by its folder and ended."""
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    gone, other = control(tmp_path, "MIG-gone"), control(tmp_path, "MIG-of-another-gpu")
    for one, gpu in ((gone, node.gpus[0].id), (other, "GPU-other")):
        await to_thread.run_sync(one.folders.create)
        await to_thread.run_sync(one.folders.write_gpu, gpu)
    process = await DAEMONS.start(gone.daemon)
    await gone.answers()

    async with shared(tmp_path, node=node) as scene:
        await scene.until(12, 12, SHARED)
        with anyio.fail_after(LIMIT):
            await DAEMONS.wait_ended(process)

        async def forgotten() -> bool:
            return gone.device not in await devices(tmp_path)

        await until(forgotten, LIMIT)
        assert other.device in await devices(tmp_path)


async def test_an_instance_removed_by_hand_ends_its_control_daemon(tmp_path: Path) -> None:
    """The shares are Unhealthy until the instance exists again; other control daemons stay."""
    async with shared(tmp_path) as scene:
        await scene.until(12, 12, SHARED)
        before = set(await devices(tmp_path))
        scene.node.gpus[0].mig.provisioning = SimProvisioning(failures=1000)
        foreign.destroy_instance(scene.node, scene.node.gpus[0], "1g.5gb@6")
        await scene.until(12, 8, SHARED)
        scene.node.gpus[0].mig.provisioning = SimProvisioning()
        await scene.until(12, 12, SHARED)

        async def its_own_is_gone() -> bool:
            now = set(await devices(tmp_path))
            return len(before & now) == len(now - before) + 1 == 2

        await until(its_own_is_gone, LIMIT)


async def alone(folder: Path, device: str) -> bool:
    """Return whether this device has folders, and no other device has."""
    return await devices(folder) == [device]


async def none(folder: Path) -> bool:
    """Return whether no device has folders any more."""
    return await devices(folder) == []
