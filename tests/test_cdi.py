"""Containers that are given GPUs by CDI: the whole agent, a kubelet, and what a runtime does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from metagpu.core.errors import ConfigError
from metagpu.sim.instances import Making
from metagpu.sim.kubelet import AdmissionError, ContainerStartError, Pod, RunOptions, SimKubelet
from metagpu.sim.node import SimNode
from metagpu.sim.spec import simulated
from tests.agent_rig import METAGPU, Scene, agent_at_work
from tests.cdi_rig import CdiRefusedError, host, resolved
from tests.mig_rig import a_node, hurry, made, places, pod, until, until_placed, why

TWO = "nvidia.com/mig-2g.10gb"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody wait for what takes seconds on a real node."""
    hurry(monkeypatch)


def fractions(strategies: str = "cdi-cri", more: str = "") -> str:
    """Write a configuration of fractions."""
    return (
        f"version: metagpu/v1\ndeviceListStrategy: [{strategies}]\n{more}"
        "health: {quietPeriod: 100ms, rescanPeriod: 100ms}\n"
        "pools: [{name: all, backends: [{backend: fraction, sharesPerGpu: 10}]}]\n"
    )


def instances(options: str = "", strategies: str = "cdi-cri") -> str:
    """Write a configuration of MIG instances that are made on demand."""
    return (
        f"version: metagpu/v1\ndeviceListStrategy: [{strategies}]\n"
        "health: {quietPeriod: 100ms, rescanPeriod: 100ms}\n"
        "pools: [{name: mig, backends: [{backend: mig, profiles: [2g.10gb, 7g.40gb], "
        f"keepWarm: 100ms{options}}}]}}]\n"
    )


@dataclass
class Node:
    """An agent at work whose host has device nodes, and the folder that a runtime reads."""

    scene: Scene
    folder: Path

    async def started(self, of: Pod) -> list[str]:
        """Start a pod's container as kubelet and runtime do; give the names of its nodes."""
        return self.nodes(await self.scene.kubelet.start_container(of, "main"))

    def nodes(self, options: RunOptions) -> list[str]:
        """Give the nodes of a container, as a runtime finds them when it is created."""
        told = list(options.cdi_devices)
        for key, names in options.annotations.items():
            told += names.split(",") if key.startswith("cdi.k8s.io/") else []
        return [Path(path).name for path in resolved(self.folder, *told)]


@asynccontextmanager
async def at_work(
    tmp_path: Path, config: str, node: SimNode, kubelet: SimKubelet | None = None
) -> AsyncIterator[Node]:
    """Run an agent on a host that has device nodes."""
    if not (tmp_path / "dev").exists():
        host(tmp_path, gpus=len(node.gpus))
    folder = tmp_path / "cdi"
    async with agent_at_work(tmp_path, node, config, kubelet=kubelet, cdi=folder) as scene:
        await scene.settles(lambda now: bool(now.gpus))
        yield Node(scene, folder)


async def mig_node(tmp_path: Path, gpus: str = "{board: a100-40gb, mig: true}") -> SimNode:
    """Make a node in MIG mode."""
    return await a_node(tmp_path, gpus)


@pytest.mark.parametrize("strategy", ["cdi-cri", "cdi-annotations"])
async def test_a_container_finds_its_gpu(tmp_path: Path, strategy: str) -> None:
    """The names in the answer are in the file, and stand for the nodes of that GPU alone."""
    async with at_work(tmp_path, fractions(strategy), simulated("a100-40gb:2")) as it:
        await it.scene.until(20, 20)
        options = (await it.scene.kubelet.admit(Pod.single("a", {METAGPU: 5})))["main"]
        [index] = [n for n in range(2) if it.scene.state(n).leases]

        assert it.nodes(options) == ["nvidiactl", "nvidia-uvm", f"nvidia{index}"]
        assert options.devices == ()
        assert options.envs["NVIDIA_VISIBLE_DEVICES"] == "void"


async def test_names_of_the_toolkit_are_still_given(tmp_path: Path) -> None:
    """With cdiKind of somebody else's file, its names are given and no file is written."""
    more = "cdiKind: nvidia.com/gpu\n"
    async with at_work(tmp_path, fractions(more=more), simulated("a100-40gb:1")) as it:
        await it.scene.until(10, 10)
        options = (await it.scene.kubelet.admit(Pod.single("a", {METAGPU: 5})))["main"]

        [gpu] = it.scene.agent.registry.snapshot.gpus
        assert options.cdi_devices == (f"nvidia.com/gpu={gpu}",)
        assert not it.folder.exists()


async def test_a_node_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    """Nothing is offered then, and the sentence names file, reason and mend."""
    (tmp_path / "cdi").write_text("")
    with pytest.raises(BaseExceptionGroup) as caught:
        async with at_work(tmp_path, fractions(), simulated("a100-40gb:1")):
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


async def test_other_ways_need_no_folder(tmp_path: Path) -> None:
    """By envvar a node whose CDI folder cannot be written works as ever; a reload is refused."""
    (tmp_path / "cdi").write_text("")
    async with at_work(tmp_path, fractions("envvar"), simulated("a100-40gb:1")) as it:
        await it.scene.until(10, 10)
        await anyio.Path(it.scene.config_file).write_text(fractions("cdi-cri"))
        await it.scene.agent.reload()

        assert "cdi cannot be written" in str(it.scene.agent.adoption.error)
        options = (await it.scene.kubelet.admit(Pod.single("a", {METAGPU: 1})))["main"]
        assert options.envs["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
        assert options.cdi_devices == ()


async def test_an_instance_has_a_name_when_its_pod_is_admitted(tmp_path: Path) -> None:
    """Made in Allocate, it is named by its uuid, and the file has it before the answer."""
    config = instances(", create: allocate")
    async with at_work(tmp_path, config, await mig_node(tmp_path)) as it:
        await it.scene.until(3, 3, TWO)
        asking = pod("train")
        options = (await it.scene.kubelet.admit(asking))["main"]
        [device] = [compute.uuid for _, compute in it.scene.node.gpus[0].mig.computes]

        assert options.cdi_devices == (f"metagpu.io/gpu={device}",)
        assert options.envs["METAGPU_MEMORY_MIB"] == f"{device}=9856"
        nodes = it.nodes(options)
        assert nodes[:3] == ["nvidiactl", "nvidia-uvm", "nvidia0"]
        assert len([node for node in nodes if node.startswith("nvidia-cap")]) == 2

        await it.scene.told()
        await it.scene.kubelet.delete(asking)
        await until_placed(it.scene)
        with anyio.fail_after(30):
            while True:
                try:
                    it.nodes(options)
                except CdiRefusedError:
                    break
                await anyio.sleep(0.01)


async def test_an_instance_of_before_keeps_its_name(tmp_path: Path) -> None:
    """A daemon that starts names at once what pods of its predecessor were told."""
    node = await mig_node(tmp_path)
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    config = instances(", create: allocate")
    async with kubelet.running():
        async with at_work(tmp_path, config, node, kubelet) as it:
            await it.scene.until(3, 3, TWO)
            running = pod("train")
            await kubelet.admit(running)
            await it.scene.told()
        (tmp_path / "cdi/metagpu.io-gpu.json").unlink()

        async with at_work(tmp_path, config, node, kubelet) as it:
            await it.scene.until(3, 3, TWO)
            assert "nvidia0" in await it.started(running)


async def test_an_admission_waits_for_no_instance(tmp_path: Path) -> None:
    """By CDI alone a pod is admitted while its instance is being made; its start waits for it."""
    async with at_work(tmp_path, instances(), await mig_node(tmp_path)) as it:
        await it.scene.until(3, 3, TWO)
        it.scene.node.gpus[0].mig.making = Making(in_use_until=float("inf"))
        asking = pod("train")
        options = (await it.scene.kubelet.admit(asking))["main"]
        assert places(it.scene.node) == []

        [name] = options.cdi_devices
        gpu = it.scene.state(0).gpu.id
        assert name.startswith(f"metagpu.io/gpu={gpu}::2g.10gb:")
        assert options.envs["METAGPU_MEMORY_MIB"] == f"{gpu}=9856"
        with pytest.raises(CdiRefusedError, match="unresolvable"):
            it.nodes(options)


async def test_a_start_waits_for_its_instance(tmp_path: Path) -> None:
    """When the container is created its name stands for the instance; each start is answered."""
    async with at_work(tmp_path, instances(), await mig_node(tmp_path)) as it:
        await it.scene.until(3, 3, TWO)
        it.scene.node.gpus[0].mig.making = Making(takes=0.3)
        asking = pod("train", count=2)
        await it.scene.kubelet.admit(asking)
        nodes = await it.started(asking)

        assert len(places(it.scene.node)) == 2
        assert len([node for node in nodes if node.startswith("nvidia-cap")]) == 4
        assert await it.started(asking) == nodes
        assert it.scene.node.gpus[0].mig.making.begun == 2


async def test_a_start_outlives_a_change_of_the_configuration(tmp_path: Path) -> None:
    """What was being made for it when the configuration changed is what the container gets."""
    async with at_work(tmp_path, instances(), await mig_node(tmp_path)) as it:
        await it.scene.until(3, 3, TWO)
        gpu = it.scene.node.gpus[0]
        gpu.mig.making = Making(takes=0.7)
        asking, nodes = pod("train"), list[str]()
        await it.scene.kubelet.admit(asking)

        async def start() -> None:
            nodes.extend(await it.started(asking))

        async with anyio.create_task_group() as group:
            group.start_soon(start)
            await until(lambda: gpu.mig.making.begun > 0)
            config = instances().replace("100ms", "200ms")
            await anyio.Path(it.scene.config_file).write_text(config)
            await it.scene.agent.reload()

        assert "nvidia0" in nodes
        assert gpu.mig.making.begun == 1


async def test_a_start_on_a_gpu_that_waits_for_a_reset_says_so(tmp_path: Path) -> None:
    """The container does not wait for what nobody makes: it fails with the command that helps."""
    node = await mig_node(tmp_path)
    async with at_work(tmp_path, instances(), node) as it:
        await it.scene.until(3, 3, TWO)
        asking = pod("train")
        await it.scene.kubelet.admit(asking)
        await until(lambda: len(places(node)) == 1)
        await it.scene.told()
        gpu = node.gpus[0]
        with node.changed:
            gpu.mig.present.clear()
            gpu.mig.enabled, gpu.mig.pending = False, True
        await until(lambda: "waits for a reset" in why(it.scene))

        with pytest.raises(
            ContainerStartError, match=r"MIG mode waits for a reset: .*gpu-reset -i"
        ):
            await it.scene.kubelet.start_container(asking, "main")


async def test_a_start_that_fails_is_tried_again(tmp_path: Path) -> None:
    """NVML's reason is told at the container's start, and the next start has its instance made."""
    async with at_work(tmp_path, instances(), await mig_node(tmp_path)) as it:
        await it.scene.until(3, 3, TWO)
        # Once at the claim, once at the first start.
        it.scene.node.gpus[0].mig.making = Making(failures=2)
        asking = pod("train")
        await it.scene.kubelet.admit(asking)
        await it.scene.settles(
            lambda now: any(s.failed for gpu in now.gpus.values() for s in gpu.stocks.values())
        )
        with pytest.raises(ContainerStartError, match=r"2g.10gb@\d could not be made: .*Unknown"):
            await it.scene.kubelet.start_container(asking, "main")

        assert "nvidia0" in await it.started(asking)


async def test_an_instance_that_is_gone_is_made_for_the_next_start(tmp_path: Path) -> None:
    """After a reset the container's name stands for the instance that was made in its place."""
    async with at_work(tmp_path, instances(), await mig_node(tmp_path)) as it:
        await it.scene.until(3, 3, TWO)
        asking = pod("train")
        await it.scene.kubelet.admit(asking)
        before = await it.started(asking)
        await it.scene.told()
        [first] = [it.device for it in made(it.scene).values()]
        it.scene.node.recover(it.scene.node.gpus[0])
        await until(lambda: first not in [m.device for m in made(it.scene).values()])

        assert await it.started(asking) == before
        assert [m.device for m in made(it.scene).values()] != [first]
        await it.scene.kubelet.delete(asking)
        await until_placed(it.scene)


async def test_pods_of_before_a_reboot_start_again(tmp_path: Path) -> None:
    """With a new daemon, no instance and no file, each container finds an instance of its own."""
    node = await mig_node(tmp_path, "{board: h100-80gb, mig: true}")
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    config = (
        instances(", enableMig: true").replace("2g.10gb", "2g.20gb").replace("7g.40gb", "7g.80gb")
    )
    resource = "nvidia.com/mig-2g.20gb"
    async with kubelet.running(), at_work(tmp_path, config, node, kubelet) as it:
        await it.scene.until(3, 3, resource)
        running = [pod(name, "2g.20gb") for name in "ab"]
        for each in running:
            await kubelet.admit(each)
            await it.started(each)
        await it.scene.told()

    (tmp_path / "cdi/metagpu.io-gpu.json").unlink()
    for gpu in node.gpus:
        node.recover(gpu)
        gpu.mig.enabled = gpu.mig.pending = False
    assert places(node) == []
    async with kubelet.running(), at_work(tmp_path, config, node, kubelet) as it:
        await it.scene.until(3, 3, resource)
        caps = [
            set(await it.started(each)) - {"nvidia0", "nvidiactl", "nvidia-uvm"} for each in running
        ]
        assert caps[0].isdisjoint(caps[1])
        assert len(places(node)) == 2


async def test_a_kubelet_that_does_not_call_before_starts_gets_it_at_once(tmp_path: Path) -> None:
    """After a change of configuration the kubelet does not know of it: then Allocate waits."""
    config = instances(", create: allocate")
    async with at_work(tmp_path, config, await mig_node(tmp_path)) as it:
        await it.scene.until(3, 3, TWO)
        await anyio.Path(it.scene.config_file).write_text(instances(", create: start"))
        await it.scene.agent.reload()
        await until(lambda: not why(it.scene))
        await it.scene.until(3, 3, TWO)
        options = (await it.scene.kubelet.admit(pod("train")))["main"]

        assert "2g.10gb:" in options.cdi_devices[0]
        assert "nvidia0" in it.nodes(options)


async def test_a_share_that_cannot_be_had_is_refused_at_once(tmp_path: Path) -> None:
    """Who loses a race for slices is told at admission, whenever instances are made."""
    async with at_work(tmp_path, instances(), await mig_node(tmp_path)) as it:
        await it.scene.until(3, 3, TWO)
        await it.scene.kubelet.admit(pod("a"))
        with pytest.raises(AdmissionError):
            await it.scene.kubelet.admit(pod("b", "7g.40gb"))
