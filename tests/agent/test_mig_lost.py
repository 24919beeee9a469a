"""Pods whose MIG devices a reset or a reboot took: the whole agent, and its cluster."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from metagpu.core.usage import lost_devices
from metagpu.core.usage.timing import UsageTiming
from metagpu.plugins.cluster.node_object import NODES
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.plugins.http.address import ListenAddress
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimKubelet
from metagpu.sim.machine.node import SimNode
from tests.agent.test_metrics import page_of
from tests.rigs.agent import Scene, agent_at_work
from tests.rigs.logs import capture_module_logs
from tests.rigs.mig import a_node, hurry, mig_pool, on_demand_pool, pod, until

TWO = "nvidia.com/mig-2g.10gb"
NODE = "gpu-1"
QUICK = UsageTiming(idle_period=0.02, lost_period=0.05)
GPUS = "{model: a100-40gb, mig: true}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timings that last seconds on a real node."""
    hurry(monkeypatch)


async def lost_devices_of(scene: Scene) -> Sequence[Mapping[str, Any]]:
    """Return the lost devices in `metagpu status`."""
    status: Any = await scene.status()
    found: Sequence[Mapping[str, Any]] = status["lostDevices"]
    return found


def reboot(node: SimNode) -> None:
    """Remove everything from the GPUs that a reboot removes."""
    for gpu in node.gpus:
        node.reset_gpu(gpu)


@pytest.mark.parametrize(
    "config",
    [on_demand_pool(), mig_pool("layout: {2g.10gb: 3}")],
    ids=["made on demand", "of a layout, which is made anew"],
)
async def test_a_pod_with_a_device_lost_in_a_reboot_is_reported(
    tmp_path: Path, config: str
) -> None:
    """One log event and `status` name the pod and the fix, until the pod is gone."""
    node = await a_node(tmp_path, GPUS)
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    train = pod("train")

    async with (
        kubelet.running(),
        agent_at_work(tmp_path, node, config, kubelet=kubelet, usage_timing=QUICK) as agent,
    ):
        await agent.until(3, 3, TWO)
        device = (await kubelet.admit(train))["main"].envs["NVIDIA_VISIBLE_DEVICES"]
        await agent.wait_holders()

    reboot(node)
    with capture_module_logs(lost_devices) as lines:
        async with (
            kubelet.running(),
            agent_at_work(
                tmp_path,
                node,
                config,
                kubelet=kubelet,
                usage_timing=QUICK,
                metrics=ListenAddress("127.0.0.1", 0),
            ) as scene,
        ):
            await until(lambda: bool(scene.agent.usage_service.lost_devices))
            [found] = await lost_devices_of(scene)
            page = await page_of(scene)
            await kubelet.delete(train)
            await until(lambda: not scene.agent.usage_service.lost_devices)

    assert (found["holder"], found["devices"]) == ("default/train (main)", [device])
    assert found["podUid"] == train.uid
    assert page.value("metagpu_lease_differences", difference="lease_without_device") == 1
    fix = "kubectl delete pod -n default train"
    assert [(line["devices"], line["fix"]) for line in lines] == [(device, fix)]
    assert found["reason"].endswith(fix)


async def test_a_pod_that_a_reset_left_a_dead_device_has_an_event(tmp_path: Path) -> None:
    """With Events for pods, `kubectl describe pod` shows the lost device and the fix."""
    node, server = await a_node(tmp_path, GPUS), SimApiServer()
    server.add_node(NODE)
    async with server.running():
        uses = frozenset({Feature.POD_EVENTS})
        joins = ClusterSettings(NODE, server.kubeconfig(tmp_path), features=uses)
        async with agent_at_work(
            tmp_path, node, on_demand_pool(), cluster_settings=joins, usage_timing=QUICK
        ) as scene:
            await server.watched(NODES)
            await scene.until(3, 3, TWO)
            await scene.kubelet.admit(pod("train"))
            await scene.wait_holders()
            reboot(node)
            await server.until(server.events)
            [found] = await lost_devices_of(scene)

    [event] = server.events()
    assert (event["reason"], event["type"]) == ("GPUDeviceLost", "Warning")
    assert (event["regarding"]["name"], event["note"]) == ("train", found["reason"])


async def test_a_pod_whose_device_is_there_is_not_reported(tmp_path: Path) -> None:
    """A new daemon finds the devices of its pods in place, and reports no pod."""
    node = await a_node(tmp_path, GPUS)
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    looks = 0

    async with kubelet.running():
        async with agent_at_work(
            tmp_path, node, on_demand_pool(), kubelet=kubelet, usage_timing=QUICK
        ) as scene:
            await scene.until(3, 3, TWO)
            await kubelet.admit(pod("train"))
            await scene.wait_holders()
        async with agent_at_work(
            tmp_path, node, on_demand_pool(), kubelet=kubelet, usage_timing=QUICK
        ) as scene:
            await scene.wait_snapshot(lambda now: any(gpu.leases for gpu in now.gpus.values()))
            await scene.wait_holders()
            watch = scene.agent.usage_service._lost
            read = watch._read

            async def counted() -> Any:  # noqa: ANN401 - as it is read
                nonlocal looks
                looks += 1
                return await read()

            watch._read = counted
            await until(lambda: looks > 3)
            assert await lost_devices_of(scene) == []
