"""The requests of a large cluster's nodes at their API server, by a clock of its own.

Each node is the real client: informers, reconcilers, Event recorder. Kubelets and pods are acted.
"""

import random
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.lowlevel
from aiohttp import web
from anyio.abc import TaskGroup
from structlog.testing import capture_logs

from bench import virtual_time
from bench.figures import Figure
from bench.plan import Plan
from metagpu.core.config.profiles import ClusterChoice, ConfigOutcome
from metagpu.core.model.shares import Holder, Share, ShareId
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.facts import GpusFound, LeasesObserved, SharesClaimed, SharesReleased
from metagpu.core.state.registry import Registry
from metagpu.host.programs import run_command
from metagpu.plugins.cluster.cluster import Cluster
from metagpu.plugins.cluster.connection import ClusterContext
from metagpu.plugins.cluster.gpu_labels import LabelSettings
from metagpu.plugins.cluster.settings import ClusterSettings
from metagpu.sim.apiserver.server import SimApiServer
from tests.rigs.build import METAGPU, STRATEGIES, gpu, layout_of

FLEET: Final = 5000
"""Nodes of the cluster that the figures are for."""
BATCH: Final = 50
"""Nodes at one API server; no node depends on another one."""
PODS_A_SECOND: Final = 28
"""Pods of the whole cluster that start each second, and as many end."""
GPUS: Final = tuple(gpu(index) for index in range(8))
SIZES: Final = (10, 25, 50)
STAY_S: Final = 60.0
SETTLING_S: Final = 600.0
ABSENCE_S: Final = 300.0
KUBELET_S: Final = 10.0
"""A kubelet writes its amounts so often."""
HISTORY: Final = 3
"""Minutes of changes that the API server remembers."""
_CHANCE: Final = random.Random(1)  # noqa: S311 - it guards nothing
_NODE_NAME: Final = re.compile(r"node-\d+")
_PLACE: Final = ("kube-system", "metagpu")
_LABEL: Final = {"metagpu.io/config": "gpus"}
_POOL: Final = """\
version: metagpu/v1
pools:
  - name: all
    backends: [{{backend: fraction, sharesPerGpu: {}}}]
"""


CASES: Final[Mapping[str, tuple[str, float | None]]] = {
    "rest": ("at rest", None),
    "pods": (f"{PODS_A_SECOND} pods/s", None),
    "reload": ("reload of all", 3000.0),
    "restart": ("API server restarts", 2500.0),
    "return": ("API server is back after 5 min", 2000.0),
}
"""The cases by their names in the figures, with the most requests of a second: of 5000 nodes that
ask at once it would be ten times as many."""


def fleet(plan: Plan) -> list[Figure]:
    """Count what a part of the fleet asks for, and take it times the rest."""
    nodes, figures = plan.count(500, 4), list[Figure]()
    batch = min(nodes, BATCH)
    windows = {case: Window() for case in CASES}
    for number in range(nodes // batch):
        plan.report(f"fleet: {number * batch} of {nodes} nodes")
        with capture_logs():
            found = virtual_time.run(_live, batch)
        windows = {case: window + found[case] for case, window in windows.items()}

    for case, (name, target) in CASES.items():
        window, factor = windows[case], FLEET / nodes
        total, most = window.by_second.total() * factor, max(window.by_second.values()) * factor
        kinds = (f"{kind} {n / nodes:.2g}" for kind, n in window.by_kind.most_common())
        plan.report(f"fleet: {name}: of each node in {window.seconds:.0f} s: {', '.join(kinds)}")
        mean = target is None
        about = "requests a second" if mean else "requests"
        figures += [
            _figure(f"{name}, {about}", total / window.seconds if mean else total, nodes),
            _figure(f"{name}, worst second", most, nodes, target),
        ]
    return figures


def _figure(name: str, measured: float, nodes: int, target: float | None = None) -> Figure:
    name = f"{FLEET} nodes, {name}"
    return Figure(name=name, unit="", measured=measured, target=target, calls=nodes)


class CountingServer(SimApiServer):
    """An API server that notes when requests came.

    Attributes:
        came: the time of each request, and what it asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.came: list[tuple[float, str]] = []

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:  # noqa: ANN401 - aiohttp's
        answer = super()._guarded(request, handler)
        part = request.path.rpartition("/")[2]
        kind = "watch" if request.query.get("watch") else _NODE_NAME.sub("node", part)
        self.came.append((anyio.current_time(), f"{request.method} {kind}"))
        return await answer

    async def remember_some(self) -> None:
        """Send bookmarks every minute, and forget old changes, as Kubernetes' own does."""
        versions = [self.store.version] * HISTORY
        while True:
            await anyio.sleep(60)
            self.bookmark()
            versions.append(self.store.version)
            self.store.oldest = versions.pop(0)
            kept = len(self.store.history) - self.store.version + self.store.oldest
            del self.store.history[:kept]


@dataclass(eq=False)
class Node:
    """A node of the cluster, with its acted kubelet."""

    name: str
    server: CountingServer
    kubeconfig: Path
    registry: Registry = field(default_factory=Registry)
    stats: KubeletCallStats = field(default_factory=KubeletCallStats)
    holders: dict[ShareId, Holder] = field(default_factory=dict)

    async def run(self) -> None:
        """Follow the API server until cancelled."""
        self.server.add_node(self.name, _LABEL)
        self.registry.apply(GpusFound(GPUS, at=anyio.current_time()))
        taken = anyio.Event()
        taken.set()
        context = ClusterContext(
            ClusterSettings(self.name, self.kubeconfig, _PLACE),
            self.registry,
            follow=self._reload,
            outcome=ConfigOutcome,
            label_settings=lambda: LabelSettings(STRATEGIES),
            call_stats=self.stats,
            dra_driver=lambda: "gpu.metagpu.io",
            pcie_root=lambda gpu: f"pci0000:0{gpu.index}",
            wait_registered=anyio.lowlevel.checkpoint,
            taken=taken,
        )
        async with anyio.create_task_group() as group:
            group.start_soon(Cluster(context, run_command).run)
            group.start_soon(self._act_kubelet)

    async def _reload(self, choice: ClusterChoice) -> None:
        layout = layout_of(*GPUS, text=(choice.profiles or {})["gpus"])
        self.stats.of_resource(METAGPU).listed = True
        self.registry.apply(layout.offer_fact)

    async def _act_kubelet(self) -> None:
        """Write the capacity, as a kubelet does that has begun at any time."""
        await anyio.sleep(_CHANCE.uniform(0, KUBELET_S))
        while True:
            offers = self.registry.snapshot.offers
            counts = {str(resource): len(offer.shares) for resource, offer in offers.items()}
            shown = self.server.node(self.name)["status"].get("capacity")
            if counts and shown != {name: str(amount) for name, amount in counts.items()}:
                self.server.report(self.name, counts, counts)
            await anyio.sleep(KUBELET_S)

    async def run_pod(self, name: str) -> None:
        """Run a pod from its binding to its end."""
        server, size = self.server, _CHANCE.choice(SIZES)
        free = self._find_free(size)
        if not free:
            return
        self.holders |= {share.id: Holder("team", name, "main") for share in free}

        def show(phase: str) -> None:
            requests = {str(METAGPU): size}
            server.add_pod("team", name, self.name, uid=name, phase=phase, requests=requests)

        show("Pending")
        await anyio.sleep(0.2)
        self.registry.apply(SharesClaimed(tuple(free), at=anyio.current_time()))
        self._report_leases()
        await anyio.sleep(1)
        show("Running")
        await anyio.sleep(STAY_S)
        now = datetime.now(UTC).isoformat()
        deleted = {"metadata": {"deletionTimestamp": now, "deletionGracePeriodSeconds": 30}}
        server.store.merge(("pods", "team", name), deleted, status=False, manager="kubectl")
        await anyio.sleep(1.5)
        for share in free:
            del self.holders[share.id]
        self.registry.apply(SharesReleased(tuple(free), at=anyio.current_time()))
        self._report_leases()
        server.delete_pod("team", name)

    def _find_free(self, size: int) -> Sequence[Share]:
        by_gpu = self.registry.snapshot.offers[METAGPU].by_gpu
        for shares in _CHANCE.sample(list(by_gpu.values()), len(by_gpu)):
            free = [share for share in shares if share.id not in self.holders]
            if len(free) >= size:
                return free[:size]
        return ()

    def _report_leases(self) -> None:
        self.registry.apply(LeasesObserved(dict(self.holders), at=anyio.current_time()))


@dataclass
class Window:
    """The requests of a part of the time, by second and by kind."""

    seconds: float = 0.0
    by_second: Counter[int] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: "Window") -> "Window":
        by_second, by_kind = self.by_second + other.by_second, self.by_kind + other.by_kind
        return Window(other.seconds, by_second, by_kind)


async def _live(nodes: int) -> Mapping[str, Window]:
    """Return the requests of some nodes in each case."""
    server, found = CountingServer(), dict[str, Window]()
    server.configure(*_PLACE, {"gpus": _POOL.format(100)})

    async def seen(case: str, seconds: float) -> None:
        began, before = anyio.current_time(), len(server.came)
        await anyio.sleep(seconds)
        came = server.came[before:]
        found[case] = Window(
            seconds,
            Counter(int(at - began) for at, _ in came),
            Counter(kind for _, kind in came),
        )

    with tempfile.TemporaryDirectory() as folder:
        async with anyio.create_task_group() as group:
            async with server.running():
                kubeconfig = server.kubeconfig(Path(folder))
                members = [Node(f"node-{number}", server, kubeconfig) for number in range(nodes)]
                for member in members:
                    group.start_soon(member.run)
                group.start_soon(server.remember_some)
                await seen("start", SETTLING_S)
                await seen("rest", 900)
                with anyio.CancelScope() as pods:
                    group.start_soon(_run_pods, members, pods, group)
                    await anyio.sleep(2 * STAY_S)
                    await seen("pods", 300)
                    pods.cancel()
                await anyio.sleep(SETTLING_S)
                server.configure(*_PLACE, {"gpus": _POOL.format(50)})
                await seen("reload", 60)
                await anyio.sleep(SETTLING_S)
                server.end_watches()
                await seen("restart", 60)
                await anyio.sleep(SETTLING_S)
            await anyio.sleep(ABSENCE_S)
            async with server.running():
                await seen("return", 120)
                group.cancel_scope.cancel()
    return found


async def _run_pods(members: Sequence[Node], scope: anyio.CancelScope, group: TaskGroup) -> None:
    rate = PODS_A_SECOND * len(members) / FLEET
    for number in count():
        await anyio.sleep(_CHANCE.expovariate(rate))
        if scope.cancel_called:
            return
        group.start_soon(_CHANCE.choice(members).run_pod, f"pod-{number}")
