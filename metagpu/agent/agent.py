"""The composition root: one node's agent, built from its settings."""

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import anyio
import structlog

from metagpu import __version__
from metagpu.agent.cdi_file import CdiFile
from metagpu.agent.commands import AgentCommands
from metagpu.agent.config_loader import ConfigLoader, read_initial
from metagpu.agent.config_source import ConfigSource
from metagpu.agent.driver_edits import DriverEdits
from metagpu.agent.fault_note_file import FaultNoteFile
from metagpu.agent.hand_over import Duties
from metagpu.agent.layout_manager import LayoutManager
from metagpu.agent.offering import Offering
from metagpu.agent.optional_parts import (
    build_cluster,
    build_exporter,
    build_recent_events,
    build_status_api,
    build_web,
    turn_tasks,
)
from metagpu.agent.paths import AgentPaths
from metagpu.agent.privileges import PrivilegeCheck
from metagpu.agent.resource_claims import ResourceClaims
from metagpu.agent.takeover import Takeover
from metagpu.agent.tenure import TenureEnd, build_tenure
from metagpu.agent.timing import AgentTiming
from metagpu.agent.usage import build_usage_service, running_holders
from metagpu.core.config.config import Config
from metagpu.core.contracts.backend import installed_backends
from metagpu.core.contracts.capabilities import DiagnosesGpu
from metagpu.core.contracts.driver import Driver
from metagpu.core.contracts.host import Host
from metagpu.core.contracts.programs import Daemons, Programs
from metagpu.core.health.watch import HealthWatch
from metagpu.core.layout.backend_runner import BackendRunner
from metagpu.core.layout.layout import Layout
from metagpu.core.model.driver_roots import host_roots
from metagpu.core.model.gpu import Gpu
from metagpu.core.runtime.tasks import MainTasks, PausableTasks, Work, run_with_restart, serve
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.facts import BackendSuspended
from metagpu.core.state.registry import Registry
from metagpu.host.char_links import CharLinks
from metagpu.host.daemons import HostDaemons
from metagpu.host.device_nodes import DeviceNodes, device_nodes
from metagpu.host.driver_roots import find_roots, program_roots
from metagpu.host.file_limit import raise_file_limit
from metagpu.host.linux import LinuxHost
from metagpu.host.programs import HostPrograms, run_child
from metagpu.host.service_manager import report_state
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.plugins.control.commands import OperatorCommands
from metagpu.plugins.control.socket import CommandHandler
from metagpu.plugins.http.address import ListenAddress
from metagpu.plugins.pod_api.folder import PodFolder
from metagpu.plugins.pod_api.server import PodMgctlServer

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
        take_over: whether to take the node over from another daemon; without it, another daemon
            is an error.
        asks_after: seconds to the first attempt of that; `None` waits for the other daemon's end.
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
    asks_after: float | None = 0.0

    def __post_init__(self) -> None:
        self._node = self.source.context.node or socket.gethostname()
        self._backends = installed_backends()
        self.call_stats = KubeletCallStats()
        self.main_tasks = MainTasks(self.timing.main_tasks)
        self._build_layout()
        self._build_services(self.host or LinuxHost())
        self._build_commands()
        self._guests = PausableTasks(self._guest_tasks)
        duties = Duties(
            self.registry,
            self.call_stats,
            self.backend_runner,
            self._guests,
            self.cluster,
            lambda: self.health.note,
            self._offering.lease_follower.catch_up,
        )
        self.tenure = build_tenure(
            self.paths,
            lambda: {**self.commands, **self.handlers},
            self._offering.gate,
            duties,
            self.timing,
            probes=self.exporter.run_probes if self.exporter else anyio.sleep_forever,
        )

    def _build_layout(self) -> None:
        """Build what makes a layout of the configuration and the GPUs."""
        registry, driver, paths, timing = self.registry, self.driver, self.paths, self.timing
        own = HostPrograms(program_roots(paths.roots), links=paths.run_dir / "lib")
        programs = self.programs or own
        on_host = HostDaemons(own, roots=host_roots(paths.roots))
        self.host_daemons = daemons = self.daemons or on_host

        settings = self.cluster_settings
        waits = settings is not None and Feature.CONFIG in settings.features
        initial = read_initial(self.source, self._backends, waits_for_cluster=waits)
        config = initial.loaded.config
        self.health = HealthWatch(driver, registry, config.root.health, timing=timing.health)
        self.fault_note_file = FaultNoteFile(paths.run_dir, registry, self.health)
        self.backend_runner = BackendRunner(registry, driver, programs, daemons)
        edits = DriverEdits(programs, partial(find_roots, paths.roots), paths.cdi_hook)
        self.cdi_file = CdiFile(
            registry, driver, edits, paths.cdi_dir, self._read_nodes, timing.cdi
        )
        self.layout_manager = LayoutManager(
            config,
            registry,
            self.health,
            self.backend_runner,
            self.cdi_file,
            PodFolder(paths.pod_dir),
            paths,
            self._read_nodes,
            timing.layout,
        )
        self.config_loader = ConfigLoader(
            self.source,
            self._backends,
            initial,
            self.layout_manager,
            registry.events,
            timing=timing.config_watch,
        )

    def _build_services(self, host: Host) -> None:
        """Build what serves the layout to the kubelet, the cluster and containers."""
        running = partial(running_holders, host)
        self.cluster = build_cluster(
            self.cluster_settings,
            self.registry,
            self.call_stats,
            self.config_loader,
            self._backends,
            dra_driver=lambda: self.config.root.dra.driver,
            pcie_root=self.pcie_root,
        )
        self.usage_service = build_usage_service(
            self.driver,
            host,
            self.layout_manager,
            self._backends,
            running=running,
            timing=self.timing.usage,
        )
        self.pod_server = PodMgctlServer(
            self.layout_manager.pod_folder,
            self._node,
            host,
            self.usage_service.report_for_pod,
            lambda: self.config.root.mgctl.in_pods,
            run_child,
            self.timing.pod_api,
        )
        self.resource_claims = ResourceClaims(
            self.layout_manager, self._node, self.cluster_settings, self.call_stats.prepares
        )
        self.exporter = build_exporter(
            self.metrics,
            self.layout_manager,
            self.config_loader,
            self.usage_service,
            driver=self.driver,
            backends=self._backends,
            call_stats=self.call_stats,
            main_tasks=self.main_tasks,
            cluster=self.cluster,
            claims=self.resource_claims.report,
            node=self.cluster_settings.node if self.cluster_settings else "",
            timing=self.timing.metrics,
            http_timing=self.timing.http,
        )
        if self.cluster is not None:
            self.cluster.wait_registered = self.resource_claims.wait_registered
        self._offering = Offering(
            self._node,
            self.layout_manager,
            self.usage_service,
            self.call_stats,
            running,
            self.resource_claims.read_leases,
            self.cluster.wait_for_choice if self.cluster else None,
            self.timing,
        )
        self._offering.lease_follower.requests_of = self.resource_claims.requests_of

    def _build_commands(self) -> None:
        """Build the commands on the control socket."""
        addresses = {
            "metrics": self.metrics,
            "status API": self.status_address,
            "page": self.web_address,
        }
        ports = {name: address.port for name, address in addresses.items() if address}
        self._privileges = PrivilegeCheck(lambda: self.config, ports)
        gate = self._offering.gate
        self.operator_commands = OperatorCommands(self.registry, self.health, lambda: gate.closed)
        self.recent_events = build_recent_events(
            self.registry, self._node, (self.status_address, self.web_address)
        )
        if self.recent_events is not None:
            self.pod_server.events_of = self.recent_events.report_for_pod
        self._agent_commands = AgentCommands(
            self._node,
            self._backends,
            self.layout_manager,
            self.config_loader,
            self.usage_service,
            self.pod_server,
            self.main_tasks,
            self.cluster,
            self._privileges.report,
            self.resource_claims.report,
            partial(find_roots, self.paths.roots),
            self.recent_events.report if self.recent_events else list,
        )
        self.status_api = build_status_api(
            self.status_address,
            self.cluster_settings,
            self._agent_commands.reports,
            self.timing.http,
        )
        self.web = build_web(
            self.web_address,
            self.cluster_settings,
            self.registry,
            node=self._node,
            reports=self._agent_commands.reports,
            timing=self.timing.http,
        )

    def _build_takeover(self) -> Takeover:
        return Takeover(
            self.registry,
            self.health,
            self.layout_manager,
            self.config_loader,
            self.call_stats,
            self._offering.leases_observed,
            self.timing.first_leases,
            self.timing.exchange,
        )

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.layout_manager.config

    @property
    def layout(self) -> Layout:
        """The layout that the configuration gives on these GPUs."""
        return self.layout_manager.layout

    async def run(self) -> None:
        """Serve the node until a signal says stop.

        Raises:
            MetagpuError: if another agent runs here or serves this kubelet, or the configuration
                does not fit the GPUs found at start.
        """
        formats = ", ".join(self.config_loader.loaded.formats) or "default"
        log.info("agent started", version=__version__, config=self.config.file, formats=formats)
        raise_file_limit()
        await self._privileges.run()

        takeover = self._build_takeover() if self.take_over else None
        serving = partial(
            self.tenure.run,
            self._main_tasks(takeover),
            self._guests,
            takeover,
            asks_after=self.asks_after,
            beside=self.beside,
        )
        report = partial(report_state, self._offering.ready)
        if await serve(serving, report, reload=self.reload, over=self.tenure.over):
            self.tenure.end = TenureEnd.STOPPED  # a signal may come while the node is handed over

    @property
    def tasks(self) -> tuple[Work, ...]:
        """The tasks that together serve the node.

        The exporter comes first: it counts events, and none may be missed.
        """
        return *self._guest_tasks, *self._main_tasks()

    def _main_tasks(self, takeover: Takeover | None = None) -> tuple[Work, ...]:
        """The tasks that serve the kubelet."""
        main: Mapping[str, Work] = {
            "health": self._watch_health,
            "offers": partial(self._offering.run, takeover),
            "backends": self.backend_runner.run,
            "leases": self._offering.follow_leases,
        }
        return tuple(self.main_tasks.keep(name, work) for name, work in main.items())

    @property
    def _guest_tasks(self) -> tuple[Work, ...]:
        """The other tasks, which end before another daemon takes over."""
        return (
            *((self.exporter.run,) if self.exporter else ()),
            *self.usage_service.tasks,
            partial(run_with_restart, self.config_loader.follow_files, "watch of files"),
            partial(run_with_restart, self._serve_pods, "mgctl in containers"),
            partial(run_with_restart, self.cdi_file.run, "CDI specification"),
            partial(run_with_restart, self.resource_claims.run, "resource claims"),
            partial(run_with_restart, self.fault_note_file.follow, "note of faults"),
            partial(run_with_restart, self._link_nodes, "links in /dev/char"),
            *((self.cluster.run,) if self.cluster else ()),
            *((self.recent_events.run,) if self.recent_events else ()),
            *((self.status_api.run,) if self.status_api else ()),
            *((self.web.run,) if self.web else ()),
            *turn_tasks(self.cluster_settings, self.layout_manager, self.timing.turns),
        )

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
        layout = await self.layout_manager.prepare()
        self.registry.apply(layout.offer_fact)
        for assignment in layout.backend_assignments:
            gpu, backend = assignment.gpu, assignment.backend
            if not isinstance(backend, DiagnosesGpu):
                continue
            if problem := backend.expected_problem(gpu):
                self.registry.apply(BackendSuspended(gpu.id, backend.name, problem, time.time()))

    async def reload(self) -> None:
        """Read and apply the configuration again; an error is logged, and changes nothing."""
        await self.config_loader.reload()

    async def _link_nodes(self) -> None:
        links = CharLinks(partial(find_roots, self.paths.roots))
        await links.run(self.timing.layout.device_nodes)

    def _read_nodes(self) -> DeviceNodes:
        return device_nodes(find_roots(self.paths.roots).dev)

    async def _watch_health(self) -> None:
        if not self.health.surveyed.is_set():
            await self.fault_note_file.load()
        await self.health.run()

    async def _serve_pods(self) -> None:
        # The server starts a process, a tenth of the daemon's start: the kubelet comes first.
        with anyio.move_on_after(self.timing.first_registration):
            await self.call_stats.accepted.wait()
        await self.pod_server.run()
