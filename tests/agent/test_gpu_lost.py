"""Pods whose GPU the node no longer has: the whole agent, and its cluster."""

from pathlib import Path
from socket import gethostname
from typing import Any

import anyio
import pynvml
import pytest

from metagpu.core.model.shares import Holder
from metagpu.core.reports.diagnosis import check_lost_devices
from metagpu.core.reports.reading import read_report
from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.state.facts import LeasesObserved
from metagpu.nvml.driver import NvmlDriver
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import ContainerRunOptions, SimKubelet, SimPod
from tests.agent.test_claim_status import entries, written
from tests.agent.test_mig_lost import NODE, QUICK, lost_devices_of
from tests.agent.test_resource_claims import at_work
from tests.rigs.agent import METAGPU, agent_at_work
from tests.rigs.cdi import host
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("after", [(KEPT,), (KEPT, OTHER)], ids=["gone", "exchanged"])
async def test_a_prepared_claim_whose_gpu_is_gone_is_reported(
    tmp_path: Path, after: tuple[str, ...], backend: str
) -> None:
    """Status, doctor, the claim and Events name its pods, until the claim is unprepared."""
    config = f"""
version: metagpu/v1
health: {{quietPeriod: 100ms, rescanPeriod: 100ms}}
pools: [{{name: all, api: dra, backends: [{{{BACKENDS[backend][0]}}}]}}]
"""
    server = SimApiServer()
    host(tmp_path, gpus=2)
    pods = Holder("default", "a", "main"), Holder("default", "b", "main")
    device = f"gpu-{GONE[4:]}" + (f"-{backend}" if backend != "whole" else "")

    async with at_work(
        tmp_path, config, await a_node(tmp_path, gpus(KEPT, GONE)), server=server
    ) as scene:
        claim = scene.allocate(device)
        answer = (await scene.prepare(claim))[claim.uid]
        ready = await written(scene, claim)
        scene.write_checkpoint({claim: answer.devices})
    for holder in pods:
        server.add_pod(holder.namespace, holder.pod, node=gethostname(), uid=f"uid-{holder.pod}")

    uses = frozenset({Feature.PODS, Feature.POD_EVENTS})
    async with at_work(
        tmp_path,
        config,
        await a_node(tmp_path, gpus(*after)),
        server=server,
        features=uses,
        usage_timing=QUICK,
    ) as scene:
        registry, usage = scene.scene.agent.registry, scene.scene.agent.usage_service
        await scene.scene.wait_snapshot(lambda now: bool(now.vanished) and now.pods.listed)
        held = dict.fromkeys(((claim.uid, share) for share in registry.snapshot.vanished), pods)
        registry.apply(LeasesObserved({}, anyio.current_time(), of_claims=held))
        await until(lambda: len(usage.lost_devices) == 2)
        await server.until(lambda: len(server.events()) == 2)
        finding = check_lost_devices(read_report(await scene.scene.status(), StatusReport))
        await server.until(lambda: entries(server, claim)[0]["conditions"] != ready["conditions"])
        [condition] = entries(server, claim)[0]["conditions"]
        assert await scene.unprepare(claim) == {claim.uid: ""}
        await until(lambda: not usage.lost_devices)
        assert not registry.snapshot.vanished

    names = [f"default/{name} (main)" for name in ("a", "b")]
    assert finding is not None
    assert finding[1] == f"containers hold devices that no longer exist: {', '.join(names)}"
    assert {(e["reason"], e["regarding"]["uid"]) for e in server.events()} == {
        ("GPUDeviceLost", "uid-a"),
        ("GPUDeviceLost", "uid-b"),
    }
    assert (condition["status"], condition["reason"]) == ("False", "GPUGone")
    assert "delete the pods" in condition["message"]


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


def device_nodes(options: ContainerRunOptions) -> list[str]:
    """Return the device nodes of GPUs that a container is started with."""
    paths = [device.container_path for device in options.devices]
    return [path for path in paths if path[-1].isdigit()]


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_pod_whose_device_node_is_another_gpus_is_not_started_again(
    tmp_path: Path, backend: str
) -> None:
    """After a reboot without one GPU, the kubelet rejects the pod beside it: numbers have moved."""
    options, per_gpu, wanted = BACKENDS[backend]
    config = (
        "version: metagpu/v1\n"
        f"pools: [{{name: all, backends: [{{{options}, resource: x.y/gpu}}]}}]\n"
    )
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    pods = [SimPod.single(key, {"x.y/gpu": wanted}) for key in ("a", "b", "c")]
    host(tmp_path, gpus=3)

    async with kubelet.running():
        node = await a_node(tmp_path, gpus(KEPT, GONE, OTHER))
        async with agent_at_work(tmp_path, node, config, kubelet=kubelet) as scene:
            await scene.until(3 * per_gpu, 3 * per_gpu, "x.y/gpu")
            given = {device_nodes((await kubelet.admit(each))["main"])[0]: each for each in pods}
            await scene.wait_holders()

        await kubelet.restart(reboot=True)
        node = await a_node(tmp_path, gpus(KEPT, OTHER))
        async with agent_at_work(tmp_path, node, config, kubelet=kubelet) as scene:
            await scene.until(2 * per_gpu, 2 * per_gpu - wanted, "x.y/gpu")
            lost = await kubelet.readmit()
            await scene.until(2 * per_gpu, 2 * per_gpu, "x.y/gpu")
            await kubelet.admit(SimPod.single("again", {"x.y/gpu": wanted}))
            await scene.wait_holders()
            await scene.until(2 * per_gpu, 2 * per_gpu, "x.y/gpu")

    assert lost.keys() == {given["/dev/nvidia1"].uid, given["/dev/nvidia2"].uid}
    assert "no longer healthy" in lost[given["/dev/nvidia2"].uid].message


async def test_a_pod_whose_device_node_is_another_gpus_is_reported(tmp_path: Path) -> None:
    """A container that starts again while the kubelet goes on gets the node: people delete it."""
    config = f"""
version: metagpu/v1
pools: [{{name: all, backends: [{{backend: whole, resource: {METAGPU}}}]}}]
"""
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    pods = [SimPod.single(key, {METAGPU: 1}) for key in ("a", "b")]
    host(tmp_path, gpus=2)

    async with kubelet.running():
        node = await a_node(tmp_path, gpus(GONE, KEPT))
        async with agent_at_work(tmp_path, node, config, kubelet=kubelet) as scene:
            await scene.until(2, 2)
            given = {
                (await kubelet.admit(each))["main"].envs["NVIDIA_VISIBLE_DEVICES"]: each
                for each in pods
            }
            await scene.wait_holders()

        node = await a_node(tmp_path, gpus(KEPT, OTHER))
        async with agent_at_work(
            tmp_path, node, config, kubelet=kubelet, usage_timing=QUICK
        ) as scene:
            await until(lambda: len(scene.agent.usage_service.lost_devices) == 2)
            found = {loss["holder"]: loss for loss in await lost_devices_of(scene)}
            loss = found[f"default/{given[KEPT].name} (main)"]
            await kubelet.delete(given[KEPT])
            await until(lambda: len(scene.agent.usage_service.lost_devices) == 1)

    assert loss["devices"] == ["/dev/nvidia1"]
    assert f"kubectl delete pod -n default {given[KEPT].name}" in loss["reason"]
