"""Pods whose GPU the node no longer has: the whole agent, and its cluster."""

from pathlib import Path
from typing import Any

import pynvml
import pytest

from metagpu.core.reports.diagnosis import check_lost_devices
from metagpu.core.reports.reading import read_report
from metagpu.core.reports.schema import StatusReport
from metagpu.nvml.driver import NvmlDriver
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimKubelet, SimPod
from tests.agent.test_mig_lost import NODE, QUICK, lost_devices_of
from tests.rigs.agent import METAGPU, agent_at_work
from tests.rigs.mig import a_node, hurry, until
from tests.rigs.nvml_library import NvmlLibrary

KEPT, GONE, OTHER = (f"GPU-11111111-0000-0000-0000-00000000000{number}" for number in (1, 2, 3))
BACKENDS = {
    "whole": ("backend: whole", 1, 1),
    "fraction": ("backend: fraction, sharesPerGpu: 2", 2, 2),
    "timeslice": ("backend: timeslice, replicas: 2", 2, 1),
    "mps": ("backend: mps, unitsPerGpu: 2", 2, 2),
}
"""Options, shares of a GPU, and shares of a request that leaves the next one the other GPU."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timings that last seconds on a real node."""
    hurry(monkeypatch)


def gpus(*uuids: str) -> str:
    """Describe GPUs as in a node file."""
    return ", ".join(f"{{model: t4, uuid: {uuid}}}" for uuid in uuids)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("after", [(KEPT,), (KEPT, OTHER)], ids=["gone", "exchanged"])
async def test_a_pod_whose_gpu_is_gone_is_reported(
    tmp_path: Path, after: tuple[str, ...], backend: str
) -> None:
    """Status, doctor and an Event name the pod and the fix, until the pod is gone."""
    options, per_gpu, wanted = BACKENDS[backend]
    config = (
        "version: metagpu/v1\n"
        f"pools: [{{name: all, backends: [{{{options}, resource: x.y/gpu}}]}}]\n"
    )
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    pods = [SimPod.single(key, {"x.y/gpu": wanted}) for key in ("a", "b")]
    server = SimApiServer()
    server.add_node(NODE)
    uses = frozenset({Feature.POD_EVENTS})

    async with server.running(), kubelet.running():
        node = await a_node(tmp_path, gpus(KEPT, GONE))
        async with agent_at_work(
            tmp_path, node, config, kubelet=kubelet, usage_timing=QUICK
        ) as scene:
            await scene.until(2 * per_gpu, 2 * per_gpu, "x.y/gpu")
            given = {
                (await kubelet.admit(each))["main"].envs["NVIDIA_VISIBLE_DEVICES"]: each
                for each in pods
            }
            await scene.wait_holders()

        node = await a_node(tmp_path, gpus(*after))
        joins = ClusterSettings(NODE, server.kubeconfig(tmp_path), features=uses)
        async with agent_at_work(
            tmp_path, node, config, kubelet=kubelet, cluster_settings=joins, usage_timing=QUICK
        ) as scene:
            await server.until(server.events)
            [found] = await lost_devices_of(scene)
            finding = check_lost_devices(read_report(await scene.status(), StatusReport))
            await kubelet.delete(given[GONE])
            await until(lambda: not scene.agent.usage_service.lost_devices)

    name = given[GONE].name
    assert (found["holder"], found["devices"]) == (f"default/{name} (main)", [GONE])
    assert found["podUid"] == given[GONE].uid
    assert finding == (
        "error",
        f"containers hold devices that no longer exist: default/{name} (main)",
        f"`kubectl delete pod -n default {name}`",
    )
    [event] = server.events()
    assert (event["reason"], event["regarding"]["name"]) == ("GPUDeviceLost", name)
    assert event["note"] == found["reason"]


async def test_a_gpu_that_cannot_be_read_is_not_gone(tmp_path: Path) -> None:
    """A GPU that is off the bus at the daemon's start takes nothing from its pods."""
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    library = NvmlLibrary(tmp_path / "nvml")
    looks = 0

    async with kubelet.running():
        async with agent_at_work(
            tmp_path, driver=NvmlDriver(library.load()), kubelet=kubelet, usage_timing=QUICK
        ) as scene:
            await scene.until(20, 20)
            await kubelet.admit(SimPod.single("a", {METAGPU: 20}))
            await scene.wait_holders()
        library.fail("nvmlDeviceGetUUID", 1, pynvml.NVML_ERROR_GPU_IS_LOST)
        async with agent_at_work(
            tmp_path, driver=NvmlDriver(library.load()), kubelet=kubelet, usage_timing=QUICK
        ) as scene:
            await scene.wait_snapshot(lambda now: bool(now.vanished))
            watch = scene.agent.usage_service._lost
            check = watch._check

            async def counted() -> Any:  # noqa: ANN401 - as it is read
                nonlocal looks
                looks += 1
                return await check()

            watch._check = counted  # type: ignore[method-assign]
            await until(lambda: looks > 3)
            assert await lost_devices_of(scene) == []
