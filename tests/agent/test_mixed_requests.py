"""Containers that hold shares of several resources and see the devices of one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from metagpu.core.usage import lease_differences
from metagpu.core.usage.lease_differences import find_mixed_requests
from metagpu.core.usage.timing import UsageTiming
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimPod
from metagpu.sim.kubelet.pods import ContainerRunOptions
from tests.rigs.agent import METAGPU, Scene, agent_at_work
from tests.rigs.cdi import host
from tests.rigs.logs import capture_module_logs
from tests.rigs.mig import a_node, hurry, on_demand_pool, until

SLICED = "nvidia.com/gpu.shared"
NODE = "gpu-1"
TIMING = UsageTiming(idle_period=0.02, mixed_period=0.02)
TWO = """
version: metagpu/v1
deviceListStrategy: STRATEGY
pools:
  - {name: one, gpus: {index: 0}, backends: [{backend: fraction, sharesPerGpu: 10}]}
  - {name: two, gpus: {index: 1}, backends: [{backend: timeslice, replicas: 4}]}
"""
BOTH = {METAGPU: 3, SLICED: 1}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timings that last seconds on a real node."""
    hurry(monkeypatch)


async def mixed_of(scene: Scene) -> list[dict[str, Any]]:
    """Return the mixed requests in `metagpu status`."""
    status: Any = await scene.status()
    found: list[dict[str, Any]] = status["mixedRequests"]
    return found


async def test_a_container_that_sees_one_of_its_gpus_is_reported(tmp_path: Path) -> None:
    """By `envvar`, status, log and an Event name both GPUs and the ways to ask, once."""
    server = SimApiServer()
    server.add_node(NODE)
    features = frozenset({Feature.PODS, Feature.POD_EVENTS})
    text, pod = TWO.replace("STRATEGY", "envvar"), SimPod.single("train", BOTH)

    with capture_module_logs(lease_differences) as logged:
        async with server.running():
            settings = ClusterSettings(NODE, server.kubeconfig(tmp_path), features=features)
            async with agent_at_work(
                tmp_path, config=text, cluster_settings=settings, usage_timing=TIMING
            ) as scene:
                await scene.until(10, 10)
                await scene.until(4, 4, SLICED)
                server.add_pod("default", pod.name, NODE, uid=pod.uid)
                await scene.wait_snapshot(lambda now: pod.uid in now.pods.by_uid)
                options = (await scene.kubelet.admit(pod))["main"]
                assert options.envs["NVIDIA_VISIBLE_DEVICES"].count("GPU-") == 1  # not both
                await server.until(lambda: len(server.events()) > 0)
                [mixed] = await mixed_of(scene)
                [event] = server.events()
                await scene.kubelet.delete(pod)
                await until(lambda: not scene.agent.usage_service.mixed_requests)

    assert (mixed["podUid"], event["regarding"]["uid"]) == (pod.uid, pod.uid)
    assert mixed["holder"] == "default/train (main)"
    assert "GPU 0 by cnvrg.io/metagpu, GPU 1 by nvidia.com/gpu.shared" in mixed["reason"]
    assert "Request each resource in a container of its own" in mixed["reason"]
    assert (event["reason"], event["note"]) == ("GPUNotVisible", mixed["reason"])
    assert event["regarding"]["name"] == "train"
    assert [line["reason"] for line in logged] == [mixed["reason"]]


@asynccontextmanager
async def both_granted(
    tmp_path: Path, text: str
) -> AsyncIterator[tuple[Scene, ContainerRunOptions]]:
    """Run an agent with a container of two resources, which was looked at."""
    host(tmp_path, gpus=2)
    async with agent_at_work(
        tmp_path, config=text, usage_timing=TIMING, cdi_dir=tmp_path / "cdi"
    ) as scene:
        await scene.until(10, 10)
        await scene.until(4, 4, SLICED)
        options = (await scene.kubelet.admit(SimPod.single("train", BOTH)))["main"]
        await scene.wait_holders()
        scene.agent.usage_service._mixed._check()
        yield scene, options


@pytest.mark.parametrize(
    "strategy", ["volume-mounts", "cdi-cri", "cdi-annotations", "[envvar, cdi-cri]"]
)
async def test_other_strategies_give_both_gpus(tmp_path: Path, strategy: str) -> None:
    """By mounts or CDI the container has both GPUs, and nothing is reported."""
    async with both_granted(tmp_path, TWO.replace("STRATEGY", strategy)) as (scene, options):
        given = [mount.container_path for mount in options.mounts]
        given += [*options.cdi_devices, *options.annotations.values()]
        for state in scene.agent.registry.snapshot.gpus.values():
            assert any(name.endswith(state.gpu.id) for name in given)
        assert await mixed_of(scene) == []


async def test_containers_of_one_resource_each_are_no_mixed_request(tmp_path: Path) -> None:
    """Two containers of a pod, each with its own resource, see their GPUs."""
    text = TWO.replace("STRATEGY", "envvar")
    async with agent_at_work(tmp_path, config=text, usage_timing=TIMING) as scene:
        await scene.until(10, 10)
        await scene.until(4, 4, SLICED)
        await scene.kubelet.admit(SimPod.single("one", {METAGPU: 3}))
        await scene.kubelet.admit(SimPod.single("other", {SLICED: 1}))
        await scene.wait_holders()
        scene.agent.usage_service._mixed._check()

        assert await mixed_of(scene) == []


async def test_two_instances_of_a_gpu_are_two_devices(tmp_path: Path) -> None:
    """Two MIG profiles in one container are two devices, also on one GPU."""
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    async with agent_at_work(tmp_path, node, on_demand_pool(), usage_timing=TIMING) as scene:
        names = ("nvidia.com/mig-1g.5gb", "nvidia.com/mig-2g.10gb")
        await scene.until(3, 3, names[1])
        await scene.kubelet.admit(SimPod.single("train", dict.fromkeys(names, 1)))
        await scene.wait_holders()
        await until(lambda: bool(scene.agent.usage_service.mixed_requests))

        [devices] = find_mixed_requests(scene.agent.registry.snapshot).values()
        assert list(devices) == list(names)
        assert all(text.endswith(" of GPU 0") for text in devices.values())
