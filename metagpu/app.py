"""The composition root: from settings to a running agent."""

import gc
import os
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import structlog
from anyio import to_thread

from metagpu import __version__, host
from metagpu.adoption import Adoption
from metagpu.companions import HostCompanions
from metagpu.core import report
from metagpu.core.backend import installed_backends
from metagpu.core.companions import Companions
from metagpu.core.config import Config, parse
from metagpu.core.driver import Driver
from metagpu.core.endurance import enduring
from metagpu.core.facts import BackendSuspended, GpusFound
from metagpu.core.health import HealthWatch
from metagpu.core.host import Host
from metagpu.core.keeper import Keeper
from metagpu.core.layout import Layout
from metagpu.core.oversight import Oversight, terms_in
from metagpu.core.parts import Parts
from metagpu.core.profiles import Instruction
from metagpu.core.registry import Registry
from metagpu.core.server import serve
from metagpu.core.tools import Tools
from metagpu.inside import Inside
from metagpu.laying import Laying
from metagpu.orders import Orders
from metagpu.places import Places
from metagpu.plugins import checkpoint, control, kubelet_directory, podresources
from metagpu.plugins.cdi_file import CdiFile
from metagpu.plugins.cluster import Cluster, Feature, Outcome, Settings
from metagpu.plugins.endpoints import serve_offers
from metagpu.plugins.metrics.address import Address
from metagpu.plugins.record import KubeletRecord
from metagpu.sources import Source
from metagpu.tools import DRIVER_ROOT, HostTools

if TYPE_CHECKING:
    from metagpu.plugins.metrics.exporter import Exporter

FIRST_LOOK: Final = 1.0
"""Seconds that the offer of GPUs that are cut in several ways waits to hear who holds what."""

log = structlog.get_logger()


@dataclass
class Agent:
    """One node's agent: a registry, those who tell it facts, and those who offer what it holds.

    Attributes:
        source: where the configuration is; read at start, when a file changes, and at a reload.
        handlers: control commands beside the agent's own.
        tools: programs of the host; those of this one unless given.
        companions: likewise those that run for long.
        host: processes of the host; those of this one unless given.
        joins: what of the API server is used, `None` for nothing.
        metrics: where monitoring may ask, `None` for nowhere.
        settle: seconds from a grant to the look that finds its pod, as usual unless given.
    """

    source: Source
    driver: Driver
    places: Places = field(default_factory=Places)
    handlers: Mapping[str, control.Handler] = field(default_factory=dict)
    registry: Registry = field(default_factory=Registry)
    tools: Tools | None = None
    companions: Companions | None = None
    host: Host | None = None
    joins: Settings | None = None
    metrics: Address | None = None
    settle: float | None = None

    def __post_init__(self) -> None:
        self._kinds = installed_backends()
        asked = self.joins is not None and Feature.CONFIG in self.joins.features
        publish = self.registry.news.publish
        self.adoption = Adoption(
            self.source, self._kinds, self._adopt, patient=asked, publish=publish
        )
        self.cluster = Cluster(self.joins, self.registry, self._follow) if self.joins else None
        config = self.adoption.loaded.config
        self.health = HealthWatch(self.driver, self.registry, config.envelope.health)
        self.orders = Orders(self.registry, self.health)
        roots = [root for root in (self.places.dev_root, DRIVER_ROOT) if root is not None]
        own = HostTools(tuple(roots))
        tools, companions = self.tools or own, self.companions or HostCompanions(own)
        self.keeper = Keeper(self.registry, self.driver, tools, companions)
        look = partial(host.device_nodes, self.places.dev_root)
        self.cdi = CdiFile(self.registry, self.driver, tools, self.places.cdi, look)
        self.host = self.host or host.LinuxHost()
        self.oversight = Oversight(
            self.driver,
            self.host,
            self.registry,
            lambda gpu: terms_in(self.config, self.layout, gpu),
            {name: kind.guard for name, kind in self._kinds.items()},
            given=partial(to_thread.run_sync, checkpoint.read_given, self.places.kubelet),
        )
        self._node = os.environ.get("NODE_NAME") or socket.gethostname()
        self.inside = Inside(
            self.places.pods,
            self._node,
            self.host,
            self.oversight.report_to,
            lambda: self.config.envelope.mgctl.in_pods,
        )
        self.parts = Parts()
        self.record = KubeletRecord()
        self.exporter = self._exporter(self.metrics) if self.metrics else None
        self.laying = Laying(config, self.registry, self.keeper, self.cdi, self.inside, self.places)
        self._looked = anyio.Event()

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.laying.config

    @property
    def layout(self) -> Layout:
        """What it makes of the GPUs."""
        return self.laying.layout

    async def run(self) -> None:
        """Serve the node until a signal says stop.

        Raises:
            MetagpuError: if another agent runs here, or the configuration does not fit the GPUs
                found at start.
        """
        form = ", ".join(self.adoption.loaded.formats) or "default"
        log.info("metagpu starts", version=__version__, config=self.config.file, form=form)

        async with control.controlled(self.places.run, {**self.commands, **self.handlers}):
            await serve(*self.tasks, reload=self.reload)

    @property
    def tasks(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        """What has to run side by side to serve the node.

        Health, offers, GPUs kept, leases, memory enforced, strangers told of, files followed,
        containers answered, CDI's names kept, and monitoring and the cluster's side where there
        are any. Who counts news comes first, so that none is missed.
        """
        main = {
            "health": self.health.run,
            "offers": self._offer,
            "keeper": self.keeper.run,
            "leases": self._leases,
        }
        return (
            *((self.exporter.run,) if self.exporter else ()),
            *(self.parts.noted(name, work) for name, work in main.items()),
            *self.oversight.tasks,
            partial(enduring, self.adoption.follow_files, "following of files"),
            partial(enduring, self.inside.run, "mgctl in containers"),
            partial(enduring, self.cdi.run, "CDI specification"),
            *((self.cluster.run,) if self.cluster else ()),
        )

    @property
    def commands(self) -> Mapping[str, control.Handler]:
        """What the agent itself answers on the control socket."""
        return {
            "status": self._status,
            "plan": self._plan,
            "usage": self._usage,
            **self.orders.by_name,
        }

    async def look(self) -> None:
        """Read the GPUs once and lay the configuration over them, without serving anything.

        Raises:
            DriverError: if NVML cannot be used.
            ConfigError: if the configuration does not fit the GPUs.
        """
        async with self.driver.session():
            await self.health.survey()
        layout = await self.laying.laid_out(self.config)
        self.registry.apply(layout.offered)
        for cut in layout.cuts:
            if why := cut.backend.foreseen(cut.gpu):
                fact = BackendSuspended(cut.gpu.id, cut.backend.name, why, time.time())
                self.registry.apply(fact)

    async def reload(self) -> None:
        """Read the configuration again; one that is wrong is told, and the present one stays."""
        await self.adoption.reload()

    async def _adopt(self, config: Config) -> None:
        await self.laying.lay_out(config)
        self.health.settings = config.envelope.health

    async def _follow(self, told: Instruction) -> Outcome:
        """Take what the cluster says, once there are GPUs to lay it over."""
        await self.health.surveyed.wait()
        return await self.adoption.follow(told)

    async def _offer(self) -> None:
        """Offer what the configuration makes of the GPUs, and go on when GPUs come."""
        await self.health.surveyed.wait()
        if self.cluster is not None:
            await self.cluster.chooser.decision()
        await self.laying.lay_out()
        for resource, offer in self.registry.snapshot.offers.items():
            log.info("on offer", resource=resource, shares=len(offer.shares))

        # What is here now stays for the life of the process; no collection need look at it again.
        gc.freeze()

        if any(state.contended for state in self.registry.snapshot.gpus.values()):
            # A pod of before may hold what another would be given: a kubelet that is up says so
            # at once, and where none is up there is nobody to give it to.
            with anyio.move_on_after(FIRST_LOOK):
                await self._looked.wait()

        async with anyio.create_task_group() as group:
            directory = kubelet_directory.KubeletDirectory(self.places.kubelet)
            describe = self.cdi.describe
            offers = partial(
                serve_offers, self.registry, directory, self.laying.backend, self.record
            )
            group.start_soon(partial(offers, describe=describe))
            group.start_soon(self.laying.follow_nodes)

            with self.registry.news.subscribe(GpusFound) as news:
                async for _ in news:
                    await self.laying.again()

    async def _leases(self) -> None:
        await self.health.surveyed.wait()
        told = await to_thread.run_sync(checkpoint.read_told, self.places.kubelet)
        self.oversight.remember(told)
        socket = self.places.pod_resources
        await podresources.follow_leases(
            self.registry,
            socket,
            looked=self._looked,
            directory=self.places.kubelet,
            node=self._node,
            settle=self.settle,
        )

    async def _status(self, _: Mapping[str, Any]) -> object:
        return {
            **report.status(self.registry.snapshot, self.layout),
            "enforcement": self.oversight.tally,
            "lost": self.oversight.lost,
            "configuration": self.adoption.report(),
            "cluster": self.cluster.report() if self.cluster else None,
            "cdi": self.cdi.report(),
        }

    async def _plan(self, request: Mapping[str, Any]) -> object:
        """Say what a configuration, as text of ours, would change if it were taken now."""
        text, file = str(request.get("text", "")), str(request.get("file", "<request>"))
        config = await to_thread.run_sync(parse, text, file, self._kinds)
        # In a thread: a plan of very many shares must not keep the kubelet waiting.
        return await to_thread.run_sync(self.laying.planned, config)

    def _exporter(self, address: Address) -> "Exporter":
        """Make what monitoring asks: the libraries for it are loaded for who wants it alone."""
        from metagpu.plugins.metrics.exporter import Exporter  # noqa: PLC0415 - as said
        from metagpu.plugins.metrics.sources import Driver, Sources  # noqa: PLC0415

        sources = Sources(
            registry=self.registry,
            kubelet=self.record,
            kinds=[it for backend in self._kinds.values() for it in backend.tells],
            rules=self.oversight.rules,
            layout=lambda: self.layout,
            findings=self.oversight.latest,
            configuration=self.adoption.measured,
            driver=lambda: Driver(self.health.unusable, len(self.driver.overdue)),
            driver_limits=lambda: self.oversight.driver_limits,
            cluster=lambda: self.cluster.report() if self.cluster else None,
            ended=lambda: self.parts.ended,
        )
        return Exporter(address, sources)

    async def _usage(self, _: Mapping[str, Any]) -> object:
        return {
            "version": __version__,
            "node": self._node,
            **await self.oversight.report(),
        }
