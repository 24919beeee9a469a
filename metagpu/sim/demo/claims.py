"""The act of `metagpu demo` with ResourceClaims, on a simulated cluster."""

from collections.abc import Mapping
from pathlib import Path
from socket import gethostname
from typing import Any

import anyio
import msgspec

from metagpu.agent.agent import Agent
from metagpu.agent.config_source import ConfigSource
from metagpu.agent.paths import AgentPaths
from metagpu.core.model.driver_roots import RootOptions
from metagpu.nvml.driver import NvmlDriver
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.sim.allocation.pools import gather_pools
from metagpu.sim.cluster import paths
from metagpu.sim.cluster.claim_manifest import claim_with_pod
from metagpu.sim.cluster.single_node import SingleNodeCluster
from metagpu.sim.cluster.views import ClaimView
from metagpu.sim.demo.script import CLAIMS, CLAIMS_CONFIG, CLAIMS_NODE, DemoClaim
from metagpu.sim.machine.programs import SimPrograms, sim_daemons
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary


async def run_claims(folder: Path) -> dict[str, Any]:
    """Create ResourceClaims one after the other; return what becomes of each."""
    node = build_node(CLAIMS_NODE)
    cluster = SingleNodeCluster(node, folder, gethostname())
    await anyio.Path(folder).mkdir()
    file = folder / "metagpu.yaml"
    await anyio.Path(file).write_text(CLAIMS_CONFIG)
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
        cluster_settings=ClusterSettings(
            cluster.name, paths.kubeconfig(folder), features=frozenset({Feature.PODS})
        ),
    )
    async with cluster.running(), anyio.create_task_group() as group:
        group.start_soon(agent.serve_node)
        claims = [await _add(cluster, it, len(node.gpus)) for it in CLAIMS]
        for it in CLAIMS:
            await cluster.claims.end(it.name, "default")
        group.cancel_scope.cancel()
    return {"gpus": CLAIMS_NODE, "claims": claims}


def _are_published(cluster: SingleNodeCluster, gpus: int) -> bool:
    """Return whether each GPU has ResourceSlices, and no device has a taint."""
    objects = cluster.api.store.objects
    slices = [it for key, it in objects.items() if key[0] == "resourceslices"]
    found = gather_pools(slices, cluster.name)
    ready = [it for it in found.devices if not it.spec.get("taints")]
    return len(ready) == len(found.devices) and len({it.id.pool for it in ready}) == gpus


async def _add(cluster: SingleNodeCluster, claim: DemoClaim, gpus: int) -> Mapping[str, Any]:
    def view_now() -> ClaimView:
        return next(it for it in cluster.claims.views() if it.name == claim.name)

    # A pool whose slices are being written is passed over, and an alternative would be taken.
    await cluster.api.until(lambda: _are_published(cluster, gpus))
    await cluster.claims.create(claim_with_pod(claim.name, claim.request))
    await cluster.api.until(lambda: claim.waits or view_now().state == "Prepared")
    view = view_now()
    return {"asks": claim.asks, "gets": _gets(view), **msgspec.to_builtins(view)}


def _gets(view: ClaimView) -> str:
    return ", ".join(map(str, view.devices)) or "waits"
