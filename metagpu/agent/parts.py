"""The agent's parts that need more than the node's context to be built.

Some run only where the settings name them: the libraries of the API server and of the metrics are
loaded only with these.
"""

import platform
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread

from metagpu.agent.cdi_file import CdiFile
from metagpu.agent.config_loader import ConfigLoader
from metagpu.agent.context import NodeContext
from metagpu.agent.driver_edits import DriverEdits
from metagpu.agent.preparation import Preparation
from metagpu.core.contracts.backend import InstalledBackends
from metagpu.core.contracts.capabilities import (
    MemoryGuard,
    guard_of,
    metric_kinds_of,
    sharing_strategy_of,
)
from metagpu.core.contracts.host import Host
from metagpu.core.grants.injection import Injection
from metagpu.core.health.watch import HealthWatch
from metagpu.core.layout.turns import TurnRunner
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import Holder
from metagpu.core.reports.schema.daemon import DraReport
from metagpu.core.reports.schema.usage import NodeReports
from metagpu.core.runtime.tasks import Work, run_with_restart
from metagpu.core.usage.lease_differences import RunningHolders
from metagpu.core.usage.usage_service import UsageService
from metagpu.host.device_nodes import CharLinks
from metagpu.host.programs import run_child, run_command
from metagpu.plugins.cluster.settings import Feature
from metagpu.plugins.kubelet import checkpoint
from metagpu.plugins.metrics.sources import MetricSources, NvmlStatus
from metagpu.plugins.pod_api.server import PodFolder, PodMgctlServer, no_events

if TYPE_CHECKING:
    from metagpu.plugins.cluster.cluster import Cluster
    from metagpu.plugins.cluster.gpu_labels import LabelSettings
    from metagpu.plugins.metrics.exporter import Exporter
    from metagpu.plugins.web.node import NodeWeb
    from metagpu.plugins.web.recent_events import RecentEvents
    from metagpu.plugins.web.status_api import StatusApi


def build_health(context: NodeContext) -> HealthWatch:
    """Build the health watch; it follows the rules of the configuration in force."""
    return HealthWatch(
        context.driver,
        context.registry,
        lambda: context.config.root.health,
        timing=context.timing.health,
        surveyed=context.surveyed,
    )


def build_cdi_file(context: NodeContext) -> CdiFile:
    """Build the writer of the CDI specification."""
    paths = context.paths
    edits = DriverEdits(context.programs, context.find_roots, paths.cdi_hook)
    return CdiFile(
        *(context.registry, context.driver, edits, paths.cdi_dir),
        read_nodes=context.read_device_nodes,
        timing=context.timing.cdi,
    )


class _Guards(Mapping[str, MemoryGuard]):
    """The guard of each backend that was ever configured, by the backend's name."""

    def __init__(self, backends: InstalledBackends) -> None:
        self._backends = backends

    def __getitem__(self, name: str) -> MemoryGuard:
        return guard_of(self._backends.loaded[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._backends.loaded)

    def __len__(self) -> int:
        return len(self._backends.loaded)


async def running_holders(host: Host, holders: Collection[Holder]) -> Collection[Holder]:
    """Return those of some holders whose containers are seen to run."""
    return {cgroup.holder for cgroup in await host.cgroups(holders) if cgroup.populated}


def build_usage_service(context: NodeContext, running: RunningHolders) -> UsageService:
    """Build the usage service; it follows the configuration in force."""
    return UsageService(
        context.driver,
        context.host,
        context.registry,
        context.memory_enforcement,
        _Guards(context.backends),
        compute=context.compute_enforcement,
        running=running,
        read_allocated=partial(
            to_thread.run_sync, checkpoint.read_allocated_devices, context.paths.kubelet_dir
        ),
        shows_one_answer=lambda: context.config.root.injection(Injection()).shows_one_answer,
        timing=context.timing.usage,
    )


def build_pod_server(
    context: NodeContext,
    folder: PodFolder,
    usage_service: UsageService,
    recent_events: "RecentEvents | None",
) -> PodMgctlServer:
    """Build the server of `mgctl` in containers."""
    return PodMgctlServer(
        folder,
        context.node,
        context.host,
        usage_service.report_for_pod,
        lambda: context.config.root.mgctl.in_pods,
        run_child,
        context.timing.pod_api,
        recent_events.report_for_pod if recent_events else no_events,
    )


async def serve_pods(context: NodeContext, server: PodMgctlServer) -> None:
    """Serve `mgctl` in containers, once the kubelet has answered.

    The server starts a process, a tenth of the daemon's start: the kubelet comes first.
    """
    with anyio.move_on_after(context.timing.first_registration):
        await context.call_stats.accepted.wait()
    await server.run()


async def link_nodes(context: NodeContext) -> None:
    """Keep the links in /dev/char, by which systemd finds devices, until cancelled."""
    await CharLinks(context.find_roots).run(context.timing.device_nodes)


def label_settings(context: NodeContext, machine: str = "") -> "LabelSettings":
    """Return what the node's labels depend on, beside the snapshot."""
    from metagpu.plugins.cluster.gpu_labels import LabelSettings  # noqa: PLC0415 - as said

    strategies = {name: sharing_strategy_of(kind) for name, kind in context.backends.items()}
    return LabelSettings(strategies, context.config.root.mig_strategy, machine)


def build_cluster(
    context: NodeContext,
    config_loader: ConfigLoader,
    wait_registered: Callable[[], Awaitable[None]],
    pcie_root: Callable[[Gpu], str | None] | None,
) -> "Cluster | None":
    """Build the API server's side, `None` where it is not used."""
    if context.cluster_settings is None:
        return None
    from metagpu.host.device_nodes import read_machine, read_pcie_root  # noqa: PLC0415 - as said
    from metagpu.plugins.cluster.cluster import Cluster  # noqa: PLC0415 - as said
    from metagpu.plugins.cluster.connection import ClusterContext  # noqa: PLC0415 - as said

    cluster_context = ClusterContext(
        context.cluster_settings,
        context.registry,
        follow=config_loader.follow_cluster,
        outcome=config_loader.outcome,
        label_settings=partial(label_settings, context, read_machine()),
        call_stats=context.call_stats,
        dra_driver=lambda: context.config.root.dra.driver,
        pcie_root=pcie_root or read_pcie_root,
        wait_registered=wait_registered,
        taken=context.taken,
    )
    return Cluster(cluster_context, run_command)


def build_exporter(
    context: NodeContext,
    health: HealthWatch,
    config_loader: ConfigLoader,
    usage_service: UsageService,
    *,
    cluster: "Cluster | None",
    claims: Callable[[], DraReport | None],
    preparation: Preparation,
) -> "Exporter | None":
    """Build the exporter of metrics and probes, `None` without an address for them."""
    if context.addresses.metrics is None:
        return None
    from metagpu.plugins.metrics.exporter import Exporter  # noqa: PLC0415 - as said

    driver, settings = context.driver, context.cluster_settings
    sources = MetricSources(
        node=settings.node if settings else platform.node(),
        registry=context.registry,
        kubelet=context.call_stats,
        kinds=metric_kinds_of(context.backends.values()),
        rules=usage_service.rules,
        layout=lambda: context.layout,
        usage=partial(usage_service.latest, sensors=True),
        sensors=driver.sensors,
        instance_sensors=driver.mig.sensors,
        configuration=config_loader.to_metrics,
        driver=lambda: NvmlStatus(health.unusable, len(driver.unanswered_calls)),
        lease_differences=lambda: usage_service.difference_counts,
        driver_limits=lambda: usage_service.driver_limits,
        cluster=lambda: cluster.report() if cluster else None,
        claims=claims,
        has_node=context.taken.is_set,
        problems=lambda: preparation.problems,
        ended=lambda: context.main_tasks.problems,
    )
    timing = context.timing
    return Exporter(context.addresses.metrics, sources, timing.metrics, timing.http)


def build_recent_events(context: NodeContext) -> "RecentEvents | None":
    """Build the recent events of the node, `None` where no address serves them."""
    if not (context.addresses.status_api or context.addresses.page):
        return None
    from metagpu.plugins.web.recent_events import RecentEvents  # noqa: PLC0415 - as said

    return RecentEvents(context.registry, context.node)


def build_status_api(context: NodeContext, reports: NodeReports) -> "StatusApi | None":
    """Build the status API, `None` without an address or without an API server."""
    address = context.addresses.status_api
    if address is None or context.cluster_settings is None:
        return None
    from metagpu.plugins.cluster.token_review import TokenReviewer  # noqa: PLC0415 - as said
    from metagpu.plugins.web.status_api import StatusApi  # noqa: PLC0415 - as said

    tokens = TokenReviewer(context.cluster_settings, run_command)
    return StatusApi(address, reports, tokens, context.timing.http)


def build_web(context: NodeContext, reports: NodeReports) -> "NodeWeb | None":
    """Build the page of the node, `None` without an address.

    Raises:
        ValueError: others reach the address, and no API server is used.
    """
    address = context.addresses.page
    if address is None:
        return None
    from metagpu.plugins.web.node import NodeWeb  # noqa: PLC0415 - as said

    tokens = None
    if context.cluster_settings is not None and not address.is_loopback:
        from metagpu.plugins.cluster.token_review import TokenReviewer  # noqa: PLC0415 - as said

        tokens = TokenReviewer(context.cluster_settings, run_command)
    return NodeWeb(
        address,
        context.registry,
        context.node,
        reports,
        tokens=tokens,
        timing=context.timing.http,
    )


def turn_tasks(context: NodeContext) -> Iterator[Work]:
    """Yield the turns of backends, where metagpu writes the Node's numbers itself.

    The kubelet writes them every 10 s: most pods would be bound by those of another turn.
    """
    settings = context.cluster_settings
    if settings is not None and Feature.ALLOCATABLE in settings.features:
        turns = TurnRunner(
            context.registry,
            lambda: context.layout.gpus_in_turns(context.config),
            timing=context.timing.turns,
        )
        yield partial(run_with_restart, turns.run, "turns of idle GPUs")
