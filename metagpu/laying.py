"""The configuration in force, laid over the GPUs and device nodes that there are."""

from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import structlog
from anyio import to_thread

from metagpu import host
from metagpu.core import plan
from metagpu.core.backend import Backend
from metagpu.core.config import Config
from metagpu.core.errors import CdiError, ConfigError
from metagpu.core.injection import Injection
from metagpu.core.keeper import Keeper
from metagpu.core.layout import Layout, lay_out
from metagpu.core.model import ResourceName
from metagpu.core.registry import Registry
from metagpu.host import DeviceNodes
from metagpu.inside import Inside
from metagpu.places import Places
from metagpu.plugins import wire
from metagpu.plugins.cdi_file import CdiFile

NODES_PERIOD: Final = 10.0
"""Seconds between two looks at the host's device nodes."""

log = structlog.get_logger()


@dataclass(eq=False)
class Laying:
    """Lays a configuration over the GPUs known now, and has the keeper keep what comes of it.

    Attributes:
        config: the one in force; one that does not fit the GPUs never is.
        layout: what it makes of them.
    """

    config: Config
    registry: Registry
    keeper: Keeper
    cdi: CdiFile
    inside: Inside
    places: Places
    layout: Layout = field(default_factory=lambda: Layout((), {}, ()))
    _nodes: DeviceNodes = field(default_factory=DeviceNodes)
    _pods: str = ""
    _backends: dict[ResourceName, Backend] = field(default_factory=dict)
    _turn: anyio.Lock = field(default_factory=anyio.Lock)

    def backend(self, resource: ResourceName) -> Backend:
        """Give the backend that cuts a resource, also while its endpoint is being taken down."""
        return self._backends[resource]

    async def lay_out(self, config: Config | None = None) -> None:
        """Lay a configuration, the present one if none is given, over the GPUs known now.

        Raises:
            ConfigError: if it does not fit them; everything stays as it was.
        """
        async with self._turn:  # who comes second lays out what the first has made present
            self.keeper.keep(await self.laid_out(config or self.config))

    async def laid_out(self, config: Config) -> Layout:
        """Take a configuration for the present one, without having anything kept.

        Raises:
            ConfigError: if it does not fit the GPUs; everything stays as it was.
        """
        nodes = await self._device_nodes()
        pods = await self.inside.folder()
        self._pods = str(pods.absolute()) if pods else ""
        layout = self._laid(config, nodes)
        try:
            await self.cdi.keep(config.envelope.injection(self._injection(nodes)))
        except CdiError as error:
            problem, path = str(error), "deviceListStrategy"
            raise ConfigError(problem, file=config.file, path=path) from error

        self._nodes, self.config, self.layout = nodes, config, layout
        self._backends.update(layout.backends)
        return layout

    async def again(self) -> None:
        """Lay the present configuration over GPUs and device nodes that came; log what is wrong."""
        try:
            await self.lay_out()
        except ConfigError as error:
            log.error("new GPUs are not offered", error=str(error))
        except Exception:
            log.exception("new GPUs are not offered, by a fault of metagpu's own")

    async def follow_nodes(self) -> None:
        """Notice device nodes that come late, as nvidia-uvm's do with the first CUDA program."""
        while True:
            await anyio.sleep(NODES_PERIOD)
            if await self._device_nodes() != self._nodes:
                await self.again()

    def planned(self, config: Config, before: plan.State | None = None) -> dict[str, Any]:
        """Say what a configuration would make of the GPUs known now, against this or a state.

        Raises:
            ConfigError: if it does not fit them.
        """
        before = before or plan.State(self.layout, self.config)
        after = plan.State(self._laid(config, self._nodes), config)
        return plan.told(plan.compare(self.registry.snapshot, before, after))

    async def _device_nodes(self) -> DeviceNodes:
        return await to_thread.run_sync(host.device_nodes, self.places.dev_root)

    def _laid(self, config: Config, nodes: DeviceNodes) -> Layout:
        """Lay a configuration over the GPUs known now and some device nodes; change nothing.

        Raises:
            ConfigError: if it does not fit them.
        """
        gpus = [state.gpu for state in self.registry.snapshot.gpus.values()]
        layout = lay_out(config, gpus, self._injection(nodes))
        wire.check_size(layout, config.file)
        return layout

    def _injection(self, nodes: DeviceNodes) -> Injection:
        """Say what this host has for containers; the configuration's choices come on top."""
        return Injection(
            dev_root=str(self.places.dev_root or ""),
            present=nodes.present,
            capabilities=nodes.capabilities,
            run_dir=str(self.places.run.absolute()),
            pod_dir=self._pods,
        )
