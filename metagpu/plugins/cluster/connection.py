"""The parts that live as long as one connection to the API server."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import structlog
from anyio import to_thread
from anyio.abc import TaskGroup

from metagpu.core.config.profiles import ClusterChoice, ConfigOutcome
from metagpu.core.errors import ClusterError
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import ResourceName
from metagpu.core.runtime.rate_limit import random_between
from metagpu.core.runtime.tasks import Work
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.events import ConfigRejected, LayoutApplied
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.config_follower import ConfigFollower
from metagpu.plugins.cluster.event_recorder import EventReason, EventRecorder
from metagpu.plugins.cluster.events import (
    GpuEventFeed,
    NodeEvents,
    record_empty_resources,
    record_node_events,
    record_pod_events,
    record_refusals,
)
from metagpu.plugins.cluster.gpu_labels import LabelSettings, free_labels
from metagpu.plugins.cluster.label_sync import LabelSync, NodeFeature
from metagpu.plugins.cluster.node_object import NODES
from metagpu.plugins.cluster.node_status import (
    DriverUpgradeFollower,
    NodeComparison,
    NodeCordonFollower,
    NodeStatusWriter,
    watched_state,
)
from metagpu.plugins.cluster.pods import CompetingPodWatch, PodInformer
from metagpu.plugins.cluster.reconciler import Reconciler
from metagpu.plugins.cluster.refusals import Janitor, RefusalMatcher
from metagpu.plugins.cluster.settings import JANITORS, ClusterSettings, Feature
from metagpu.plugins.cluster.watch import NodePatcher, WatchedObject

if TYPE_CHECKING:
    from types import ModuleType

    from metagpu.plugins.cluster.client import KubeClient
    from metagpu.plugins.cluster.slice_publisher import SlicePublisher

log = structlog.get_logger()


@dataclass(frozen=True, eq=False)
class ClusterContext:
    """The node, as the API server's side of it needs it.

    Attributes:
        follow: applies the configuration that the cluster chooses.
        outcome: returns what has become of that choice by now.
        label_settings: returns what the labels depend on beside the snapshot.
        call_stats: has the lists that the kubelet reads now.
        dra_driver: returns the name of the DRA driver.
        pcie_root: returns the PCIe root complex of a GPU.
        wait_registered: waits until there is a DRA driver, and a while for the kubelet to have it.
        taken: set once this daemon has the node; before, it follows its profile and reports its
            own errors, and writes nothing else.
    """

    settings: ClusterSettings
    registry: Registry
    follow: Callable[[ClusterChoice], Awaitable[None]]
    outcome: Callable[[], ConfigOutcome]
    label_settings: Callable[[], LabelSettings]
    call_stats: KubeletCallStats
    dra_driver: Callable[[], str]
    pcie_root: Callable[[Gpu], str | None]
    wait_registered: Callable[[], Awaitable[None]]
    taken: anyio.Event


@dataclass(frozen=True, eq=False)
class LastingParts:
    """The parts that outlive a connection: no Event is repeated by the next one.

    Attributes:
        config_follower: follows the configuration that the cluster chooses.
        upgrade_follower: withdraws the shares during driver upgrades, `None` where not asked.
        pod_events: records the Events of pods, `None` where not asked. Pods that misbehave must not
            use up the limits of the node's Events.
    """

    config_follower: ConfigFollower
    upgrade_follower: DriverUpgradeFollower | None
    cordons: NodeCordonFollower
    competing_pods: CompetingPodWatch
    node_events: NodeEvents
    pod_events: EventRecorder | None
    gpu_events: GpuEventFeed
    refusals: RefusalMatcher


class NodeConnection:
    """The informers and reconcilers of all features in use, while one client is open.

    Attributes:
        node: this node's Node.
        config_map: the profiles, `None` without profiles in the cluster.
        pods: the node's Pods, `None` where not asked.
        janitor: deletes rejected pods, `None` where not asked.
        slices: publishes ResourceSlices, from the first pool that needs them on.
    """

    slices: "SlicePublisher | None" = None
    _reload_at: float = 0.0

    def __init__(self, client: "KubeClient", context: ClusterContext, parts: LastingParts) -> None:
        settings, registry, timing = context.settings, context.registry, context.settings.timing
        features = settings.features
        self._client, self._context, self._parts = client, context, parts
        self.node = WatchedObject(client, NODES, settings.node, self._take_in_node)
        self.config_map: WatchedObject | None = None
        if settings.config_map is not None:
            namespace, name = settings.config_map
            path = f"/api/v1/namespaces/{namespace}/configmaps"
            self.config_map = WatchedObject(client, path, name, self._take_in_profiles)
        self.pods = (
            PodInformer(client, settings.node, registry) if Feature.PODS in features else None
        )
        self.comparison = NodeComparison(self.node, registry, timing, self._record_difference)
        patcher = NodePatcher(client, self.node)
        self._status = NodeStatusWriter(patcher, registry, context.call_stats, timing)
        self._label_sync = LabelSync(
            patcher,
            registry,
            parts.config_follower.mig_state,
            context.label_settings,
            NodeFeature(client, self.node, settings.namespace),
            shows_free=Feature.FREE_LABELS in features,
            by_nfd=Feature.NODE_FEATURE in features,
        )
        self.janitor = (
            Janitor(
                client,
                registry,
                parts.pod_events.record,
                settings.node,
                dry_run=Feature.JANITOR_DRY_RUN in features,
            )
            if parts.pod_events is not None and features & JANITORS
            else None
        )
        self._reconcilers = [use for use in self._of_features() if use[0] in features]
        self._unnamed = list(self._of_no_feature())

    async def run(self) -> None:
        """Run all features in use until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.node.run)
            if self.config_map is not None:
                group.start_soon(self.config_map.run)
            for feature, reconciler in self._reconcilers:
                if feature is Feature.CONFIG:
                    group.start_soon(reconciler.run)
            for task in self._node_event_tasks():
                group.start_soon(task)
            await self._context.taken.wait()
            self._start_writers(group)

    def _start_writers(self, group: TaskGroup) -> None:
        """Start what the daemon that has the node does, and no other one."""
        parts, features = self._parts, self._context.settings.features
        if self.pods is not None:
            group.start_soon(self.pods.run)
        if Feature.COMPETING_PLUGINS in features:
            group.start_soon(parts.competing_pods.run)
        others = (use for feature, use in self._reconcilers if feature is not Feature.CONFIG)
        for reconciler in (*others, *self._unnamed):
            group.start_soon(reconciler.run)
        group.start_soon(self._trigger_amounts)
        group.start_soon(self._trigger_others)
        group.start_soon(self._trigger_at_configurations)
        if Feature.FREE_LABELS in features:
            group.start_soon(self._trigger_free_labels)
        for task in self._pod_event_tasks():
            group.start_soon(task)
        if self.janitor is not None:
            group.start_soon(self.janitor.watch)
        group.start_soon(self._publish_slices)

    async def remove(self) -> None:
        """Remove labels and conditions, as far as the API server allows."""
        for remove in (self._label_sync.remove, self._status.remove_conditions):
            try:
                await remove()
            except ClusterError as error:
                log.warning("label or condition removal failed", error=str(error))

    def trigger(self) -> None:
        """Trigger all reconcilers."""
        if self.slices is not None:
            self.slices.reconciler.trigger()
        for reconciler in (*(use for _, use in self._reconcilers), *self._unnamed):
            reconciler.trigger()

    def _trigger_only(self, wanted: Feature) -> None:
        for feature, reconciler in self._reconcilers:
            if feature is wanted:
                reconciler.trigger()

    def problems(self) -> Mapping[Feature, str]:
        """Return the problem of each feature in use that has one."""
        parts, found = self._parts, dict[Feature, str]()
        for feature, reconciler in self._reconcilers:
            found[feature] = found.get(feature) or reconciler.problem
        if self.config_map is not None:
            problem = self.config_map.problem or parts.config_follower.problem
            found[Feature.CONFIG] = found.get(Feature.CONFIG) or problem
        found[Feature.EVENTS] = parts.node_events.recorder.problem
        if parts.pod_events is not None:
            found[Feature.POD_EVENTS] = parts.pod_events.problem
        found[Feature.NODE_FEATURE] = self._label_sync.node_feature.problem
        if self.pods is not None:
            found[Feature.PODS] = self.pods.problem
        return found

    def report(self) -> Mapping[str, Any]:
        """Return the state of the connection and of what it writes: fields of a report."""
        return {
            "connected": self.node.known and not self.node.problem,
            "problem": self.node.problem,
            **self._label_sync.report(),
            "resource_slices": self.slices.report() if self.slices else None,
            "node_differences": dict(self.comparison.differences),
        }

    def _of_features(self) -> Iterator[tuple[Feature, Reconciler]]:
        timing, status = self._context.settings.timing, self._status
        work = {
            Feature.CONFIG: self._follow_config,
            Feature.TAINT: status.remove_taint,
            Feature.CONDITION: status.reconcile_conditions,
            Feature.CORDON: self._follow_cordons,
        }
        for feature, reconcile in work.items():
            yield feature, Reconciler(feature, reconcile, timing)
        labels = self._label_sync
        interval = timing.free_labels_interval if labels.shows_free else None
        yield Feature.LABELS, Reconciler("labels", labels.reconcile, timing, interval)
        yield (
            Feature.ALLOCATABLE,
            Reconciler("allocatable", status.lower_allocatable, timing, timing.lower_interval),
        )
        yield (
            Feature.ALLOCATABLE,
            # It waits by itself, and what came back meanwhile waits for its next run.
            Reconciler("allocatable, raised", status.restore_allocatable, timing, 0.0),
        )
        if self.janitor is not None:
            yield self.janitor.feature, self.janitor.reconciler

    def _of_no_feature(self) -> Iterator[Reconciler]:
        timing = self._context.settings.timing
        yield Reconciler("comparison with the Node", self.comparison.reconcile, timing)
        if self._parts.upgrade_follower is not None:
            yield Reconciler("driver upgrade", self._follow_upgrade, timing)

    def _node_event_tasks(self) -> Iterator[Work]:
        parts, registry, client = self._parts, self._context.registry, self._client
        if Feature.EVENTS in self._context.settings.features:
            yield lambda: parts.node_events.recorder.run(client)
            yield lambda: record_node_events(
                registry, parts.node_events, parts.competing_pods.name_competitor
            )
            yield lambda: record_empty_resources(registry, parts.node_events)

    def _pod_event_tasks(self) -> Iterator[Work]:
        parts, registry, client = self._parts, self._context.registry, self._client
        node = self._context.settings.node
        if (recorder := parts.pod_events) is not None:
            yield lambda: recorder.run(client)
            yield lambda: record_pod_events(registry, recorder)
            yield lambda: parts.gpu_events.run(recorder)
            yield lambda: record_refusals(registry, recorder, parts.refusals, node)

    async def _follow_config(self) -> float | None:
        if (wait := self._reload_at - anyio.current_time()) > 0:
            return wait
        if await self._parts.config_follower.reconcile(self.node, self.config_map):
            self.trigger()
        return None

    async def _follow_cordons(self) -> None:
        self._parts.cordons.follow(self.node.object)

    async def _follow_upgrade(self) -> None:
        if self._parts.upgrade_follower is not None:
            self._parts.upgrade_follower.follow(self.node.object)

    async def _publish_slices(self) -> None:
        """Publish ResourceSlices, or take them back, once claims are served."""
        context = self._context
        await context.wait_registered()
        library = await to_thread.run_sync(_load_publisher)
        self.slices = library.SlicePublisher(
            *(self._client, self.node, context.registry, context.dra_driver, context.pcie_root),
            note_dropped=self._record_dropped,
        )
        await self.slices.run()

    def _take_in_profiles(self) -> None:
        """Follow a changed ConfigMap later: all nodes see it, and write, at once."""
        if self._parts.config_follower.followed is not None:
            wait = random_between(0, self._context.settings.timing.spread)
            self._reload_at = anyio.current_time() + wait
        self._trigger_only(Feature.CONFIG)

    def _take_in_node(self) -> None:
        self._reload_at = 0.0
        self._parts.node_events.take_in(self.node.object)
        self.trigger()

    async def _trigger_amounts(self) -> None:
        """Trigger the Node's amounts at each change, at once.

        Until the Node has a number that falls, the scheduler binds pods that find nothing.
        """
        async for _ in self._context.registry.watch(watched_state):
            self._trigger_only(Feature.ALLOCATABLE)

    async def _trigger_others(self) -> None:
        async for _ in self._context.registry.watch(watched_state):
            await anyio.sleep(self._context.settings.timing.others_delay)
            self.trigger()

    async def _trigger_at_configurations(self) -> None:
        """Trigger at each configuration: labels depend on it, also where no share changes."""
        with self._context.registry.events.subscribe(LayoutApplied, ConfigRejected) as events:
            async for _ in events:
                self.trigger()

    async def _trigger_free_labels(self) -> None:
        async for _ in self._context.registry.watch(free_labels):
            self._trigger_only(Feature.LABELS)

    def _record_difference(self, resource: ResourceName, problem: str) -> None:
        reason = EventReason.NODE_AMOUNT_DIFFERS
        self._parts.node_events.record(reason, f"{resource}: {problem}", "Register", warning=True)

    def _record_dropped(self, problem: str) -> None:
        reason = EventReason.RESOURCE_SLICE_FIELDS_DROPPED
        self._parts.node_events.record(reason, problem, "Publish", warning=True)


def _load_publisher() -> "ModuleType":
    """Load the publisher of ResourceSlices, with its computation of devices."""
    from metagpu.plugins.cluster import slice_publisher  # noqa: PLC0415 - behind the switch

    return slice_publisher
