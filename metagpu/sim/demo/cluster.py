"""Acts of the demo in a simulated cluster: memory above a share, ResourceClaims."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from socket import gethostname
from typing import Any, Final

import anyio
from msgspec import to_builtins

from metagpu.agent.agent import Agent
from metagpu.agent.config_source import ConfigSource
from metagpu.agent.paths import AgentPaths
from metagpu.core.devices.devices import gpu_of_device
from metagpu.core.model.driver_roots import RootOptions
from metagpu.nvml.driver import NvmlDriver
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.sim.allocation.pools import gather_pools
from metagpu.sim.cluster import paths
from metagpu.sim.cluster.claim_manifest import claim_with_pod
from metagpu.sim.cluster.pod_manifest import PodManifest
from metagpu.sim.cluster.single_node import SingleNodeCluster
from metagpu.sim.cluster.views import ClaimView
from metagpu.sim.demo.script import (
    CLAIMS,
    CLAIMS_CONFIG,
    CLAIMS_NODE,
    GROWTH,
    GROWTH_CONFIG,
    GROWTH_NODE,
    GROWTH_SHARES,
    RESOURCE,
    DemoClaim,
)
from metagpu.sim.machine.programs import SimPrograms, sim_daemons
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary

_GIB: Final = 2**30


async def run_claims(folder: Path) -> dict[str, Any]:
    """Create ResourceClaims one after the other; return what becomes of each."""
    async with _running_cluster(folder, CLAIMS_NODE, CLAIMS_CONFIG) as cluster:
        gpus = len(build_node(CLAIMS_NODE).gpus)
        claims = [await _add(cluster, claim, gpus) for claim in CLAIMS]
        for claim in CLAIMS:
            await cluster.end_claim(claim.name, "default")
    return {"gpus": CLAIMS_NODE, "claims": claims}


async def run_growth(folder: Path) -> dict[str, Any]:
    """Start processes until a pod is above its share; return the steps and the Event."""
    async with _running_cluster(folder, GROWTH_NODE, GROWTH_CONFIG) as cluster:
        names = list(dict.fromkeys(name for name, _ in GROWTH))
        await cluster.add_pods([PodManifest(name, {RESOURCE: GROWTH_SHARES}) for name in names])
        await cluster.api.until(lambda: all(pod.phase == "Running" for pod in cluster.pods()))
        steps = []
        for name, gib in GROWTH:
            await cluster.start_process(name, "default", memory=gib * _GIB, load=0)
            used = _gib(cluster, names)
            steps.append({"event": f"{name} allocates {gib} GiB", "gib": used})
        await cluster.api.until(lambda: _warnings(cluster))
        message = _warnings(cluster)[0]
        with anyio.fail_after(30):
            while used == (now := _gib(cluster, names)):  # noqa: ASYNC110 - nothing tells of an end
                await anyio.sleep(0.05)
        steps.append({"event": f"metagpu ends a process of {name}", "gib": now})
    return {"gpus": GROWTH_NODE, "shares": GROWTH_SHARES, "steps": steps, "message": message}


def _gib(cluster: SingleNodeCluster, pods: Sequence[str]) -> dict[str, int]:
    """Return the memory that each pod's processes use."""
    used = dict.fromkeys(pods, 0)
    for view in cluster.containers.views():
        used[view.pod] += (view.memory or 0) // _GIB
    return used


def _warnings(cluster: SingleNodeCluster) -> Sequence[str]:
    events = [each for key, each in cluster.api.store.objects.items() if key[0] == "events"]
    return [each["note"] for each in events if each["reason"] == "GPUMemoryExceeded"]


@asynccontextmanager
async def _running_cluster(
    folder: Path, gpus: str, config: str
) -> AsyncIterator[SingleNodeCluster]:
    node = build_node(gpus)
    cluster = SingleNodeCluster(node, folder, gethostname())
    await anyio.Path(folder).mkdir()
    file = folder / "metagpu.yaml"
    await anyio.Path(file).write_text(config)
    agent = Agent(
        ConfigSource((file,)),
        NvmlDriver(SimLibrary(node)),
        AgentPaths(
            kubelet_root=folder,
            kubelet_dir=paths.kubelet_dir(folder),
            pod_resources=paths.pod_resources(folder),
            run_dir=folder,
            roots=RootOptions(dev=str(paths.host_root(folder))),
            cdi_dir=paths.cdi_dir(folder),
        ),
        programs=SimPrograms(),
        daemons=sim_daemons(),
        host=cluster.containers.machine.host,
        cluster_settings=ClusterSettings(
            cluster.name,
            paths.kubeconfig(folder),
            features=frozenset({Feature.PODS, Feature.POD_EVENTS}),
        ),
    )
    async with cluster.running(), anyio.create_task_group() as group:
        group.start_soon(agent.serve_node)
        yield cluster
        group.cancel_scope.cancel()


def _are_published(cluster: SingleNodeCluster, gpus: int) -> bool:
    """Return whether each GPU has ResourceSlices, and no device has a taint."""
    objects = cluster.api.store.objects
    slices = [document for key, document in objects.items() if key[0] == "resourceslices"]
    found = gather_pools(slices, cluster.name)
    ready = [device for device in found.devices if not device.spec.get("taints")]
    seen = {gpu_of_device(device.id.device) for device in ready}
    return len(ready) == len(found.devices) and len(seen) == gpus


async def _add(cluster: SingleNodeCluster, claim: DemoClaim, gpus: int) -> Mapping[str, Any]:
    def view_now() -> ClaimView:
        return next(view for view in cluster.claims.views() if view.name == claim.name)

    # A pool whose slices are being written is passed over, and an alternative would be taken.
    await cluster.api.until(lambda: _are_published(cluster, gpus))
    await cluster.manifests.create(claim_with_pod(claim.name, claim.request))
    await cluster.api.until(lambda: claim.waits or view_now().state == "Prepared")
    view = view_now()
    return {"asks": claim.asks, "gets": _gets(view), **to_builtins(view)}


def _gets(view: ClaimView) -> str:
    return ", ".join(map(str, view.devices)) or "waits"
