"""A node's cluster plugin at a simulated API server, without an agent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from metagpu.core.config.profiles import ClusterChoice, ConfigOutcome
from metagpu.core.model.offers import Api
from metagpu.core.model.shares import ResourceName
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.facts import GpusFound
from metagpu.core.state.registry import Registry
from metagpu.host.programs import run_command
from metagpu.plugins.cluster.client import KubeClient, open_client
from metagpu.plugins.cluster.cluster import Cluster
from metagpu.plugins.cluster.connection import ClusterContext, NodeConnection
from metagpu.plugins.cluster.gpu_labels import LabelSettings
from metagpu.plugins.cluster.settings import ClusterSettings, ClusterTiming, Feature
from metagpu.sim.apiserver.server import SimApiServer
from tests.rigs.build import STRATEGIES, gpu, layout_of
from tests.rigs.waiting import becomes

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
QUICK: Final = ClusterTiming(
    backoff_first=0.01, backoff_longest=0.05, reconcile_interval=0.0, spread=0.01
)
"""Times of tests that need no agent: next to no delays."""


@dataclass
class Scene:
    """A running cluster plugin, its choices, and its API server.

    Attributes:
        choices: the received choices, in order.
        refusal: the answer to them.
        follow_s: the seconds that the daemon takes to follow a choice.
        mismatch: why GPUs of a layout are not offered, as a part of that answer.
        driver: the name of the DRA driver in the configuration.
        label_settings: what the labels depend on beside the snapshot.
        taken: set while this daemon has the node.
        registered: set once the kubelet has the DRA driver.
    """

    server: SimApiServer
    registry: Registry
    cluster: Cluster
    call_stats: KubeletCallStats
    choices: list[ClusterChoice] = field(default_factory=list)
    refusal: str | None = None
    follow_s: float = 0.0
    mismatch: str = ""
    driver: str = "gpu.metagpu.io"
    label_settings: LabelSettings = LabelSettings(STRATEGIES)  # noqa: RUF009 - it is frozen
    taken: anyio.Event = field(default_factory=anyio.Event)
    registered: anyio.Event = field(default_factory=anyio.Event)

    @property
    def connection(self) -> NodeConnection:
        """The connection of now; there is one once the client is loaded."""
        assert self.cluster.connection is not None
        return self.cluster.connection

    def offer(self, text: str = "", count: int = 2) -> None:
        """Add GPUs to the node, and offer their shares, which the kubelet lists at once."""
        gpus = tuple(gpu(index) for index in range(count))
        self.registry.apply(GpusFound(gpus, at=0))
        offer = layout_of(*gpus, text=text).offer_fact
        for resource in offer.resources:
            self.call_stats.of_resource(resource).listed = True
        self.registry.apply(offer)

    async def has_labels(self, **wanted: str | None) -> None:
        """Wait until the node has labels, given as `nvidia_com__gpu_count`, or lacks them."""
        names = {key.replace("__", "/").replace("_", "."): v for key, v in wanted.items()}
        await self.server.until(
            lambda: all(self.server.labels(NODE).get(n) == v for n, v in names.items())
        )

    async def reads_node(self) -> None:
        """Wait until the plugin has read the Node as the API server has it now."""

        def has_read() -> bool:
            known, node = self.connection.node.object, self.server.node(NODE)
            return known is not None and known["metadata"] == node["metadata"]

        await becomes(has_read)


@asynccontextmanager
async def cluster_at_work(
    tmp_path: Path,
    *features: Feature,
    server: SimApiServer | None = None,
    config_map: tuple[str, str] | None = None,
    remove_labels: bool = False,
    drain_on_driver_upgrade: bool = False,
    choice_timeout: float = 0.1,
    taken: bool = True,
    registered: bool = True,
    timing: ClusterTiming = ClusterTiming(spread=0.0, shutdown_timeout=30.0),  # noqa: B008 - it is frozen
) -> AsyncIterator[Scene]:
    """Run the cluster plugin with some features until the block ends, on a Node of one label."""
    server = server or SimApiServer()
    if ("nodes", "", NODE) not in server.store.objects:
        server.add_node(NODE, {"kubernetes.io/hostname": NODE})
    registry = Registry()

    async def follow(choice: ClusterChoice) -> None:
        await anyio.sleep(scene.follow_s)
        scene.choices.append(choice)

    async def served() -> None:
        async for offered in registry.watch(lambda now: bool(now.offers_of(Api.DRA))):
            if offered:
                break
        await has_driver.wait()

    def outcome() -> ConfigOutcome:
        has_mig_layouts = bool(scene.choices) and scene.choices[-1].mig_config is not None
        return ConfigOutcome(scene.refusal, has_mig_layouts, scene.mismatch)

    async with server.running():
        settings = ClusterSettings(
            NODE,
            server.kubeconfig(tmp_path),
            config_map,
            frozenset(features),
            remove_labels=remove_labels,
            choice_timeout=choice_timeout,
            drain_on_driver_upgrade=drain_on_driver_upgrade,
            timing=timing,
        )
        stats, has_node, has_driver = KubeletCallStats(), anyio.Event(), anyio.Event()
        for event, is_set in ((has_node, taken), (has_driver, registered)):
            if is_set:
                event.set()
        context = ClusterContext(
            settings,
            registry,
            follow=follow,
            outcome=outcome,
            label_settings=lambda: scene.label_settings,
            call_stats=stats,
            dra_driver=lambda: scene.driver,
            pcie_root=lambda gpu: f"pci0000:0{gpu.index}",
            wait_registered=served,
            taken=has_node,
        )
        cluster = Cluster(context, run_command)
        scene = Scene(server, registry, cluster, stats, taken=has_node, registered=has_driver)
        async with anyio.create_task_group() as group:
            group.start_soon(scene.cluster.run)
            yield scene
            group.cancel_scope.cancel()


@asynccontextmanager
async def client_of(
    server: SimApiServer, tmp_path: Path, timing: ClusterTiming = QUICK
) -> AsyncIterator[KubeClient]:
    """Open a client of a running server."""
    async with server.running(), open_client_at(server.kubeconfig(tmp_path), timing) as client:
        yield client


@asynccontextmanager
async def open_client_at(
    kubeconfig: Path | None,
    timing: ClusterTiming = QUICK,
) -> AsyncIterator[KubeClient]:
    """Open a client with a kubeconfig, which starts programs as the agent does."""
    async with open_client(kubeconfig, run_command, timing) as client:
        yield client
