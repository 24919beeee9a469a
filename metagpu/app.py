"""The composition root: from settings to a running agent."""

import gc
import os
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anyio
import structlog
from anyio import to_thread

from metagpu import __version__, host
from metagpu.core import config as configuration
from metagpu.core import report, usage_report
from metagpu.core.backend import Backend, installed_backends
from metagpu.core.census import Census, Looks
from metagpu.core.driver import Driver
from metagpu.core.enforcement import Enforcement, Policy
from metagpu.core.enforcer import Enforcer
from metagpu.core.errors import ConfigError
from metagpu.core.facts import GpusFound
from metagpu.core.health import HealthWatch
from metagpu.core.host import Host
from metagpu.core.injection import Injection
from metagpu.core.keeper import Keeper
from metagpu.core.layout import Layout, lay_out, rehearse
from metagpu.core.model import GpuId, ResourceName
from metagpu.core.registry import Registry
from metagpu.core.server import serve
from metagpu.core.strangers import StrangerWatch
from metagpu.core.tools import Tools
from metagpu.inside import Inside
from metagpu.plugins import control, kubelet_directory, podresources, wire
from metagpu.plugins.endpoints import serve_offers
from metagpu.tools import DRIVER_ROOT, HostTools

NODES_PERIOD: Final = 10.0
"""Seconds between two looks at the host's device nodes."""

log = structlog.get_logger()


@dataclass(frozen=True)
class Places:
    """Where the agent finds the kubelet and the host, and may be found itself."""

    kubelet: Path = kubelet_directory.DEFAULT_DIRECTORY
    pod_resources: Path = podresources.DEFAULT_SOCKET
    run: Path = control.DEFAULT_RUN_DIR
    dev_root: Path | None = None
    pods: Path | None = None


@dataclass
class Agent:
    """One node's agent: a registry, those who tell it facts, and those who offer what it holds.

    Attributes:
        config_file: read at start and at every reload; `None` means the defaults.
        handlers: control commands beside the agent's own.
        tools: programs of the host; those of this one unless given.
        host: processes of the host; those of this one unless given.
    """

    config_file: Path | None
    driver: Driver
    places: Places = field(default_factory=Places)
    handlers: Mapping[str, control.Handler] = field(default_factory=dict)
    registry: Registry = field(default_factory=Registry)
    tools: Tools | None = None
    host: Host | None = None

    def __post_init__(self) -> None:
        self._kinds = installed_backends()
        self.config = configuration.load(self.config_file, self._kinds)
        rehearse(self.config)
        self.health = HealthWatch(self.driver, self.registry, self.config.envelope.health)
        self.layout = Layout((), {}, ())
        roots = [root for root in (self.places.dev_root, DRIVER_ROOT) if root is not None]
        self.keeper = Keeper(self.registry, self.driver, self.tools or HostTools(tuple(roots)))
        self.host = self.host or host.LinuxHost()
        self._guards = {name: kind.guard for name, kind in self._kinds.items()}
        self.enforcer = Enforcer(self.driver, self.host, self.registry, self._terms, self._guards)
        self._census = Census(self.driver, self.host, self.registry)
        self._strangers = StrangerWatch(self._census, self.host, self.registry)
        self._rules = usage_report.Rules(self._terms, self._guards)
        self._node = os.environ.get("NODE_NAME") or socket.gethostname()
        self.inside = Inside(
            self.places.pods,
            self._node,
            self.host,
            Looks(self._census),
            self.registry,
            self._rules,
            lambda: self.config.envelope.mgctl.in_pods,
        )
        self._backends: dict[ResourceName, Backend] = {}
        self._nodes: frozenset[str] = frozenset()
        self._laying = anyio.Lock()

    async def run(self) -> None:
        """Serve the node until a signal says stop.

        Raises:
            MetagpuError: if another agent runs here, or the configuration does not fit the GPUs
                found at start.
        """
        log.info("metagpu starts", version=__version__, config=self.config.file)
        async with control.controlled(self.places.run, {**self.commands, **self.handlers}):
            await serve(*self.tasks, reload=self.reload)

    @property
    def tasks(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        """What has to run side by side to serve the node.

        Health, offers, GPUs kept, leases, memory enforced, strangers told of, containers answered.
        """
        return (
            self.health.run,
            self._offer,
            self.keeper.run,
            self._leases,
            self.enforcer.run,
            self._strangers.run,
            self.inside.run,
        )

    @property
    def commands(self) -> Mapping[str, control.Handler]:
        """What the agent itself answers on the control socket."""
        return {"status": self._status, "acknowledge": self._acknowledge, "usage": self._usage}

    async def look(self) -> None:
        """Read the GPUs once and lay the configuration over them, without serving anything.

        Raises:
            DriverError: if NVML cannot be used.
            ConfigError: if the configuration does not fit the GPUs.
        """
        async with self.driver.session():
            await self.health.survey()
        await self._lay_out()

    async def reload(self) -> None:
        """Read the configuration again; one that is wrong is told, and the present one stays."""
        try:
            config = await to_thread.run_sync(configuration.load, self.config_file, self._kinds)
            await self._lay_out(config)
        except ConfigError as error:
            log.error("the configuration was not taken; the last good one stays", error=str(error))
        else:
            self.health.settings = config.envelope.health
            log.info("configuration read", config=config.file)

    def backend(self, resource: ResourceName) -> Backend:
        """Give the backend that cuts a resource, also while its endpoint is being taken down."""
        return self._backends[resource]

    async def _lay_out(self, config: configuration.Config | None = None) -> None:
        """Lay a configuration, the present one if none is given, over the GPUs known now.

        Raises:
            ConfigError: if it does not fit them; everything stays as it was.
        """
        async with self._laying:  # who comes second lays out what the first has made present
            root = self.places.dev_root
            nodes = await to_thread.run_sync(host.device_nodes, root)
            config = config or self.config
            gpus = [state.gpu for state in self.registry.snapshot.gpus.values()]
            pods = await self.inside.folder()
            base = Injection(
                dev_root=str(root or ""),
                present=nodes,
                pod_dir=str(pods.absolute()) if pods else "",
            )
            layout = lay_out(config, gpus, base)
            wire.check_size(layout, config.file)

            self._nodes, self.config, self.layout = nodes, config, layout
            self._backends.update(layout.backends)
            self.keeper.keep(layout)

    async def _offer(self) -> None:
        """Offer what the configuration makes of the GPUs, and go on when GPUs come."""
        await self.health.surveyed.wait()
        await self._lay_out()
        for resource, offer in self.registry.snapshot.offers.items():
            log.info("on offer", resource=resource, shares=len(offer.shares))

        # What is here now stays for the life of the process; no collection need look at it again.
        gc.freeze()

        async with anyio.create_task_group() as group:
            directory = kubelet_directory.KubeletDirectory(self.places.kubelet)
            group.start_soon(serve_offers, self.registry, directory, self.backend)
            group.start_soon(self._follow_nodes)

            with self.registry.news.subscribe(GpusFound) as news:
                async for _ in news:
                    await self._take_in_gpus()

    async def _follow_nodes(self) -> None:
        """Notice device nodes that come late, as nvidia-uvm's do with the first CUDA program."""
        while True:
            await anyio.sleep(NODES_PERIOD)
            if await to_thread.run_sync(host.device_nodes, self.places.dev_root) != self._nodes:
                await self._take_in_gpus()

    async def _take_in_gpus(self) -> None:
        try:
            await self._lay_out()
        except ConfigError as error:
            log.error("new GPUs are not offered", error=str(error))

    async def _leases(self) -> None:
        await self.health.surveyed.wait()
        await podresources.follow_leases(self.registry, self.places.pod_resources)

    async def _status(self, _: Mapping[str, Any]) -> object:
        return report.status(self.registry.snapshot, self.layout)

    async def _acknowledge(self, request: Mapping[str, Any]) -> object:
        gpu = report.gpu_named(self.registry.snapshot, str(request.get("gpu", "")))
        await self.health.acknowledge(gpu)
        return f"GPU {self.registry.snapshot.gpus[gpu].gpu} is back in service"

    async def _usage(self, _: Mapping[str, Any]) -> object:
        findings = await self._census.take()
        snapshot = self.registry.snapshot

        return {
            "version": __version__,
            "at": findings.at,
            "node": self._node,
            **usage_report.usage_report(snapshot, findings, self._rules),
            "enforcement": usage_report.tally_report(self.enforcer.tally, snapshot),
        }

    def _terms(self, gpu: GpuId) -> Enforcement:
        """Give what the pool of a GPU says about its memory; one in no pool is nobody's matter."""
        pools = {pool.name: pool.memory_enforcement for pool in self.config.envelope.pools}
        for assignment in self.layout.assignments:
            if assignment.gpu.id == gpu and assignment.pool in pools:
                return pools[assignment.pool]
        return Enforcement(policy=Policy.OFF)
