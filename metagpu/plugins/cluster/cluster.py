"""The composition of all features that use the API server.

The kubelet's requests never wait for anything here: these features run beside, on what the registry
knows. An API server that does not answer costs a line in the log. The client library is loaded only
when this runs.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import structlog
from anyio import to_thread
from msgspec import UNSET

from metagpu.core.contracts.programs import RunCommand
from metagpu.core.reports.schema.daemon import ClusterReport
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.config_follower import ConfigFollower
from metagpu.plugins.cluster.connection import ClusterContext, LastingParts, NodeConnection
from metagpu.plugins.cluster.event_recorder import PER_POD, EventReason, EventRecorder
from metagpu.plugins.cluster.events import GpuEventFeed, NodeEvents
from metagpu.plugins.cluster.node_object import allocatable_of, stale_allocatable
from metagpu.plugins.cluster.node_status import DriverUpgradeFollower, NodeCordonFollower
from metagpu.plugins.cluster.pods import (
    CompetingPod,
    CompetingPodWatch,
    describe_competing_pod,
)
from metagpu.plugins.cluster.refusals import RefusalMatcher
from metagpu.plugins.cluster.settings import Feature

if TYPE_CHECKING:
    from types import ModuleType

log = structlog.get_logger()


class Cluster:
    """This node at the API server, while `run` runs.

    Attributes:
        parts: the parts that outlive a connection.
        connection: the present connection, `None` before the first.
    """

    connection: NodeConnection | None = None

    def __init__(self, context: ClusterContext, run_command: RunCommand) -> None:
        settings, registry = context.settings, context.registry
        features, timing = settings.features, settings.timing
        self._context = context
        self._run_command = run_command
        self._began: float | None = None
        instance = f"metagpu-{settings.node}"  # deploy/admission-policy.yaml requires this name
        events = NodeEvents(
            settings.node, EventRecorder(instance, timing), enabled=Feature.EVENTS in features
        )
        pod_events = EventRecorder(instance, timing, name=Feature.POD_EVENTS, per_subject=PER_POD)
        self.parts = LastingParts(
            config_follower=ConfigFollower(
                settings, registry, context.follow, context.outcome, events.record
            ),
            upgrade_follower=(
                DriverUpgradeFollower(registry, events.record)
                if settings.drain_on_driver_upgrade
                else None
            ),
            cordons=NodeCordonFollower(registry),
            competing_pods=CompetingPodWatch(
                registry, partial(_record_competing_pod, registry, events)
            ),
            node_events=events,
            pod_events=pod_events if Feature.POD_EVENTS in features else None,
            gpu_events=GpuEventFeed(registry),
            refusals=RefusalMatcher(),
        )

    @property
    def preparation_problem(self) -> str:
        """Return why a daemon is not ready to serve the node, empty without a reason."""
        node = self.connection.node if self.connection else None
        if node is None or not node.known:
            return (node.problem if node else "") or "it has not answered yet"
        follower = self.parts.config_follower
        if Feature.CONFIG in self._context.settings.features and not follower.decided.is_set():
            return follower.problem or "the node's profile is not known yet"
        return ""

    def shows_shares(self) -> bool:
        """Return whether the Node, as read last, shows more than metagpu writes."""
        node = self.connection.node.object if self.connection else None
        if node is None or Feature.ALLOCATABLE not in self._context.settings.features:
            return False
        return bool(stale_allocatable(node, allocatable_of(self._context.registry.snapshot)))

    async def wait_for_choice(self) -> None:
        """Wait until the Node's labels are followed, for `choice_timeout` at most.

        The time counts from the first attempt to reach the API server.
        """
        settings, parts = self._context.settings, self.parts
        waited = anyio.current_time() - self._began if self._began is not None else 0.0
        left = max(0.0, settings.choice_timeout - waited)
        async with anyio.create_task_group() as group:
            group.start_soon(parts.config_follower.wait_for_choice, left)
            # What follows the Node begins with the node: an API server that answers is waited for.
            known = self.connection is not None and self.connection.node.known
            with anyio.move_on_after(settings.choice_timeout if known else left):
                if parts.upgrade_follower is not None:
                    await parts.upgrade_follower.decided.wait()
                if Feature.CORDON in settings.features:
                    await parts.cordons.decided.wait()

    async def run(self) -> None:
        """Run all features in use until cancelled; a failure here ends nothing else."""
        delay, self._began = self._context.settings.timing.restart_delay, anyio.current_time()

        while True:
            try:
                await self._run_connected()
            except Exception:
                log.exception("cluster features failed; restarting", after=f"{delay:g}s")
            await anyio.sleep(delay)

    async def _run_connected(self) -> None:
        settings, registry = self._context.settings, self._context.registry
        library = await to_thread.run_sync(_load_client)
        kubeconfig, timing = settings.kubeconfig, settings.timing

        async with library.open_client(kubeconfig, self._run_command, timing) as client:
            self.connection = NodeConnection(client, self._context, self.parts)
            try:
                await self.connection.run()
            finally:
                stays = not self._context.taken.is_set() or registry.snapshot.hands_over
                if settings.remove_labels and not stays:
                    with anyio.move_on_after(timing.shutdown_timeout, shield=True):
                        await self.connection.remove()

    def report(self) -> ClusterReport:
        """Return the state of each feature: its problem, or an empty string."""
        settings, parts, connection = self._context.settings, self.parts, self.connection
        found = connection.problems() if connection else {}
        offers = list(self._context.registry.snapshot.offers)
        upgrades = parts.upgrade_follower
        unconnected: dict[str, Any] = {
            "connected": False,
            "problem": "",
            "resource_slices": None,
            "node_differences": {},
        }

        return ClusterReport(
            node=settings.node,
            features={
                str(feature): found.get(feature, "") for feature in sorted(settings.features)
            },
            **(connection.report() if connection else unconnected),
            **parts.config_follower.report(),
            competing_plugins=parts.competing_pods.report(offers),
            driver_upgrade=upgrades.report() if upgrades else UNSET,
            events_dropped=parts.node_events.recorder.dropped,
            pod_events_dropped=parts.pod_events.dropped if parts.pod_events else 0,
        )


def _load_client() -> "ModuleType":
    """Load the client of the API server: 12 MB and a fifth of a second."""
    from metagpu.plugins.cluster import client  # noqa: PLC0415 - behind the switch

    return client


def _record_competing_pod(registry: Registry, events: NodeEvents, pod: CompetingPod) -> None:
    log.warning("competing device plugin found", program=pod.program, pod=pod.pod)
    note = describe_competing_pod(pod, registry.snapshot.offers)
    # Anyone can name a DaemonSet so and have it create pod after pod: one Event per program.
    events.record(EventReason.COMPETING_PLUGIN, note, "Register", warning=True, key=pod.program)
