"""Containers that get GPUs by CDI: the whole agent, a kubelet and a container runtime."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from metagpu.core.config.errors import ConfigError
from metagpu.sim.kubelet.kubelet import (
    AdmissionError,
    ContainerRunOptions,
    ContainerStartError,
    SimKubelet,
    SimPod,
)
from metagpu.sim.machine.mig_state import SimProvisioning
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node
from tests.rigs.agent import METAGPU, Scene, agent_at_work
from tests.rigs.cdi import CdiRefusedError, host, resolve_nodes
from tests.rigs.mig import a_node, blocker, created, hurry, placements, pod, until, until_placed

TWO = "nvidia.com/mig-2g.10gb"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timings that last seconds on a real node."""
    hurry(monkeypatch)


def fractions(strategies: str = "cdi-cri", more: str = "") -> str:
    """Write a configuration of fractions."""
    return (
        f"version: metagpu/v1\ndeviceListStrategy: [{strategies}]\n{more}"
        "health: {quietPeriod: 100ms, rescanPeriod: 100ms}\n"
        "pools: [{name: all, backends: [{backend: fraction, sharesPerGpu: 10}]}]\n"
    )


def instances(options: str = "", strategies: str = "cdi-cri") -> str:
    """Write a configuration of MIG instances that are created on demand."""
    return (
        f"version: metagpu/v1\ndeviceListStrategy: [{strategies}]\n"
        "health: {quietPeriod: 100ms, rescanPeriod: 100ms}\n"
        "pools: [{name: mig, backends: [{backend: mig, profiles: [2g.10gb, 7g.40gb], "
        f"keepWarm: 100ms{options}}}]}}]\n"
    )


@dataclass
class Node:
    """A running agent whose host has device nodes, and the folder that a runtime reads."""

    scene: Scene
    folder: Path

    async def started(self, of: SimPod) -> list[str]:
        """Start a pod's container as kubelet and runtime do; return the names of its nodes."""
        return self.nodes(await self.scene.kubelet.start_container(of, "main"))

    def nodes(self, options: ContainerRunOptions) -> list[str]:
        """Return the nodes of a container, as a runtime finds them when it is created."""
        cdi_names = list(options.cdi_devices)
        for key, names in options.annotations.items():
            cdi_names += names.split(",") if key.startswith("cdi.k8s.io/") else []
        return [Path(path).name for path in resolve_nodes(self.folder, *cdi_names)]


@asynccontextmanager
async def at_work(
    tmp_path: Path, config: str, node: SimNode, kubelet: SimKubelet | None = None
) -> AsyncIterator[Node]:
    """Run an agent on a host that has device nodes."""
    if not (tmp_path / "dev").exists():
        host(tmp_path, gpus=len(node.gpus))
    folder = tmp_path / "cdi"
    async with agent_at_work(tmp_path, node, config, kubelet=kubelet, cdi_dir=folder) as scene:
        await scene.wait_snapshot(lambda now: bool(now.gpus))
        yield Node(scene, folder)


async def mig_node(tmp_path: Path, gpus: str = "{model: a100-40gb, mig: true}") -> SimNode:
    """Build a node in MIG mode."""
    return await a_node(tmp_path, gpus)


@pytest.mark.parametrize("strategy", ["cdi-cri", "cdi-annotations"])
async def test_a_container_finds_its_gpu(tmp_path: Path, strategy: str) -> None:
    """The CDI names of an answer are in the file and stand for the nodes of that GPU alone."""
    async with at_work(tmp_path, fractions(strategy), build_node("a100-40gb:2")) as node:
        await node.scene.until(20, 20)
        options = (await node.scene.kubelet.admit(SimPod.single("a", {METAGPU: 5})))["main"]
        [index] = [n for n in range(2) if node.scene.state(n).leases]

        assert node.nodes(options) == ["nvidiactl", "nvidia-uvm", f"nvidia{index}"]
        assert options.devices == ()
        assert options.envs["NVIDIA_VISIBLE_DEVICES"] == "void"


async def test_names_of_the_toolkit_are_still_given(tmp_path: Path) -> None:
    """With the cdiKind of another program's file, its names are given and no file is written."""
    more = "cdiKind: nvidia.com/gpu\n"
    async with at_work(tmp_path, fractions(more=more), build_node("a100-40gb:1")) as node:
        await node.scene.until(10, 10)
        options = (await node.scene.kubelet.admit(SimPod.single("a", {METAGPU: 5})))["main"]

        [gpu] = node.scene.agent.registry.snapshot.gpus
        assert options.cdi_devices == (f"nvidia.com/gpu={gpu}",)
        assert not node.folder.exists()


async def test_a_cdi_folder_that_cannot_be_written_stops_the_offer(tmp_path: Path) -> None:
    """The node offers nothing, and the error names file, reason and fix."""
    (tmp_path / "cdi").write_text("")
    with pytest.raises(BaseExceptionGroup) as caught:
        async with at_work(tmp_path, fractions(), build_node("a100-40gb:1")):
            await anyio.sleep_forever()

    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        [error] = error.exceptions
    assert isinstance(error, ConfigError)
    assert str(error) == (
        f"{tmp_path}/metagpu.yaml: deviceListStrategy: {tmp_path}/cdi cannot be written: File "
        "exists; run as root, mount the host's folder there, name another one with --cdi-dir, or "
        "leave CDI out of deviceListStrategy"
    )


async def test_other_strategies_need_no_folder(tmp_path: Path) -> None:
    """By envvar a node with a read-only CDI folder works as before; a reload to CDI is refused."""
    (tmp_path / "cdi").write_text("")
    async with at_work(tmp_path, fractions("envvar"), build_node("a100-40gb:1")) as node:
        await node.scene.until(10, 10)
        await anyio.Path(node.scene.config_file).write_text(fractions("cdi-cri"))
        await node.scene.agent.reload()

        assert "cdi cannot be written" in str(node.scene.agent.config_loader.error)
        options = (await node.scene.kubelet.admit(SimPod.single("a", {METAGPU: 1})))["main"]
        assert options.envs["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
        assert options.cdi_devices == ()


async def test_an_instance_has_a_name_when_its_pod_is_admitted(tmp_path: Path) -> None:
    """An instance that Allocate creates is in the file, by its uuid, before the answer."""
    config = instances(", create: allocate")
    async with at_work(tmp_path, config, await mig_node(tmp_path)) as live_node:
        await live_node.scene.until(3, 3, TWO)
        asking = pod("train")
        options = (await live_node.scene.kubelet.admit(asking))["main"]
        [device] = [
            compute.uuid for _, compute in live_node.scene.node.gpus[0].mig.compute_instances
        ]

        assert options.cdi_devices == (f"metagpu.io/gpu={device}",)
        assert options.envs["METAGPU_MEMORY_MIB"] == f"{device}=9856"
        nodes = live_node.nodes(options)
        assert nodes[:3] == ["nvidiactl", "nvidia-uvm", "nvidia0"]
        assert len([node for node in nodes if node.startswith("nvidia-cap")]) == 2

        await live_node.scene.wait_holders()
        await live_node.scene.kubelet.delete(asking)
        await until_placed(live_node.scene)
        with anyio.fail_after(30):
            while True:
                try:
                    live_node.nodes(options)
                except CdiRefusedError:
                    break
                await anyio.sleep(0.01)


async def test_an_instance_of_before_keeps_its_name(tmp_path: Path) -> None:
    """A new daemon names at once the devices that its predecessor's pods hold."""
    node = await mig_node(tmp_path)
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    config = instances(", create: allocate")
    async with kubelet.running():
        async with at_work(tmp_path, config, node, kubelet) as live:
            await live.scene.until(3, 3, TWO)
            running = pod("train")
            await kubelet.admit(running)
            await live.scene.wait_holders()
        (tmp_path / "cdi/metagpu.io-gpu.json").unlink()

        async with at_work(tmp_path, config, node, kubelet) as live_node:
            await live_node.scene.until(3, 3, TWO)
            assert "nvidia0" in await live_node.started(running)


async def test_an_admission_waits_for_no_instance(tmp_path: Path) -> None:
    """By CDI alone a pod is admitted before its instance exists; its start waits for it."""
    async with at_work(tmp_path, instances(), await mig_node(tmp_path)) as node:
        await node.scene.until(3, 3, TWO)
        node.scene.node.gpus[0].mig.provisioning = SimProvisioning(in_use_until=float("inf"))
        asking = pod("train")
        options = (await node.scene.kubelet.admit(asking))["main"]
        assert placements(node.scene.node) == []

        [name] = options.cdi_devices
        gpu = node.scene.state(0).gpu.id
        assert name.startswith(f"metagpu.io/gpu={gpu}::2g.10gb:")
        assert options.envs["METAGPU_MEMORY_MIB"] == f"{gpu}=9856"
        with pytest.raises(CdiRefusedError, match="unresolvable"):
            node.nodes(options)


async def test_a_start_waits_for_its_instance(tmp_path: Path) -> None:
    """A container's start waits until its name stands for an instance; each start is answered."""
    async with at_work(tmp_path, instances(), await mig_node(tmp_path)) as live_node:
        await live_node.scene.until(3, 3, TWO)
        live_node.scene.node.gpus[0].mig.provisioning = SimProvisioning(duration=0.3)
        asking = pod("train", count=2)
        await live_node.scene.kubelet.admit(asking)
        nodes = await live_node.started(asking)

        assert len(placements(live_node.scene.node)) == 2
        assert len([node for node in nodes if node.startswith("nvidia-cap")]) == 4
        assert await live_node.started(asking) == nodes
        assert live_node.scene.node.gpus[0].mig.provisioning.requested == 2


async def test_a_start_outlives_a_change_of_the_configuration(tmp_path: Path) -> None:
    """A container gets the instance that was being created when the configuration changed."""
    async with at_work(tmp_path, instances(), await mig_node(tmp_path)) as node:
        await node.scene.until(3, 3, TWO)
        gpu = node.scene.node.gpus[0]
        gpu.mig.provisioning = SimProvisioning(duration=0.7)
        asking, nodes = pod("train"), list[str]()
        await node.scene.kubelet.admit(asking)

        async def start() -> None:
            nodes.extend(await node.started(asking))

        async with anyio.create_task_group() as group:
            group.start_soon(start)
            await until(lambda: gpu.mig.provisioning.requested > 0)
            config = instances().replace("100ms", "200ms")
            await anyio.Path(node.scene.config_file).write_text(config)
            await node.scene.agent.reload()

        assert "nvidia0" in nodes
        assert gpu.mig.provisioning.requested == 1


async def test_a_start_on_a_gpu_that_waits_for_a_reset_fails(tmp_path: Path) -> None:
    """The start fails at once with the command that helps, as no instance can be created."""
    node = await mig_node(tmp_path)
    async with at_work(tmp_path, instances(), node) as live_node:
        await live_node.scene.until(3, 3, TWO)
        asking = pod("train")
        await live_node.scene.kubelet.admit(asking)
        await until(lambda: len(placements(node)) == 1)
        await live_node.scene.wait_holders()
        gpu = node.gpus[0]
        with node.changed:
            gpu.mig.instances.clear()
            gpu.mig.enabled, gpu.mig.pending = False, True
        await until(lambda: "waits for a reset" in blocker(live_node.scene))

        with pytest.raises(
            ContainerStartError, match=r"MIG mode waits for a reset: .*gpu-reset -i"
        ):
            await live_node.scene.kubelet.start_container(asking, "main")


async def test_a_start_that_fails_is_tried_again(tmp_path: Path) -> None:
    """A start fails with NVML's reason, and the next start creates its instance."""
    async with at_work(tmp_path, instances(), await mig_node(tmp_path)) as node:
        await node.scene.until(3, 3, TWO)
        # Once at the claim, once at the first start.
        node.scene.node.gpus[0].mig.provisioning = SimProvisioning(failures=2)
        asking = pod("train")
        await node.scene.kubelet.admit(asking)
        await node.scene.wait_snapshot(
            lambda now: any(s.failed for gpu in now.gpus.values() for s in gpu.provisioned.values())
        )
        with pytest.raises(
            ContainerStartError, match=r"2g.10gb@\d could not be created: .*Unknown"
        ):
            await node.scene.kubelet.start_container(asking, "main")

        assert "nvidia0" in await node.started(asking)


async def test_an_instance_that_is_gone_is_created_for_the_next_start(tmp_path: Path) -> None:
    """After a reset the container's name stands for the instance that replaces the old one."""
    async with at_work(tmp_path, instances(), await mig_node(tmp_path)) as node:
        await node.scene.until(3, 3, TWO)
        asking = pod("train")
        await node.scene.kubelet.admit(asking)
        before = await node.started(asking)
        await node.scene.wait_holders()
        [first] = [device.device for device in created(node.scene).values()]
        node.scene.node.reset_gpu(node.scene.node.gpus[0])
        await until(lambda: first not in [m.device for m in created(node.scene).values()])

        assert await node.started(asking) == before
        assert [m.device for m in created(node.scene).values()] != [first]
        await node.scene.kubelet.delete(asking)
        await until_placed(node.scene)


async def test_pods_of_before_a_reboot_start_again(tmp_path: Path) -> None:
    """With a new daemon, no instance and no file, each container gets an instance of its own."""
    node = await mig_node(tmp_path, "{model: h100-80gb, mig: true}")
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    config = (
        instances(", enableMig: true").replace("2g.10gb", "2g.20gb").replace("7g.40gb", "7g.80gb")
    )
    resource = "nvidia.com/mig-2g.20gb"
    async with kubelet.running(), at_work(tmp_path, config, node, kubelet) as live:
        await live.scene.until(3, 3, resource)
        running = [pod(name, "2g.20gb") for name in "ab"]
        for each in running:
            await kubelet.admit(each)
            await live.started(each)
        await live.scene.wait_holders()

    (tmp_path / "cdi/metagpu.io-gpu.json").unlink()
    for gpu in node.gpus:
        node.reset_gpu(gpu)
        gpu.mig.enabled = gpu.mig.pending = False
    assert placements(node) == []
    async with kubelet.running(), at_work(tmp_path, config, node, kubelet) as live_node:
        await live_node.scene.until(3, 3, resource)
        caps = [
            set(await live_node.started(each)) - {"nvidia0", "nvidiactl", "nvidia-uvm"}
            for each in running
        ]
        assert caps[0].isdisjoint(caps[1])
        assert len(placements(node)) == 2


async def test_a_kubelet_without_pre_start_calls_gets_instances_at_once(tmp_path: Path) -> None:
    """Allocate waits for the instance while the kubelet does not know of the changed option."""
    config = instances(", create: allocate")
    async with at_work(tmp_path, config, await mig_node(tmp_path)) as node:
        await node.scene.until(3, 3, TWO)
        await anyio.Path(node.scene.config_file).write_text(instances(", create: start"))
        await node.scene.agent.reload()
        await until(lambda: not blocker(node.scene))
        await node.scene.until(3, 3, TWO)
        options = (await node.scene.kubelet.admit(pod("train")))["main"]

        assert "2g.10gb:" in options.cdi_devices[0]
        assert "nvidia0" in node.nodes(options)


async def test_a_share_that_cannot_be_had_is_refused_at_once(tmp_path: Path) -> None:
    """A pod that loses a race for slices is refused at admission, in both modes of creation."""
    async with at_work(tmp_path, instances(), await mig_node(tmp_path)) as node:
        await node.scene.until(3, 3, TWO)
        await node.scene.kubelet.admit(pod("a"))
        with pytest.raises(AdmissionError):
            await node.scene.kubelet.admit(pod("b", "7g.40gb"))
