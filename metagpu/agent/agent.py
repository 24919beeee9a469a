"""The composition root: one node's agent, built from its settings."""

import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import structlog
from msgspec.structs import replace

from metagpu import __version__
from metagpu.agent.commands import AgentCommands, PrivilegeCheck
from metagpu.agent.config_loader import ConfigLoader, read_initial
from metagpu.agent.config_source import ConfigSource
from metagpu.agent.context import Addresses, ConfigInForce, NodeContext
from metagpu.agent.exchange import Exchange, Lifecycle
from metagpu.agent.fault_note_file import FaultNoteFile
from metagpu.agent.layout_manager import LayoutManager
from metagpu.agent.offering import Offering
from metagpu.agent.parts import (
    build_cdi_file,
    build_cluster,
    build_exporter,
    build_health,
    build_pod_server,
    build_recent_events,
    build_status_api,
    build_usage_service,
    build_web,
    link_nodes,
    running_holders,
    serve_pods,
    turn_tasks,
)
from metagpu.agent.paths import AgentPaths
from metagpu.agent.preparation import Preparation
from metagpu.agent.resource_claims import ResourceClaims
from metagpu.agent.timing import AgentTiming
from metagpu.core.config.config import Config
from metagpu.core.contracts.backend import installed_backends
from metagpu.core.contracts.driver import Driver
from metagpu.core.contracts.host import Host
from metagpu.core.contracts.programs import Daemons, Programs
from metagpu.core.layout.backend_runner import BackendRunner
from metagpu.core.layout.layout import Layout
from metagpu.core.model.driver_roots import host_roots
from metagpu.core.model.gpu import Gpu
from metagpu.core.runtime.listener import log_failed_accepts_once
from metagpu.core.runtime.tasks import MainTasks, run_with_restart, serve
from metagpu.core.state.registry import Registry
from metagpu.host.daemons import HostDaemons
from metagpu.host.driver_roots import program_roots
from metagpu.host.linux import LinuxHost
from metagpu.host.processes import raise_file_limit
from metagpu.host.programs import HostPrograms
from metagpu.host.service import report_state
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.plugins.control.commands import OperatorCommands
from metagpu.plugins.control.socket import CommandHandler
from metagpu.plugins.http.address import ListenAddress
from metagpu.plugins.kubelet.folder_lock import FolderLock
from metagpu.plugins.pod_api.server import PodFolder

log = structlog.get_logger()


@dataclass
class Agent:
    """One node's agent: a registry, with the parts that write and read it.

    Attributes:
        source: where the configuration is; read at start, when a file changes, and at a reload.
        handlers: control commands beside the agent's own.
        programs: programs of the host; this host's own by default.
        daemons: long-running processes of the host; this host's own by default.
        host: processes of the host; this host's own by default.
        pcie_root: returns the PCIe root complex of a GPU; this host's own answers by default.
        cluster_settings: the uses of the API server, `None` for none.
        metrics: the address of the metrics and probes, `None` for none.
        status_address: the address of the status API, `None` for none.
        web_address: the address of the page, `None` for none.
        beside: what runs around the agent's tasks, as a simulated cluster does.
        take_over: whether to wait for the end of another daemon, and to take the node then;
            without it, another daemon is an error.
    """

    source: ConfigSource
    driver: Driver
    paths: AgentPaths = field(default_factory=AgentPaths)
    handlers: Mapping[str, CommandHandler] = field(default_factory=dict)
    registry: Registry = field(default_factory=Registry)
    programs: Programs | None = None
    daemons: Daemons | None = None
    host: Host | None = None
    pcie_root: Callable[[Gpu], str | None] | None = None
    cluster_settings: ClusterSettings | None = None
    metrics: ListenAddress | None = None
    status_address: ListenAddress | None = None
    web_address: ListenAddress | None = None
    beside: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
    timing: AgentTiming = field(default_factory=AgentTiming)
    take_over: bool = False

    def __post_init__(self) -> None:
        self._build_node()
        self._build_services()
        self._build_reports()
        self._lifecycle = self._build_lifecycle()

    def _build_node(self) -> None:
        """Build what all parts share, the GPUs, and the layout of the configuration."""
        paths, timing, backends = self.paths, self.timing, installed_backends()
        settings = self.cluster_settings
        follows = settings is not None and Feature.CONFIG in settings.features
        reports_errors = follows or self.take_over
        source = replace(self.source, awaits_cluster=follows)
        initial = read_initial(source, backends, reports_errors=reports_errors)
        own = HostPrograms(program_roots(paths.roots), links=paths.run_dir / "lib")
        self.context = context = NodeContext(
            node=self.source.context.node or socket.gethostname(),
            registry=self.registry,
            driver=self.driver,
            host=self.host or LinuxHost(),
            programs=self.programs or own,
            daemons=self.daemons or HostDaemons(own, roots=host_roots(paths.roots)),
            paths=paths,
            backends=backends,
            in_force=ConfigInForce(initial.loaded.config),
            cluster_settings=settings,
            addresses=Addresses(self.metrics, self.status_address, self.web_address),
            timing=timing,
            main_tasks=MainTasks(timing.main_tasks),
        )
        if settings is not None and Feature.PODS in settings.features:
            self.registry.await_pods()
        self.health = build_health(context)
        self.fault_note_file = FaultNoteFile(paths.run_dir, self.registry, self.health)
        self.backend_runner = BackendRunner(
            self.registry, self.driver, context.programs, context.daemons, context.host
        )
        self.cdi_file = build_cdi_file(context)
        self.pod_folder = PodFolder(paths.pod_dir)
        self.layout_manager = LayoutManager(
            context, self.backend_runner, self.cdi_file, self.pod_folder
        )
        self.config_loader = ConfigLoader(context, source, initial, self.layout_manager)

    def _build_services(self) -> None:
        """Build what serves the layout to the kubelet, the cluster and containers."""
        context, running = self.context, partial(running_holders, self.context.host)
        self.resource_claims = ResourceClaims(context, self.layout_manager)
        self.cluster = build_cluster(
            context, self.config_loader, self.resource_claims.wait_registered, self.pcie_root
        )
        self.preparation = Preparation(
            self.health, self.config_loader, self.layout_manager, self.cluster
        )
        self.usage_service = build_usage_service(context, running)
        self.recent_events = build_recent_events(context)
        self.pod_server = build_pod_server(
            context, self.pod_folder, self.usage_service, self.recent_events
        )
        self._offering = Offering(
            context,
            self.config_loader,
            self.layout_manager,
            self.usage_service,
            running,
            self.resource_claims,
            self.cluster.wait_for_choice if self.cluster else None,
        )

    def _build_reports(self) -> None:
        """Build what reports to people and to other daemons."""
        context = self.context
        self._privileges = PrivilegeCheck(context)
        self.operator_commands = OperatorCommands(self.registry, self.health)
        self._agent_commands = AgentCommands(
            context,
            self.layout_manager,
            self.config_loader,
            self.usage_service,
            self.pod_server,
            self.cluster,
            self._privileges.report,
            self.resource_claims.report,
            self.recent_events.report if self.recent_events else list,
            self._offering.ready,
            self._offering.lease_follower.refresh,
        )
        self.exporter = build_exporter(
            context,
            self.health,
            self.config_loader,
            self.usage_service,
            cluster=self.cluster,
            claims=self.resource_claims.report,
            preparation=self.preparation,
        )
        self.status_api = build_status_api(context, self._agent_commands.reports)
        self.web = build_web(context, self._agent_commands.reports)
        self.exchange = Exchange(
            self.paths.run_dir,
            FolderLock(self.paths.kubelet_dir, self.timing.kubelet.watch_period),
            lambda: {**self.commands, **self.handlers},
            self.preparation,
            self.registry,
            context.call_stats,
            self.timing.exchange,
            context.taken,
            self._offering.ready,
            is_open=self.cluster.shows_shares if self.cluster else lambda: False,
        )

    def _build_lifecycle(self) -> Lifecycle:
        """Build the daemon's life: which task begins when, and which ends first."""
        context, keep = self.context, self.context.main_tasks.keep
        again = run_with_restart
        pods, links = partial(serve_pods, context, self.pod_server), partial(link_nodes, context)
        return Lifecycle(
            self.exchange,
            self.fault_note_file,
            preparing=(
                *((self.exporter.run,) if self.exporter else ()),
                partial(again, self.config_loader.follow_files, "watch of files"),
                *((self.cluster.run,) if self.cluster else ()),
                *((self.recent_events.run,) if self.recent_events else ()),
            ),
            health=keep("health", self._watch_health),
            guests=(
                *self.usage_service.tasks,
                partial(again, pods, "mgctl in containers"),
                partial(again, self.cdi_file.run, "CDI specification"),
                partial(again, self.resource_claims.run, "resource claims"),
                partial(again, self.fault_note_file.follow, "note of faults"),
                partial(again, links, "links in /dev/char"),
                *((self.status_api.run,) if self.status_api else ()),
                *((self.web.run,) if self.web else ()),
                *turn_tasks(context),
            ),
            kubelet=(
                keep("leases", self._offering.follow_leases),
                keep("offers", self._offering.run),
                keep("backends", self.backend_runner.run),
            ),
        )

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.context.config

    @property
    def layout(self) -> Layout:
        """The layout that the configuration gives on these GPUs."""
        return self.context.layout

    async def run(self) -> None:
        """Serve the node until a signal says stop.

        Raises:
            MetagpuError: if another agent runs here or serves this kubelet, or the configuration
                does not fit the GPUs found at start.
        """
        formats = ", ".join(self.config_loader.loaded.formats) or "default"
        log.info("agent started", version=__version__, config=self.config.file, formats=formats)
        raise_file_limit()
        log_failed_accepts_once()
        await self._privileges.run()

        report = partial(report_state, self._offering.ready)
        await serve(
            partial(self._lifecycle.run, self.beside, waits=self.take_over),
            report,
            reload=self.reload,
            withdraw=self._lifecycle.withdraw,
            over=self.exchange.over,
        )

    async def serve_node(self) -> None:
        """Serve the node without its locks, as nobody else can have it; until cancelled."""
        await self._lifecycle.serve_node()

    @property
    def commands(self) -> Mapping[str, CommandHandler]:
        """The commands on the control socket, `handlers` aside."""
        return {**self._agent_commands.by_name, **self.operator_commands.by_name}

    async def survey_once(self) -> None:
        """Read the GPUs once and compute the layout, without serving it.

        Raises:
            DriverError: if NVML cannot be used.
            ConfigError: if the configuration does not fit the GPUs.
        """
        async with self.driver.session():
            await self.survey()

    async def survey(self) -> None:
        """Read the GPUs and compute the layout, in a session of the driver.

        Raises:
            DriverError: if NVML cannot be used.
            ConfigError: if the configuration does not fit the GPUs.
        """
        await self.health.survey()
        await self.config_loader.settle(strict=True)
        await self.layout_manager.show()

    async def reload(self) -> None:
        """Read and apply the configuration again; an error is logged, and changes nothing."""
        await self.config_loader.reload()

    async def _watch_health(self) -> None:
        if not self.health.surveyed.is_set():
            await self.fault_note_file.load()
        await self.health.run()
