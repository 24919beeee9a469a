"""Offers to the kubelet and the leases it gives on them, from the first survey on."""

import gc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import anyio
import structlog
from anyio import to_thread

from metagpu.agent.config_loader import ConfigLoader
from metagpu.agent.context import NodeContext
from metagpu.agent.layout_manager import LayoutManager
from metagpu.agent.resource_claims import ResourceClaims
from metagpu.core.state.facts import EarlierLeases, GpusFound
from metagpu.core.usage.lease_differences import RunningHolders
from metagpu.core.usage.usage_service import UsageService
from metagpu.plugins.kubelet import checkpoint
from metagpu.plugins.kubelet.directory import KubeletDirectory
from metagpu.plugins.kubelet.endpoints import serve_offers
from metagpu.plugins.kubelet.pod_resources import UNREAD, LeaseFollower

log = structlog.get_logger()


@dataclass
class Offering:
    """Offers the layout's shares to the kubelet, and follows their leases.

    Attributes:
        running: tells which holders' containers run.
        wait_for_choice: waits for the configuration that the cluster chooses; `None` without an
            API server.
        claims_read: set once the leases of ResourceClaims have begun.
        leases_known: set once the leases that the kubelet gave earlier are known.
        ready: set once a kubelet that starts gets its lists at once.
    """

    context: NodeContext
    config_loader: ConfigLoader
    layout_manager: LayoutManager
    usage_service: UsageService
    running: RunningHolders
    resource_claims: ResourceClaims
    wait_for_choice: Callable[[], Awaitable[None]] | None
    claims_read: anyio.Event = field(default_factory=anyio.Event)
    ready: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.paths = self.context.paths
        self.registry = self.context.registry
        self.directory = KubeletDirectory(self.paths.kubelet_dir)
        self.lease_follower = LeaseFollower(
            self.registry,
            self.paths.pod_resources,
            directory=self.paths.kubelet_dir,
            node=self.context.node,
            timing=self.context.timing.kubelet,
            running=self.running,
            present=self.context.host.pods,
            requests_of=self.resource_claims.requests_of,
        )
        self.leases_known = self.lease_follower.known

    async def run(self) -> None:
        """Offer shares, also of GPUs that are added later."""
        await self.context.surveyed.wait()
        if self.wait_for_choice is not None:
            await self.wait_for_choice()
        await self.config_loader.settle()
        await self.layout_manager.begin()
        for resource, offer in self.registry.snapshot.offers.items():
            log.info("resource offered", resource=resource, shares=len(offer.shares))

        # The present objects stay for the life of the process; no collection scans them again.
        gc.freeze()

        # A pool may have had DRA before: the kubelet would give what claims hold to other pods.
        await self.claims_read.wait()
        # Pods may hold GPUs by an earlier configuration. That is known in a moment, and a list
        # without the shares that wait for it would lower the Node's amounts meanwhile.
        with anyio.move_on_after(self.context.timing.first_leases):
            await self.leases_known.wait()

        async with anyio.create_task_group() as group:
            group.start_soon(
                partial(
                    serve_offers,
                    self.registry,
                    self.directory,
                    self.layout_manager.backend,
                    self.context.call_stats,
                    ensure_cdi_names=self.layout_manager.cdi_file.ensure_names,
                    pod_resources=self.paths.pod_resources,
                    timing=self.context.timing.kubelet,
                )
            )
            group.start_soon(self.layout_manager.follow_nodes)
            self.ready.set()

            with self.registry.events.subscribe(GpusFound) as events:
                async for _ in events:
                    await self.config_loader.settle()
                    await self.layout_manager.reapply()

    async def follow_leases(self) -> None:
        """Observe the leases, by the kubelet's checkpoint and PodResources service."""
        self.registry.apply(EarlierLeases(UNREAD))
        await self.context.surveyed.wait()
        promised = await to_thread.run_sync(checkpoint.read_promised_memory, self.paths.kubelet_dir)
        self.usage_service.set_promised_memory(promised)
        async with anyio.create_task_group() as group:
            group.start_soon(self._begin_claims)
            with anyio.move_on_after(self.context.timing.first_leases):
                await self.claims_read.wait()
            await self.lease_follower.run()

    async def _begin_claims(self) -> None:
        await self.resource_claims.read_leases()
        self.claims_read.set()


log = structlog.get_logger()
