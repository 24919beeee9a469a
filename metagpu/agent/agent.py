"""The composition root: one node's agent, built from its settings."""

import gc
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import structlog
from anyio import to_thread

from metagpu import __version__
from metagpu.agent.cdi_file import CdiFile
from metagpu.agent.config_loader import ConfigLoader, read_initial
from metagpu.agent.config_source import ConfigSource
from metagpu.agent.fault_note_file import FaultNoteFile
from metagpu.agent.hand_over import Duties, HandOver
from metagpu.agent.layout_manager import LayoutManager
from metagpu.agent.paths import AgentPaths
from metagpu.agent.takeover import Takeover
from metagpu.agent.tenure import Tenure
from metagpu.agent.timing import AgentTiming
from metagpu.core.config.config import Config, parse
from metagpu.core.contracts.backend import InstalledBackends, installed_backends
from metagpu.core.contracts.capabilities import (
    DiagnosesGpu,
    Guard,
    guard_of,
    metric_kinds_of,
    sharing_strategy_of,
)
from metagpu.core.contracts.daemons import Daemons
from metagpu.core.contracts.driver import Driver
from metagpu.core.contracts.host import Host
from metagpu.core.contracts.programs import Programs
from metagpu.core.grants.injection import Injection
from metagpu.core.health.watch import HealthWatch
from metagpu.core.layout.backend_runner import BackendRunner
from metagpu.core.layout.layout import Layout
from metagpu.core.layout.turn_runner import TurnRunner
from metagpu.core.model.privileges import Privilege
from metagpu.core.model.shares import Holder
from metagpu.core.reports.privileges import needed_privileges, privileges_report
from metagpu.core.reports.status import status_report
from metagpu.core.runtime.main_tasks import MainTasks, Work
from metagpu.core.runtime.pausable_tasks import PausableTasks
from metagpu.core.runtime.restart import run_with_restart
from metagpu.core.runtime.serve import serve
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.facts import BackendSuspended, GpusFound
from metagpu.core.state.registry import Registry
from metagpu.core.usage.usage_service import UsageService, enforcement_settings
from metagpu.host.daemons import HostDaemons
from metagpu.host.device_nodes import device_nodes
from metagpu.host.file_limit import raise_file_limit
from metagpu.host.linux import LinuxHost, held_privileges
from metagpu.host.programs import DRIVER_ROOT, HostPrograms, run_child, run_command
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.plugins.control.commands import OperatorCommands
from metagpu.plugins.control.socket import CommandHandler
from metagpu.plugins.kubelet import checkpoint
from metagpu.plugins.kubelet.call_gate import CallGate
from metagpu.plugins.kubelet.directory import KubeletDirectory
from metagpu.plugins.kubelet.endpoints import serve_offers
from metagpu.plugins.kubelet.folder_lock import FolderLock
from metagpu.plugins.kubelet.pod_resources import LeaseFollower
from metagpu.plugins.metrics.address import ListenAddress
from metagpu.plugins.pod_api.folder import PodFolder
from metagpu.plugins.pod_api.server import PodMgctlServer

if TYPE_CHECKING:
    from metagpu.plugins.cluster.cluster import Cluster
    from metagpu.plugins.metrics.exporter import Exporter

log = structlog.get_logger()


class _Guards(Mapping[str, Guard]):
    """The guard of each backend that was ever configured, by the backend's name."""

    def __init__(self, backends: InstalledBackends) -> None:
        self._backends = backends

    def __getitem__(self, name: str) -> Guard:
        return guard_of(self._backends.loaded[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._backends.loaded)

    def __len__(self) -> int:
        return len(self._backends.loaded)


@dataclass
class Agent:
    """One node's agent: a registry, with the parts that write and read it.

    Attributes:
        source: where the configuration is; read at start, when a file changes, and at a reload.
        handlers: control commands beside the agent's own.
        programs: programs of the host; this host's own by default.
        daemons: long-running processes of the host; this host's own by default.
        host: processes of the host; this host's own by default.
        cluster_settings: the uses of the API server, `None` for none.
        metrics: the address of the metrics and probes, `None` for none.
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
    cluster_settings: ClusterSettings | None = None
    metrics: ListenAddress | None = None
    beside: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
    timing: AgentTiming = field(default_factory=AgentTiming)
    take_over: bool = False
    asks_after: float | None = 0.0

    def __post_init__(self) -> None:
        self._backends = installed_backends()
        self._node = self.source.context.node or socket.gethostname()
        self._privileges: frozenset[Privilege] = frozenset()
        self._leases_observed = anyio.Event()
        self._call_gate = CallGate()
        self._directory = KubeletDirectory(self.paths.kubelet_dir)
        self.call_stats = KubeletCallStats()
        self.main_tasks = MainTasks(self.timing.main_tasks)
        self.host = self.host or LinuxHost()
        roots = [root for root in (self.paths.dev_root, DRIVER_ROOT) if root is not None]
        own = HostPrograms(tuple(roots))
        programs, daemons = self.programs or own, self.daemons or HostDaemons(own)

        settings = self.cluster_settings
        waits = settings is not None and Feature.CONFIG in settings.features
        initial = read_initial(self.source, self._backends, waits_for_cluster=waits)
        config = initial.loaded.config
        self.health = HealthWatch(
            self.driver, self.registry, config.root.health, timing=self.timing.health
        )
        self.fault_note_file = FaultNoteFile(self.paths.run_dir, self.registry, self.health)
        self.operator_commands = OperatorCommands(self.registry, self.health)
        self.backend_runner = BackendRunner(self.registry, self.driver, programs, daemons)
        self.cdi_file = CdiFile(
            self.registry,
            self.driver,
            programs,
            self.paths.cdi_dir,
            partial(device_nodes, self.paths.dev_root),
            self.timing.cdi,
        )
        pod_folder = PodFolder(self.paths.pod_dir)
        self.layout_manager = LayoutManager(
            config,
            self.registry,
            self.health,
            self.backend_runner,
            self.cdi_file,
            pod_folder,
            self.paths,
            self.timing.layout,
        )
        self.config_loader = ConfigLoader(
            self.source,
            self._backends,
            initial,
            self.layout_manager,
            self.registry.events,
            timing=self.timing.config_watch,
        )
        self.cluster = self._cluster(settings) if settings else None
        self._running_holders = partial(_running_holders, self.host)
        self.usage_service = self._usage_service(self.host)
        self.pod_server = PodMgctlServer(
            pod_folder,
            self._node,
            self.host,
            self.usage_service.report_for_pod,
            lambda: self.config.root.mgctl.in_pods,
            run_child,
            self.timing.pod_api,
        )
        self.exporter = self._exporter(self.metrics) if self.metrics else None
        self._takeover: Takeover | None = None
        self._guests = PausableTasks(self._guest_tasks)
        self.tenure = self._tenure()

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
        self._privileges = await to_thread.run_sync(held_privileges)
        for privilege, uses in self._needed_privileges.items():
            if uses and privilege not in self._privileges:
                fix = "add it to the container's capabilities, or leave these features out"
                log.warning("capability missing", capability=privilege, needed_for=uses, fix=fix)

        if self.take_over:
            self._takeover = self._takeover_of()
        serving = partial(
            self.tenure.run,
            self._main_tasks,
            self._guests,
            self._takeover.run if self._takeover else None,
            asks_after=self.asks_after,
            on_free=self._serve_at_once,
            beside=self.beside,
        )
        await serve(serving, reload=self.reload, over=self.tenure.over)

    @property
    def tasks(self) -> tuple[Work, ...]:
        """The tasks that together serve the node.

        The exporter comes first: it counts events, and none may be missed.
        """
        return *self._guest_tasks, *self._main_tasks

    @property
    def _main_tasks(self) -> tuple[Work, ...]:
        """The tasks that serve the kubelet."""
        main = {
            "health": self._watch_health,
            "offers": self._offer,
            "backends": self.backend_runner.run,
            "leases": self._follow_leases,
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
            partial(run_with_restart, self.fault_note_file.follow, "note of faults"),
            *((self.cluster.run,) if self.cluster else ()),
            *self._turns,
        )

    @property
    def commands(self) -> Mapping[str, CommandHandler]:
        """The agent's own commands on the control socket."""
        return {
            "status": self._status,
            "plan": self._plan,
            "usage": self._usage,
            **self.operator_commands.by_name,
        }

    async def survey_once(self) -> None:
        """Read the GPUs once and compute the layout, without serving it.

        Raises:
            DriverError: if NVML cannot be used.
            ConfigError: if the configuration does not fit the GPUs.
        """
        async with self.driver.session():
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

    async def _watch_health(self) -> None:
        if not self.health.surveyed.is_set():
            await self.fault_note_file.load()
        await self.health.run()

    async def _offer(self) -> None:
        """Offer the layout's shares to the kubelet, also of GPUs that are added later."""
        await self.health.surveyed.wait()
        if self._takeover is not None:
            await self._takeover.granted.wait()
        succession = self._takeover.succession if self._takeover else None
        if succession is None:
            if self.cluster is not None:
                await self.cluster.config_follower.wait_for_choice()
            await self.layout_manager.apply()
        for resource, offer in self.registry.snapshot.offers.items():
            log.info("resource offered", resource=resource, shares=len(offer.shares))

        # The objects of now stay for the life of the process; no collection has to scan them again.
        gc.freeze()

        if any(state.can_conflict for state in self.registry.snapshot.gpus.values()):
            # An older pod may hold what the kubelet would give to another pod. A kubelet that is up
            # lists the leases at once, and a kubelet that is down gives nothing to anybody.
            with anyio.move_on_after(self.timing.first_leases):
                await self._leases_observed.wait()

        async with anyio.create_task_group() as group:
            group.start_soon(
                partial(
                    serve_offers,
                    self.registry,
                    self._directory,
                    self.layout_manager.backend,
                    self.call_stats,
                    ensure_cdi_names=self.cdi_file.ensure_names,
                    pod_resources=self.paths.pod_resources,
                    gate=self._call_gate,
                    succession=succession,
                    timing=self.timing.kubelet,
                )
            )
            group.start_soon(self.layout_manager.follow_nodes)

            with self.registry.events.subscribe(GpusFound) as events:
                async for _ in events:
                    await self.layout_manager.reapply()

    async def _follow_leases(self) -> None:
        """Observe the leases, by the kubelet's checkpoint and PodResources service."""
        await self.health.surveyed.wait()
        promised = await to_thread.run_sync(checkpoint.read_promised_memory, self.paths.kubelet_dir)
        self.usage_service.set_promised_memory(promised)
        await LeaseFollower(
            self.registry,
            self.paths.pod_resources,
            directory=self.paths.kubelet_dir,
            node=self._node,
            timing=self.timing.kubelet,
            running=self._running_holders,
        ).run(self._leases_observed)

    async def _serve_pods(self) -> None:
        # The server starts a process, a tenth of the daemon's start: the kubelet comes first.
        with anyio.move_on_after(self.timing.first_registration):
            await self.call_stats.accepted.wait()
        await self.pod_server.run()

    def _takeover_of(self) -> Takeover:
        return Takeover(
            self.registry,
            self.health,
            self.layout_manager,
            self.config_loader,
            self.call_stats,
            self._directory,
            self._leases_observed,
            self.timing.first_leases,
            self.timing.exchange,
        )

    def _tenure(self) -> Tenure:
        timing = self.timing.exchange
        duties = Duties(
            self.registry, self.call_stats, self.backend_runner, self._guests, self.cluster
        )
        hand_over = HandOver(self._call_gate, duties, self.timing.kubelet.list_end, timing)
        lock = FolderLock(self.paths.kubelet_dir, self.timing.kubelet.watch_period)
        return Tenure(
            self.paths.run_dir,
            lock,
            lambda: {**self.commands, **self.handlers},
            hand_over,
            timing,
        )

    async def _serve_at_once(self) -> None:
        """Begin without an exchange; the wait for the node may have been long."""
        if self._takeover is not None:
            await self.config_loader.reload(again=False)
            self._takeover.granted.set()

    async def _status(self, _: Mapping[str, Any]) -> object:
        return {
            **status_report(self.registry.snapshot, self.layout),
            "enforcement": self.usage_service.enforcement_report,
            "leaseDifferences": [it.to_dict() for it in self.usage_service.lease_differences],
            "mixedRequests": self.usage_service.mixed_requests,
            "lostDevices": self.usage_service.lost_devices,
            "configuration": self.config_loader.report(),
            "cluster": self.cluster.report() if self.cluster else None,
            "cdi": self.cdi_file.report(),
            "endedTasks": dict(self.main_tasks.problems),
            "privileges": privileges_report(self._needed_privileges, self._privileges),
            "mgctl": self.pod_server.report(),
        }

    @property
    def _needed_privileges(self) -> Mapping[Privilege, list[str]]:
        return needed_privileges(self.config, self.metrics.port if self.metrics else None)

    async def _plan(self, request: Mapping[str, Any]) -> object:
        """Return what a configuration, given as metagpu/v1 text, would change."""
        text, file = str(request.get("text", "")), str(request.get("file", "<request>"))
        config = await to_thread.run_sync(parse, text, file, self._backends)
        existing = await self.layout_manager.read_existing(config)
        # In a thread: a plan of very many shares must not keep the kubelet waiting.
        plan = partial(self.layout_manager.plan, config, existing=existing)
        return await to_thread.run_sync(plan)

    async def _usage(self, _: Mapping[str, Any]) -> object:
        return {
            "version": __version__,
            "node": self._node,
            **await self.usage_service.report(),
        }

    @property
    def _turns(self) -> Iterator[Work]:
        """The turns of backends, where metagpu writes the Node's numbers as they change.

        The kubelet writes them every 10 s: most pods would be bound by those of another turn.
        """
        settings = self.cluster_settings
        if settings is not None and Feature.ALLOCATABLE in settings.features:
            turns = TurnRunner(
                self.registry,
                lambda: self.layout.gpus_in_turns(self.config),
                timing=self.timing.turns,
            )
            yield partial(run_with_restart, turns.run, "turns of idle GPUs")

    def _cluster(self, settings: ClusterSettings) -> "Cluster":
        """Build the API server's side; it is loaded only where it is used."""
        from metagpu.plugins.cluster.cluster import Cluster  # noqa: PLC0415 - as said

        strategies = {name: sharing_strategy_of(kind) for name, kind in self._backends.items()}
        return Cluster(
            settings,
            self.registry,
            self.config_loader.follow_cluster,
            strategies,
            run_command,
        )

    def _usage_service(self, host: Host) -> UsageService:
        return UsageService(
            self.driver,
            host,
            self.registry,
            lambda gpu: enforcement_settings(self.config, self.layout, gpu),
            _Guards(self._backends),
            running=self._running_holders,
            read_allocated=partial(
                to_thread.run_sync, checkpoint.read_allocated_devices, self.paths.kubelet_dir
            ),
            shows_one_answer=lambda: self.config.root.injection(Injection()).shows_one_answer,
            timing=self.timing.usage,
        )

    def _exporter(self, address: ListenAddress) -> "Exporter":
        """Build the exporter; its libraries are loaded only where metrics are served."""
        from metagpu.plugins.metrics.exporter import Exporter  # noqa: PLC0415 - as said
        from metagpu.plugins.metrics.sources import MetricSources, NvmlStatus  # noqa: PLC0415

        sources = MetricSources(
            registry=self.registry,
            kubelet=self.call_stats,
            kinds=metric_kinds_of(self._backends.values()),
            rules=self.usage_service.rules,
            layout=lambda: self.layout,
            usage=self.usage_service.latest,
            configuration=self.config_loader.to_metrics,
            driver=lambda: NvmlStatus(self.health.unusable, len(self.driver.unanswered_calls)),
            lease_differences=lambda: self.usage_service.lease_differences,
            driver_limits=lambda: self.usage_service.driver_limits,
            cluster=lambda: self.cluster.report() if self.cluster else None,
            ended=lambda: self.main_tasks.problems,
        )
        return Exporter(address, sources, self.timing.metrics)


async def _running_holders(host: Host, holders: Collection[Holder]) -> Collection[Holder]:
    """Return those of some holders whose containers are seen to run."""
    return {it.holder for it in await host.cgroups(holders) if it.populated}
