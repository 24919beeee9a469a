"""The whole agent with an API server and pods that name GPUs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.pods import SimContainer, SimPod
from tests.rigs.agent import METAGPU, Scene, agent_at_work

NODE: Final = "gpu-1"
UUID: Final = "nvidia.com/use-gpuuuid"
POOL: Final = """
version: metagpu/v1
pools:
  - {name: all, backends: [{backend: fraction, sharesPerGpu: 10, offer: all}]}
"""


def settings(server: SimApiServer, tmp_path: Path) -> ClusterSettings:
    """Return cluster settings that use the running server for pods alone."""
    uses = frozenset({Feature.PODS, Feature.POD_EVENTS})
    return ClusterSettings(NODE, server.kubeconfig(tmp_path), features=uses)


@asynccontextmanager
async def at_work(server: SimApiServer, tmp_path: Path) -> AsyncIterator[Scene]:
    """Run the server, and an agent whose three GPUs are on offer."""
    server.add_node(NODE)
    async with (
        server.running(),
        agent_at_work(
            tmp_path, "a100-40gb:3", POOL, cluster_settings=settings(server, tmp_path)
        ) as scene,
    ):
        await scene.until(30, 30)
        yield scene


async def run(scene: Scene, server: SimApiServer, name: str, size: int, gpu: str) -> SimPod:
    """Bind a pod that names a GPU, as the scheduler does, and run it."""
    admitted = SimPod.single(name, {METAGPU: size})
    server.add_pod(
        "default",
        name,
        NODE,
        {UUID: gpu},
        uid=admitted.uid,
        phase="Pending",
        requests={METAGPU: size},
    )
    await scene.wait_snapshot(lambda now: admitted.uid in now.pods.by_uid)
    await scene.kubelet.admit(admitted)
    running = {"status": {"phase": "Running"}}
    server.store.merge(("pods", "default", name), running, status=True, manager="kubelet")
    return admitted


async def test_a_pod_on_another_gpu_has_an_event(tmp_path: Path) -> None:
    """A pod runs on the GPU that it names; one that finds it full has an Event with the reason."""
    server = SimApiServer()
    async with at_work(server, tmp_path) as scene:
        gpu = list(scene.agent.registry.snapshot.gpus)[2]
        first = await run(scene, server, "first", 8, gpu)
        second = await run(scene, server, "second", 3, gpu)
        await server.until(lambda: len(server.events()) > 0)
        [event] = server.events()
        held = [
            {share.partition("::")[0] for share in scene.kubelet.devices(pod)["main"][METAGPU]}
            for pod in (first, second)
        ]

    assert held[0] == {gpu}
    assert gpu not in held[1]
    assert (event["reason"], event["type"]) == ("GPUPreferenceNotMet", "Warning")
    assert event["regarding"]["name"] == "second"
    assert "which nvidia.com/use-gpuuuid does not name: they have 2 of 3 shares" in event["note"]


async def test_the_main_container_fits_beside_its_init_container(tmp_path: Path) -> None:
    """An init container of 1 share goes to the GPU that has the main container's 6 free."""
    server = SimApiServer()
    sizes = {"prepare": {METAGPU: 1}, "sidecar": {METAGPU: 1}, "main": {METAGPU: 6}}
    prepare, sidecar, main = (
        SimContainer(name, limits, restartable=name == "sidecar") for name, limits in sizes.items()
    )
    admitted = SimPod("train", containers=(main,), init_containers=(prepare, sidecar))
    listed = [
        {"name": name, "resources": {"limits": {METAGPU: str(limits[METAGPU])}}}
        for name, limits in sizes.items()
    ]
    listed[1]["restartPolicy"] = "Always"
    async with at_work(server, tmp_path) as scene:
        first, second, _ = scene.agent.registry.snapshot.gpus
        await run(scene, server, "neighbour", 7, first)
        pod = server.add_pod("default", "train", NODE, uid=admitted.uid, phase="Pending")
        spec = {"nodeName": NODE, "initContainers": listed[:2], "containers": listed[2:]}
        server.store.put(("pods", "default", "train"), pod | {"spec": spec})
        await scene.wait_snapshot(
            lambda now: (
                (known := now.pods.by_uid.get(admitted.uid)) is not None
                and known.handing_on == {"prepare"}
            )
        )
        await scene.kubelet.admit(admitted)
        devices = scene.kubelet.devices(admitted)
        held = {
            name: {device.partition("::")[0] for device in devices[name][METAGPU]}
            for name in ("sidecar", "main")
        }

    assert held == {"sidecar": {second}, "main": {second}}
