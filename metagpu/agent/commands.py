"""The agent's own commands on the control socket: status, plan, usage.

The status has the capabilities of this process too, beside those that the configuration needs.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
import structlog
from anyio import to_thread
from msgspec.structs import asdict, replace

from metagpu import __version__
from metagpu.agent.config_loader import ConfigLoader
from metagpu.agent.context import NodeContext
from metagpu.agent.exchange import read_standby
from metagpu.agent.layout_manager import LayoutManager
from metagpu.core.config.config import parse
from metagpu.core.contracts.host import StartingContainer
from metagpu.core.errors import InternalError
from metagpu.core.model.privileges import Privilege
from metagpu.core.reports.diagnosis import needed_privileges, privileges_report
from metagpu.core.reports.schema.daemon import (
    DraReport,
    EventReport,
    PrivilegeReport,
    StandbyReport,
)
from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.reports.schema.usage import NodeReports, UsageReport
from metagpu.core.reports.status import explain_report, lease_reports, roots_report
from metagpu.core.usage.report import without_processes
from metagpu.core.usage.usage_service import UsageService
from metagpu.host.linux import held_privileges
from metagpu.plugins.control.socket import CommandHandler
from metagpu.plugins.pod_api.server import PodMgctlServer

if TYPE_CHECKING:
    from metagpu.plugins.cluster.cluster import Cluster


READY_WITHIN: Final = 9.0
"""Seconds for a container that starts: less than its hook waits at most (mgctl/hook.c)."""

log = structlog.get_logger()


class PrivilegeCheck:
    """Knows which capabilities this process holds, once they are read."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._held: frozenset[Privilege] = frozenset()

    async def run(self) -> None:
        """Read the capabilities of this process, and warn of each one that is missing."""
        self._held = await to_thread.run_sync(held_privileges)
        for privilege, uses in self._needed.items():
            if uses and privilege not in self._held:
                fix = "add it to the container's capabilities, or leave these features out"
                log.warning("capability missing", capability=privilege, needed_for=uses, fix=fix)

    def report(self) -> dict[str, PrivilegeReport]:
        """Return for each capability whether it is held, and what needs it."""
        return privileges_report(self._needed, self._held)

    @property
    def _needed(self) -> Mapping[Privilege, list[str]]:
        return needed_privileges(self._context.config, self._context.addresses.ports)


@dataclass
class AgentCommands:
    """Answers what an operator asks about the node.

    Attributes:
        cluster: the API server's side, `None` without one.
        privileges: reports the capabilities, held and needed.
        resource_claims: reports the DRA driver, `None` where no pool has it.
        recent_events: returns the last events of the node, for viewers.
        ready: set once GPUs, configuration and leases are known.
        read_leases: asks the kubelet for the leases that it has given by now.
    """

    context: NodeContext
    layout_manager: LayoutManager
    config_loader: ConfigLoader
    usage_service: UsageService
    pod_server: PodMgctlServer
    cluster: "Cluster | None"
    privileges: Callable[[], dict[str, PrivilegeReport]]
    resource_claims: Callable[[], DraReport | None]
    recent_events: Callable[[], Sequence[EventReport]]
    ready: anyio.Event
    read_leases: Callable[[], Awaitable[None]]

    @property
    def by_name(self) -> Mapping[str, CommandHandler]:
        """The handlers of the commands, by name."""
        return {
            "status": self.status,
            "plan": self.plan,
            "usage": self.usage,
            "container-starting": self.container_starting,
        }

    @property
    def reports(self) -> NodeReports:
        """The reports for viewers."""

        async def status() -> StatusReport:
            report = await self.status({})
            return replace(
                report,
                version=__version__,
                node=self.context.node,
                events=list(self.recent_events()),
            )

        async def usage() -> UsageReport:
            return without_processes(await self.usage({}))

        return NodeReports(status, usage)

    async def status(self, _: Mapping[str, Any]) -> StatusReport:
        """Return the state of the node and of every part of the daemon."""
        standby = await to_thread.run_sync(read_standby, self.context.paths.run_dir)
        roots = await to_thread.run_sync(self.context.find_roots)
        snapshot, layout = self.context.registry.snapshot, self.context.layout
        # In a thread: a report of very many shares must not keep the kubelet waiting.
        explained, leases = await to_thread.run_sync(
            lambda: (explain_report(snapshot, layout), lease_reports(snapshot))
        )
        return StatusReport(
            **asdict(explained),
            leases=leases,
            enforcement=self.usage_service.enforcement_report,
            lease_differences=[
                difference.report() for difference in self.usage_service.lease_differences
            ],
            mixed_requests=self.usage_service.mixed_requests,
            lost_devices=self.usage_service.lost_devices,
            configuration=self.config_loader.report(),
            cluster=self.cluster.report() if self.cluster else None,
            dra=self.resource_claims(),
            cdi=self.layout_manager.cdi_file.report(),
            ended_tasks=dict(self.context.main_tasks.problems),
            privileges=self.privileges(),
            driver_roots=roots_report(roots),
            mgctl=self.pod_server.report(),
            standby=StandbyReport(standby.version, list(standby.problems)) if standby else None,
        )

    async def plan(self, request: Mapping[str, Any]) -> object:
        """Return what a configuration, given as metagpu/v1 text, would change.

        Raises:
            ConfigError: if the text is no configuration.
        """
        text, file = str(request.get("text", "")), str(request.get("file", "<request>"))
        config = await to_thread.run_sync(parse, text, file, self.context.backends)
        existing = await self.layout_manager.read_existing(config)
        # In a thread: a plan of very many shares must not keep the kubelet waiting.
        plan = partial(self.layout_manager.plan, config, existing=existing)
        return await to_thread.run_sync(plan)

    async def container_starting(self, request: Mapping[str, Any]) -> object:
        """Name and limit a container, by the state that its runtime gives to our hook.

        A daemon that has just started does not know yet which limits containers need.

        Raises:
            MetagpuError: the container has not what it needs in time.
        """
        state = msgspec.convert(request.get("state"), StartingContainer)
        with anyio.move_on_after(READY_WITHIN):
            await self.ready.wait()
            return await self.usage_service.container_starting(state, self.read_leases)
        raise InternalError("metagpu has just started, and does not know the GPUs and leases yet")

    async def usage(self, _: Mapping[str, Any]) -> UsageReport:
        """Return the usage of the node's GPUs, by container."""
        report = await self.usage_service.report()
        return replace(report, version=__version__, node=self.context.node)
