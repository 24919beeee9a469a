"""Parts of the agent that run only where the settings name them.

The libraries of the API server and of the metrics are loaded only with these parts.
"""

import platform
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from metagpu.agent.config_loader import ConfigLoader
from metagpu.agent.layout_manager import LayoutManager
from metagpu.core.contracts.backend import InstalledBackends
from metagpu.core.contracts.capabilities import metric_kinds_of, sharing_strategy_of
from metagpu.core.contracts.driver import Driver
from metagpu.core.layout.offer_turns import TurnTiming
from metagpu.core.layout.turn_runner import TurnRunner
from metagpu.core.model.gpu import Gpu
from metagpu.core.runtime.tasks import MainTasks, Work, run_with_restart
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.registry import Registry
from metagpu.core.usage.usage_service import UsageService
from metagpu.host.programs import run_command
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.plugins.http.address import ListenAddress
from metagpu.plugins.http.timing import HttpTiming
from metagpu.plugins.metrics.sources import MetricSources, MetricsTiming, NvmlStatus

if TYPE_CHECKING:
    from metagpu.plugins.cluster.cluster import Cluster
    from metagpu.plugins.metrics.exporter import Exporter
    from metagpu.plugins.web.node import NodeWeb
    from metagpu.plugins.web.recent_events import RecentEvents
    from metagpu.plugins.web.status_api import StatusApi


def build_cluster(
    settings: ClusterSettings | None,
    registry: Registry,
    call_stats: KubeletCallStats,
    config_loader: ConfigLoader,
    backends: InstalledBackends,
    *,
    dra_driver: Callable[[], str],
    pcie_root: Callable[[Gpu], str | None] | None,
) -> "Cluster | None":
    """Build the API server's side, `None` where it is not used."""
    if settings is None:
        return None
    from metagpu.host.pcie import read_pcie_root  # noqa: PLC0415 - as said
    from metagpu.plugins.cluster.cluster import Cluster  # noqa: PLC0415 - as said

    strategies = {name: sharing_strategy_of(kind) for name, kind in backends.items()}
    follow = config_loader.follow_cluster
    return Cluster(
        settings,
        registry,
        follow,
        strategies,
        run_command,
        call_stats=call_stats,
        dra_driver=dra_driver,
        pcie_root=pcie_root or read_pcie_root,
    )


def build_exporter(
    address: ListenAddress | None,
    layout_manager: LayoutManager,
    config_loader: ConfigLoader,
    usage_service: UsageService,
    *,
    driver: Driver,
    backends: InstalledBackends,
    call_stats: KubeletCallStats,
    main_tasks: MainTasks,
    cluster: "Cluster | None",
    claims: Callable[[], Mapping[str, Any] | None],
    node: str,
    timing: MetricsTiming,
    http_timing: HttpTiming,
) -> "Exporter | None":
    """Build the exporter of metrics and probes, `None` without an address for them.

    `node` is the Node's name; without one it is the machine's.
    """
    if address is None:
        return None
    from metagpu.plugins.metrics.exporter import Exporter  # noqa: PLC0415 - as said

    health = layout_manager.health
    sources = MetricSources(
        node=node or platform.node(),
        registry=layout_manager.registry,
        kubelet=call_stats,
        kinds=metric_kinds_of(backends.values()),
        rules=usage_service.rules,
        layout=lambda: layout_manager.layout,
        usage=partial(usage_service.latest, sensors=True),
        sensors=driver.sensors,
        instance_sensors=driver.mig.sensors,
        configuration=config_loader.to_metrics,
        driver=lambda: NvmlStatus(health.unusable, len(driver.unanswered_calls)),
        lease_differences=lambda: usage_service.difference_counts,
        driver_limits=lambda: usage_service.driver_limits,
        cluster=lambda: cluster.report() if cluster else None,
        claims=claims,
        ended=lambda: main_tasks.problems,
    )
    return Exporter(address, sources, timing, http_timing)


def build_recent_events(
    registry: Registry, node: str, addresses: Iterable[ListenAddress | None]
) -> "RecentEvents | None":
    """Build the recent events of the node, `None` where no address serves them."""
    if not any(addresses):
        return None
    from metagpu.plugins.web.recent_events import RecentEvents  # noqa: PLC0415 - as said

    return RecentEvents(registry, node)


def build_status_api(
    address: ListenAddress | None,
    settings: ClusterSettings | None,
    reports: Mapping[str, Callable[[], Awaitable[Mapping[str, Any]]]],
    timing: HttpTiming,
) -> "StatusApi | None":
    """Build the status API, `None` without an address or without an API server."""
    if address is None or settings is None:
        return None
    from metagpu.plugins.cluster.token_review import TokenReviewer  # noqa: PLC0415 - as said
    from metagpu.plugins.web.status_api import StatusApi  # noqa: PLC0415 - as said

    return StatusApi(address, reports, TokenReviewer(settings, run_command), timing)


def build_web(
    address: ListenAddress | None,
    settings: ClusterSettings | None,
    registry: Registry,
    *,
    node: str,
    reports: Mapping[str, Callable[[], Awaitable[Mapping[str, Any]]]],
    timing: HttpTiming,
) -> "NodeWeb | None":
    """Build the page of the node, `None` without an address.

    Raises:
        ValueError: others reach the address, and no API server is used.
    """
    if address is None:
        return None
    from metagpu.plugins.web.node import NodeWeb  # noqa: PLC0415 - as said

    tokens = None
    if settings is not None and not address.is_loopback:
        from metagpu.plugins.cluster.token_review import TokenReviewer  # noqa: PLC0415 - as said

        tokens = TokenReviewer(settings, run_command)
    return NodeWeb(address, registry, node, reports, tokens=tokens, timing=timing)


def turn_tasks(
    settings: ClusterSettings | None, layout_manager: LayoutManager, timing: TurnTiming
) -> Iterator[Work]:
    """Yield the turns of backends, where metagpu writes the Node's numbers itself.

    The kubelet writes them every 10 s: most pods would be bound by those of another turn.
    """
    if settings is not None and Feature.ALLOCATABLE in settings.features:
        turns = TurnRunner(
            layout_manager.registry,
            lambda: layout_manager.layout.gpus_in_turns(layout_manager.config),
            timing=timing,
        )
        yield partial(run_with_restart, turns.run, "turns of idle GPUs")
