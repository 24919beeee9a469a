"""Pods whose MIG devices a reset or a reboot took: the whole agent, and the cluster it tells."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from metagpu.backends.mig import turns
from metagpu.core import lost
from metagpu.plugins.cluster.settings import Feature, Settings
from metagpu.sim.apiserver import SimApiServer
from metagpu.sim.kubelet import SimKubelet
from metagpu.sim.node import SimNode
from tests.agent_rig import Scene, agent_at_work
from tests.heard import heard
from tests.mig_rig import a_node, configured, cut, hurry, pod, until

TWO = "nvidia.com/mig-2g.10gb"
NODE = "gpu-1"
GPUS = "{board: a100-40gb, mig: true}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody wait for what takes seconds on a real node."""
    monkeypatch.setattr(lost, "PERIOD", 0.05)
    hurry(monkeypatch)
    monkeypatch.setattr(turns, "TURN", 0.01)


async def told_lost(it: Scene) -> Sequence[Mapping[str, Any]]:
    """Give what `metagpu status` says of lost devices."""
    status: Any = await it.agent._status({})
    found: Sequence[Mapping[str, Any]] = status["lost"]
    return found


def rebooted(node: SimNode) -> None:
    """Take everything from the GPUs that a reboot takes."""
    for gpu in node.gpus:
        node.recover(gpu)


@pytest.mark.parametrize(
    "config",
    [configured(), cut("layout: {2g.10gb: 3}")],
    ids=["made on demand", "of a layout, which is made anew"],
)
async def test_a_pod_that_a_reboot_left_a_dead_device_is_told(tmp_path: Path, config: str) -> None:
    """One log line and `status` name it and what helps, until the pod is gone."""
    node = await a_node(tmp_path, GPUS)
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    train = pod("train")

    async with kubelet.running(), agent_at_work(tmp_path, node, config, kubelet=kubelet) as it:
        await it.until(3, 3, TWO)
        device = (await kubelet.admit(train))["main"].envs["NVIDIA_VISIBLE_DEVICES"]
        await it.told()

    rebooted(node)
    with heard(lost) as lines:
        async with kubelet.running(), agent_at_work(tmp_path, node, config, kubelet=kubelet) as it:
            await until(lambda: bool(it.agent.oversight.lost))
            [found] = await told_lost(it)
            await kubelet.delete(train)
            await until(lambda: not it.agent.oversight.lost)

    assert (found["holder"], found["devices"]) == ("default/train (main)", [device])
    assert found["podUid"] == train.uid
    mend = "kubectl delete pod -n default train"
    assert [(line["devices"], line["mend"]) for line in lines] == [(device, mend)]
    assert found["why"].endswith(mend)


async def test_a_pod_that_a_reset_left_a_dead_device_has_an_event(tmp_path: Path) -> None:
    """Where the API server is told of pods, `kubectl describe pod` shows it, with what helps."""
    node, server = await a_node(tmp_path, GPUS), SimApiServer()
    server.add_node(NODE)
    async with server.running():
        uses = frozenset({Feature.POD_EVENTS})
        joins = Settings(NODE, server.kubeconfig(tmp_path), features=uses)
        async with agent_at_work(tmp_path, node, configured(), joins=joins) as it:
            await server.until(lambda: any("?watch" in each.what for each in server.requests))
            await it.until(3, 3, TWO)
            await it.kubelet.admit(pod("train"))
            await it.told()
            rebooted(node)
            await server.until(server.events)
            [found] = await told_lost(it)

    [event] = server.events()
    assert (event["reason"], event["type"]) == ("GPUDeviceLost", "Warning")
    assert (event["regarding"]["name"], event["note"]) == ("train", found["why"])


async def test_a_pod_whose_device_is_there_is_left_in_peace(tmp_path: Path) -> None:
    """A new daemon finds the devices of its pods where they were, and tells of nobody."""
    node = await a_node(tmp_path, GPUS)
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    looks = 0

    async with kubelet.running():
        async with agent_at_work(tmp_path, node, configured(), kubelet=kubelet) as it:
            await it.until(3, 3, TWO)
            await kubelet.admit(pod("train"))
            await it.told()
        async with agent_at_work(tmp_path, node, configured(), kubelet=kubelet) as it:
            await it.settles(lambda now: any(gpu.leases for gpu in now.gpus.values()))
            await it.told()
            watch = it.agent.oversight._lost
            read = watch._read

            async def counted() -> Any:  # noqa: ANN401 - as it is read
                nonlocal looks
                looks += 1
                return await read()

            watch._read = counted
            await until(lambda: looks > 3)
            assert await told_lost(it) == []
