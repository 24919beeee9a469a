"""The API server's side of a node at work against a simulated API server, without an agent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from metagpu.core.facts import GpusFound
from metagpu.core.model import ResourceName
from metagpu.core.profiles import Instruction
from metagpu.core.registry import Registry
from metagpu.plugins.cluster import Cluster, Outcome
from metagpu.plugins.cluster.client import Client, connected
from metagpu.plugins.cluster.settings import Feature, Settings
from metagpu.sim.apiserver import SimApiServer
from tests.build import gpu, laid_out

NODE: Final = "gpu-1"
CONFIG_MAP: Final = ("kube-system", "metagpu")
SIDE_BY_SIDE: Final = """
version: metagpu/v1
pools:
  - name: all
    backends:
      - {backend: fraction, sharesPerGpu: 10}
      - {backend: timeslice, resource: nvidia.com/gpu.shared, replicas: 4}
"""
SLICED: Final = ResourceName("nvidia.com/gpu.shared")


@dataclass
class Scene:
    """A cluster side at work, what it was told to do, and the API server it speaks to.

    Attributes:
        told: the instructions that came, in order.
        refusal: what is answered to them.
    """

    server: SimApiServer
    registry: Registry
    cluster: Cluster
    told: list[Instruction] = field(default_factory=list)
    refusal: str | None = None

    def offer(self, text: str = "", count: int = 2) -> None:
        """Let the node have GPUs, and offer what a configuration makes of them."""
        gpus = tuple(gpu(index) for index in range(count))
        self.registry.apply(GpusFound(gpus, at=0))
        self.registry.apply(laid_out(*gpus, text=text).offered)

    async def has_labels(self, **wanted: str | None) -> None:
        """Wait until the node has labels, given as `nvidia_com__gpu_count`, or has them no more."""
        names = {key.replace("__", "/").replace("_", "."): v for key, v in wanted.items()}
        await self.server.until(
            lambda: all(self.server.labels(NODE).get(n) == v for n, v in names.items())
        )


@asynccontextmanager
async def cluster_at_work(
    tmp_path: Path,
    *features: Feature,
    server: SimApiServer | None = None,
    config_map: tuple[str, str] | None = None,
    remove_labels: bool = False,
) -> AsyncIterator[Scene]:
    """Run the cluster's side with some uses while the block lasts, on a Node of one label."""
    server = server or SimApiServer()
    if ("nodes", "", NODE) not in server.store.objects:
        server.add_node(NODE, {"kubernetes.io/hostname": NODE})
    registry = Registry()

    async def follow(told: Instruction) -> Outcome:
        scene.told.append(told)
        return Outcome(scene.refusal, lays_mig=told.mig_config is not None)

    async with server.running():
        settings = Settings(
            NODE,
            server.kubeconfig(tmp_path),
            config_map,
            frozenset(features),
            remove_labels=remove_labels,
            patience=0.1,
        )
        scene = Scene(server, registry, Cluster(settings, registry, follow))
        async with anyio.create_task_group() as group:
            group.start_soon(scene.cluster.run)
            yield scene
            group.cancel_scope.cancel()


@asynccontextmanager
async def client_of(server: SimApiServer, tmp_path: Path) -> AsyncIterator[Client]:
    """Give a client of a running server."""
    async with server.running(), connected(server.kubeconfig(tmp_path)) as client:
        yield client
