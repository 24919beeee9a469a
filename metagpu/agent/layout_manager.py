"""The configuration in force, applied to the GPUs and device nodes of this host."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import anyio
import msgspec
import structlog
from anyio import to_thread

from metagpu.agent.cdi_file import CdiFile
from metagpu.agent.context import NodeContext
from metagpu.core.config.config import Config
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.contracts.backend import Backend
from metagpu.core.contracts.capabilities import DiagnosesGpu, OffersExisting
from metagpu.core.contracts.driver import read_instances
from metagpu.core.errors import CdiError, DriverError
from metagpu.core.grants.cdi import HOOK_NAME
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.backend_runner import BackendRunner, find_left
from metagpu.core.layout.checks import check_fit
from metagpu.core.layout.diff import ConfiguredLayout, diff_layouts, to_dict
from metagpu.core.layout.layout import Layout, build_layout
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.mig import MigInstance
from metagpu.core.model.offers import Api
from metagpu.core.model.shares import ResourceName
from metagpu.core.state.events import LayoutApplied
from metagpu.core.state.facts import BackendSuspended, GpusFound
from metagpu.host.device_nodes import DeviceNodes
from metagpu.plugins.control.client import SOCKET_NAME
from metagpu.plugins.kubelet.messages import check_list_size
from metagpu.plugins.pod_api.server import PodFolder

log = structlog.get_logger()

Existing = Mapping[GpuId, Sequence[MigInstance]]
"""The MIG instances of GPUs, where a configuration offers what is there."""


@dataclass(eq=False)
class LayoutManager:
    """The one entry for a configuration: `apply` puts it in force on this node.

    A configuration that does not fit the GPUs never is in force.
    """

    context: NodeContext
    backend_runner: BackendRunner
    cdi_file: CdiFile
    pod_folder: PodFolder
    _nodes: DeviceNodes = field(default_factory=DeviceNodes)
    _pod_dir: str = ""
    _existing: Existing = field(default_factory=dict)
    _backends: dict[ResourceName, Backend] = field(default_factory=dict)
    _lock: anyio.Lock = field(default_factory=anyio.Lock)
    _begun: bool = False

    def backend(self, resource: ResourceName) -> Backend:
        """Return a resource's backend, also while the resource's endpoint stops."""
        return self._backends[resource]

    async def begin(self) -> None:
        """Apply the present configuration to this node, as far as its GPUs can have it.

        There is none to keep instead. From now on `apply` changes the node.

        Raises:
            ConfigError: if the CDI specification cannot be written.
        """
        self._begun = True
        context = self.context
        gpus = [state.gpu for state in context.registry.snapshot.gpus.values()]
        run_dir = str(context.paths.run_dir.absolute())
        left = await find_left(context.backends, gpus, run_dir, context.daemons)
        self.backend_runner.adopt(left)
        await self.apply()

    async def apply(self, config: Config | None = None) -> None:
        """Apply a configuration, by default the present one, and run its backends.

        Before `begin`, the node is not changed: the configuration is checked, and kept for it.

        Raises:
            ConfigError: if it does not fit the GPUs; everything stays as it was.
        """
        if not self._begun:
            layout = await self.check(config)
            self._log_misfits(layout)
            self.context.in_force.replace(config or self.context.config, layout)
            return
        async with self._lock:  # a caller that waited here applies to what the first one left
            self.backend_runner.apply(await self.prepare(config))
            self.context.registry.events.publish(LayoutApplied())

    async def check(self, config: Config | None = None) -> Layout:
        """Check that a configuration, by default the present one, fits the GPUs.

        Returns:
            The layout that it would give.

        Raises:
            ConfigError: if it does not.
        """
        config = config or self.context.config
        nodes, existing = await self._scan_nodes(), await self.read_existing(config)
        layout = await to_thread.run_sync(self._lay_out, config, nodes, existing)
        check_fit(config, layout.misfits)
        return layout

    async def prepare(self, new: Config | None = None) -> Layout:
        """Put a configuration in force without running any backend, as `apply` does.

        Raises:
            ConfigError: if it does not fit the GPUs; everything stays as it was.
        """
        config = new or self.context.config
        await self._read_modes()
        nodes = await self._scan_nodes()
        pod_dir = await self.pod_folder.prepare()
        self._pod_dir = str(pod_dir.absolute()) if pod_dir else ""
        existing = await self.read_existing(config)
        # In a thread: thousands of shares must not keep the kubelet waiting.
        layout = await to_thread.run_sync(self._lay_out, config, nodes, existing)
        if new is not None:
            check_fit(new, layout.misfits)
        try:
            injection = config.root.injection(self._injection(nodes))
            by_claims = any(pool.api is Api.DRA for pool in config.root.pools)
            await self.cdi_file.update(injection.by_own_cdi if by_claims else injection)
        except CdiError as error:
            problem, path = str(error), "pools" if by_claims else "deviceListStrategy"
            raise ConfigError(
                problem, ConfigReason.NOT_WRITTEN, file=config.file, path=path
            ) from error

        self._log_misfits(layout)
        self.context.in_force.replace(config, layout)
        self._nodes = nodes
        self._existing = existing
        self._backends.update(layout.backends)
        return layout

    async def show(self) -> None:
        """Put the shares on offer in the registry as they would be, without any backend.

        Raises:
            ConfigError: if the configuration does not fit the GPUs.
        """
        registry, layout = self.context.registry, await self.prepare()
        registry.apply(layout.offer_fact)
        for each in layout.backend_assignments:
            gpu, backend = each.gpu, each.backend
            if isinstance(backend, DiagnosesGpu) and (problem := backend.expected_problem(gpu)):
                registry.apply(BackendSuspended(gpu.id, backend.name, problem, time.time()))

    def _log_misfits(self, layout: Layout) -> None:
        """Log the GPUs that can have nothing of their pool, once each."""
        for misfit in layout.misfits:
            if misfit not in self.context.layout.misfits:
                log.warning("configuration does not fit some gpus", reason=str(misfit))

    async def reapply(self) -> None:
        """Apply the present configuration to new GPUs and device nodes; log what fails."""
        try:
            await self.apply()
        except ConfigError as error:
            log.error("layout of new gpus failed", error=str(error))
        except Exception:
            log.exception("layout of new gpus failed, by a fault of metagpu's own")

    async def follow_nodes(self) -> None:
        """Apply the configuration again when device nodes come or go, until cancelled."""
        while True:
            await anyio.sleep(self.context.timing.device_nodes)
            if await self._scan_nodes() != self._nodes:
                await self.reapply()

    def plan(
        self,
        config: Config,
        before: ConfiguredLayout | None = None,
        existing: Existing = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Return the changes that a configuration would make, to this one or `before`.

        `existing` are the present MIG instances, where the configuration offers them.

        Raises:
            ConfigError: if it does not fit the GPUs.
        """
        before = before or ConfiguredLayout(self.context.layout, self.context.config)
        after = ConfiguredLayout(self._lay_out(config, self._nodes, existing), config)
        check_fit(config, after.layout.misfits)
        return to_dict(diff_layouts(self.context.registry.snapshot, before, after))

    async def _read_modes(self) -> None:
        """Read the MIG modes: metagpu may have changed one since the last survey.

        Otherwise a GPU that the layout before has divided would be offered whole.
        """
        registry, changed = self.context.registry, []
        for state in registry.snapshot.gpus.values():
            if (gpu := state.gpu).mig_enabled is None or not state.verdict.healthy:
                continue
            with suppress(DriverError):
                mode = await self.context.driver.mig.mode(gpu.id)
                if mode is not None and mode.enabled != gpu.mig_enabled:
                    changed.append(msgspec.structs.replace(gpu, mig_enabled=mode.enabled))
        if changed:
            registry.apply(GpusFound(tuple(changed), time.time()))

    async def _scan_nodes(self) -> DeviceNodes:
        return await to_thread.run_sync(self.context.read_device_nodes)

    async def read_existing(self, config: Config) -> Existing:
        """Read the MIG instances that exist, if a backend offers them."""
        pools = config.build_backends(config.root.injection(Injection()))
        if not any(
            isinstance(backend, OffersExisting) and backend.offers_existing
            for _, backends in pools
            for backend in backends
        ):
            return {}
        gpus = self.context.registry.snapshot.gpus
        divided = [gpu for gpu, state in gpus.items() if state.gpu.mig_enabled]
        found: dict[GpuId, Sequence[MigInstance]] = {}
        for gpu, answer in (await read_instances(self.context.driver.mig, divided)).items():
            if isinstance(answer, DriverError):
                log.warning("mig instances not read", gpu=str(gpus[gpu].gpu), error=str(answer))
                found[gpu] = self._existing.get(gpu, ())
            else:
                found[gpu] = answer
        return found

    def _lay_out(self, config: Config, nodes: DeviceNodes, existing: Existing) -> Layout:
        """Compute the layout of a configuration on the GPUs known now; change nothing.

        Raises:
            ConfigError: if it does not fit the GPUs.
        """
        gpus = [state.gpu for state in self.context.registry.snapshot.gpus.values()]
        layout = build_layout(config, gpus, self._injection(nodes), existing)
        check_list_size(layout, config.file)
        return layout

    def _injection(self, nodes: DeviceNodes) -> Injection:
        """Describe this host's part of an injection, without the configuration's part."""
        run_dir = self.context.paths.run_dir.absolute()
        hook = (f"{self._pod_dir}/{HOOK_NAME}", str(run_dir / SOCKET_NAME))
        return Injection(
            dev_root=nodes.root,
            device_nodes_present=nodes.present,
            capabilities=nodes.capabilities,
            run_dir=str(run_dir),
            pod_dir=self._pod_dir,
            # A hook that cannot be started fails every container.
            start_hook=hook if self.pod_folder.runs_programs else (),
        )
