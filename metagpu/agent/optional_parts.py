"""Parts of the agent that run only where the settings name them.

The libraries of the API server and of the metrics are loaded only with these parts.
"""

import platform
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from metagpu.agent.config_loader import ConfigLoader
from metagpu.agent.context import NodeContext
from metagpu.agent.preparation import Preparation
from metagpu.core.contracts.capabilities import metric_kinds_of, sharing_strategy_of
from metagpu.core.layout.turns import TurnRunner
from metagpu.core.model.gpu import Gpu
from metagpu.core.runtime.tasks import MainTasks, Work, run_with_restart
from metagpu.core.usage.usage_service import UsageService
from metagpu.host.programs import run_command
from metagpu.plugins.cluster.settings import Feature
from metagpu.plugins.http.address import ListenAddress
from metagpu.plugins.metrics.sources import MetricSources, NvmlStatus

if TYPE_CHECKING:
    from metagpu.plugins.cluster.cluster import Cluster
    from metagpu.plugins.metrics.exporter import Exporter
    from metagpu.plugins.web.node import NodeWeb
    from metagpu.plugins.web.recent_events import RecentEvents
    from metagpu.plugins.web.status_api import StatusApi

Reports = Mapping[str, Callable[[], Awaitable[Mapping[str, Any]]]]
"""The reports of the status API, by path."""


def build_cluster(
    context: NodeContext,
    config_loader: ConfigLoader,
    wait_registered: Callable[[], Awaitable[None]],
    pcie_root: Callable[[Gpu], str | None] | None,
) -> "Cluster | None":
    """Build the API server's side, `None` where it is not used."""
    if context.cluster_settings is None:
        return None
    from metagpu.host.device_nodes import read_pcie_root  # noqa: PLC0415 - as said
    from metagpu.plugins.cluster.cluster import Cluster  # noqa: PLC0415 - as said
    from metagpu.plugins.cluster.connection import ClusterContext  # noqa: PLC0415 - as said

    cluster_context = ClusterContext(
        context.cluster_settings,
        context.registry,
        follow=config_loader.follow_cluster,
        strategies={name: sharing_strategy_of(kind) for name, kind in context.backends.items()},
        call_stats=context.call_stats,
        dra_driver=lambda: context.config.root.dra.driver,
        pcie_root=pcie_root or read_pcie_root,
        wait_registered=wait_registered,
        taken=context.taken,
    )
    return Cluster(cluster_context, run_command)


def build_exporter(
    context: NodeContext,
    address: ListenAddress | None,
    config_loader: ConfigLoader,
    usage_service: UsageService,
    main_tasks: MainTasks,
    *,
    nvml_problem: Callable[[], str],
    cluster: "Cluster | None",
    claims: Callable[[], Mapping[str, Any] | None],
    preparation: Preparation,
) -> "Exporter | None":
    """Build the exporter of metrics and probes, `None` without an address for them."""
    if address is None:
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
        driver=lambda: NvmlStatus(nvml_problem(), len(driver.unanswered_calls)),
        lease_differences=lambda: usage_service.difference_counts,
        driver_limits=lambda: usage_service.driver_limits,
        cluster=lambda: cluster.report() if cluster else None,
        claims=claims,
        has_node=context.taken.is_set,
        problems=lambda: preparation.problems,
        ended=lambda: main_tasks.problems,
    )
    return Exporter(address, sources, context.timing.metrics, context.timing.http)


def build_recent_events(
    context: NodeContext, addresses: Iterable[ListenAddress | None]
) -> "RecentEvents | None":
    """Build the recent events of the node, `None` where no address serves them."""
    if not any(addresses):
        return None
    from metagpu.plugins.web.recent_events import RecentEvents  # noqa: PLC0415 - as said

    return RecentEvents(context.registry, context.node)


def build_status_api(
    context: NodeContext, address: ListenAddress | None, reports: Reports
) -> "StatusApi | None":
    """Build the status API, `None` without an address or without an API server."""
    if address is None or context.cluster_settings is None:
        return None
    from metagpu.plugins.cluster.token_review import TokenReviewer  # noqa: PLC0415 - as said
    from metagpu.plugins.web.status_api import StatusApi  # noqa: PLC0415 - as said

    tokens = TokenReviewer(context.cluster_settings, run_command)
    return StatusApi(address, reports, tokens, context.timing.http)


def build_web(
    context: NodeContext, address: ListenAddress | None, reports: Reports
) -> "NodeWeb | None":
    """Build the page of the node, `None` without an address.

    Raises:
        ValueError: others reach the address, and no API server is used.
    """
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
