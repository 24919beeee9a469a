"""The composition of all features that use the API server.

The kubelet's requests never wait for anything here: these features run beside, on what the registry
knows. An API server that does not answer costs a line in the log. The client library is loaded only
when this runs.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel
import structlog
from anyio import to_thread

from metagpu.core.config.profiles import ClusterChoice, ConfigOutcome
from metagpu.core.contracts.programs import RunCommand
from metagpu.core.errors import ClusterError
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.offers import Api
from metagpu.core.model.shares import ResourceName
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.competing_pods import (
    CompetingPod,
    CompetingPodWatch,
    describe_competing_pod,
)
from metagpu.plugins.cluster.config_follower import ConfigFollower
from metagpu.plugins.cluster.cordon_follower import NodeCordonFollower
from metagpu.plugins.cluster.driver_upgrade import DriverUpgradeFollower
from metagpu.plugins.cluster.event_feeds import (
    GpuEventFeed,
    record_node_events,
    record_pod_events,
    record_refusals,
)
from metagpu.plugins.cluster.event_reasons import EventReason
from metagpu.plugins.cluster.event_recorder import (
    PER_POD,
    EventData,
    EventRecorder,
    ObjectReference,
)
from metagpu.plugins.cluster.gpu_labels import Strategies, free_labels
from metagpu.plugins.cluster.janitor import Janitor
from metagpu.plugins.cluster.label_sync import LabelSync
from metagpu.plugins.cluster.node_comparison import NodeComparison
from metagpu.plugins.cluster.node_feature import NodeFeature
from metagpu.plugins.cluster.node_patch import NodePatcher
from metagpu.plugins.cluster.node_status import NodeStatusWriter, watched_state
from metagpu.plugins.cluster.pods import PodInformer
from metagpu.plugins.cluster.reconciler import Reconciler
from metagpu.plugins.cluster.refusals import RefusalMatcher
from metagpu.plugins.cluster.settings import JANITORS, ClusterSettings, Feature
from metagpu.plugins.cluster.watch import WatchedObject

if TYPE_CHECKING:
    from types import ModuleType

    from metagpu.plugins.cluster.client import KubeClient
    from metagpu.plugins.cluster.slice_publisher import SlicePublisher

NODES: Final = "/api/v1/nodes"

log = structlog.get_logger()


class Cluster:
    """This node at the API server, while `run` runs.

    Attributes:
        config_follower: follows the configuration that the cluster chooses.
        upgrade_follower: withdraws the shares during driver upgrades, `None` where not asked.
        keeps_labels: whether labels and condition stay at the end, for another daemon.

    Args:
        wait_registered: waits until the kubelet has the DRA driver, before the first slice.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        registry: Registry,
        follow: Callable[[ClusterChoice], Awaitable[ConfigOutcome]],
        strategies: Strategies,
        run_command: RunCommand,
        *,
        call_stats: KubeletCallStats,
        dra_driver: Callable[[], str],
        pcie_root: Callable[[Gpu], str | None],
        wait_registered: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint,
    ) -> None:
        self.config_follower = ConfigFollower(
            settings, registry, follow, self._record, self._trigger
        )
        self.upgrade_follower = (
            DriverUpgradeFollower(registry, self._record)
            if settings.drain_on_driver_upgrade
            else None
        )
        self._cordons = NodeCordonFollower(registry)
        self.keeps_labels = False
        self._wait_registered = wait_registered
        self._settings = settings
        self._registry = registry
        self._call_stats = call_stats
        self._dra_driver = dra_driver
        self._pcie_root = pcie_root
        self._slices: SlicePublisher | None = None
        self._strategies = strategies
        self._run_command = run_command
        self._reconcilers: list[tuple[Feature, Reconciler]] = []
        self._node: WatchedObject | None = None
        self._comparison: NodeComparison | None = None
        self._beside: list[Reconciler] = []
        self._recorder: EventRecorder | None = None
        self._label_sync: LabelSync | None = None
        self._competing_pods = CompetingPodWatch(registry, self._record_competing_pod)
        self._pod_recorder: EventRecorder | None = None
        self._pods: PodInformer | None = None
        self._janitor: Janitor | None = None
        # These outlive a connection, so that the next one repeats no Event.
        self._gpu_events = GpuEventFeed(registry)
        self._refusals = RefusalMatcher()

    @property
    def choice(self) -> ClusterChoice | None:
        """The choice that was applied last, `None` before the first."""
        return self.config_follower.followed

    async def wait_for_choice(self) -> None:
        """Wait until the Node's labels are followed, for `choice_timeout` at most."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.config_follower.wait_for_choice)
            with anyio.move_on_after(self._settings.choice_timeout):
                if self.upgrade_follower is not None:
                    await self.upgrade_follower.decided.wait()
                if Feature.CORDON in self._settings.features:
                    await self._cordons.decided.wait()

    async def run(self) -> None:
        """Run all features in use until cancelled; a failure here ends nothing else."""
        delay = self._settings.timing.restart_delay

        while True:
            try:
                await self._run_connected()
            except Exception:
                log.exception("cluster features failed; restarting", after=f"{delay:g}s")
            await anyio.sleep(delay)

    async def _run_connected(self) -> None:
        library = await to_thread.run_sync(_load_client)
        kubeconfig, timing = self._settings.kubeconfig, self._settings.timing

        async with library.open_client(kubeconfig, self._run_command, timing) as client:
            removals = self._build_reconcilers(client)
            try:
                await self._run_tasks(client)
            finally:
                if self._settings.remove_labels and not self.keeps_labels:
                    with anyio.move_on_after(timing.shutdown_timeout, shield=True):
                        await _run_removals(removals)

    def report(self) -> Mapping[str, Any]:
        """Return the state of each feature: its problem, or an empty string."""
        problems = {str(feature): "" for feature in self._settings.features}
        for feature, reconciler in self._reconcilers:
            problems[feature] = problems[feature] or reconciler.problem
        if Feature.CONFIG in problems:
            problems[Feature.CONFIG] = problems[Feature.CONFIG] or self.config_follower.problem
        if self._label_sync is not None and Feature.NODE_FEATURE in problems:
            problems[Feature.NODE_FEATURE] = self._label_sync.node_feature.problem
        if self._pods is not None:
            problems[Feature.PODS] = self._pods.problem

        return {
            "node": self._settings.node,
            "connected": bool(self._node and self._node.known and not self._node.problem),
            "problem": self._node.problem if self._node else "",
            "features": dict(sorted(problems.items())),
            **self.config_follower.report(),
            **(self._label_sync.report() if self._label_sync else {}),
            "resourceSlices": self._slices.report() if self._slices else None,
            "competingPlugins": self._competing_pods.report(list(self._registry.snapshot.offers)),
            "nodeDifferences": dict(self._comparison.differences) if self._comparison else {},
            **({"driverUpgrade": self.upgrade_follower.report()} if self.upgrade_follower else {}),
            "eventsDropped": _dropped_by(self._recorder),
            "podEventsDropped": _dropped_by(self._pod_recorder),
        }

    def _build_reconcilers(self, client: "KubeClient") -> Sequence[Callable[[], Awaitable[None]]]:
        """Build the reconcilers of all features; return the functions of a removal."""
        settings, features = self._settings, self._settings.features
        self._node = WatchedObject(client, NODES, settings.node, self._trigger)
        self.config_follower.node = self._node
        instance = f"metagpu-{settings.node}"  # deploy/admission-policy.yaml requires this name
        if self._recorder is None:
            self._recorder = EventRecorder(client, instance)
        self._recorder.connect(client)
        self._comparison = NodeComparison(
            self._node, self._registry, settings.timing, self._record_difference
        )
        self._beside = [
            Reconciler("comparison with the Node", self._comparison.reconcile, settings.timing)
        ]
        if (upgrades := self.upgrade_follower) is not None:
            upgrades.node = self._node
            self._beside.append(Reconciler("driver upgrade", upgrades.reconcile, settings.timing))
        self._cordons.node = self._node
        patcher = NodePatcher(client, self._node)
        status = NodeStatusWriter(patcher, self._registry, self._call_stats, settings.timing)
        self._label_sync = LabelSync(
            patcher,
            self._registry,
            self.config_follower.mig_state,
            self._strategies,
            NodeFeature(client, self._node, settings.namespace),
            shows_free=Feature.FREE_LABELS in features,
            by_nfd=Feature.NODE_FEATURE in features,
        )
        if Feature.POD_EVENTS in features:
            # Pods that misbehave must not use up the limits of the node's Events.
            if self._pod_recorder is None:
                self._pod_recorder = EventRecorder(
                    client, instance, name=Feature.POD_EVENTS, per_subject=PER_POD
                )
            self._pod_recorder.connect(client)
            if features & JANITORS:
                self._janitor = Janitor(
                    client,
                    self._registry,
                    self._pod_recorder.record,
                    settings.node,
                    dry_run=Feature.JANITOR_DRY_RUN in features,
                )
        self._reconcilers = [
            it for it in self._all_reconcilers(status, self._label_sync) if it[0] in features
        ]
        if Feature.PODS in features:
            self._pods = PodInformer(client, settings.node, self._registry)
        if settings.config_map is not None:
            namespace, name = settings.config_map
            path = f"/api/v1/namespaces/{namespace}/configmaps"
            self.config_follower.config_map = WatchedObject(client, path, name, self._trigger)
        return self._label_sync.remove, status.remove_conditions

    def _all_reconcilers(
        self, status: NodeStatusWriter, label_sync: LabelSync
    ) -> Iterator[tuple[Feature, Reconciler]]:
        timing = self._settings.timing
        work = {
            Feature.CONFIG: self.config_follower.reconcile,
            Feature.TAINT: status.remove_taint,
            Feature.CONDITION: status.reconcile_conditions,
            Feature.CORDON: self._cordons.reconcile,
        }
        for feature, reconcile in work.items():
            yield feature, Reconciler(feature, reconcile, timing)
        interval = timing.free_labels_interval if label_sync.shows_free else None
        yield Feature.LABELS, Reconciler("labels", label_sync.reconcile, timing, interval)
        yield (
            Feature.ALLOCATABLE,
            Reconciler("allocatable", status.lower_allocatable, timing, timing.lower_interval),
        )
        yield (
            Feature.ALLOCATABLE,
            # It waits by itself, and what came back meanwhile waits for its next run.
            Reconciler("allocatable, raised", status.restore_allocatable, timing, 0.0),
        )
        if self._recorder is not None:
            yield Feature.EVENTS, self._recorder.reconciler
        if self._pod_recorder is not None:
            yield Feature.POD_EVENTS, self._pod_recorder.reconciler
        if self._janitor is not None:
            yield self._janitor.feature, self._janitor.reconciler

    async def _run_tasks(self, client: "KubeClient") -> None:
        assert self._node is not None  # noqa: S101 - `_build_reconcilers` has set it
        async with anyio.create_task_group() as group:
            group.start_soon(self._node.run)
            if self.config_follower.config_map is not None:
                group.start_soon(self.config_follower.config_map.run)
            if self._pods is not None:
                group.start_soon(self._pods.run)
            if Feature.COMPETING_PLUGINS in self._settings.features:
                group.start_soon(self._competing_pods.run)
            for _, reconciler in self._reconcilers:
                group.start_soon(reconciler.run)
            for reconciler in self._beside:
                group.start_soon(reconciler.run)
            group.start_soon(self._trigger_amounts)
            group.start_soon(self._trigger_others)
            if Feature.FREE_LABELS in self._settings.features:
                group.start_soon(self._trigger_free_labels)
            if self._recorder is not None and Feature.EVENTS in self._settings.features:
                group.start_soon(
                    record_node_events,
                    self._registry,
                    self._recorder,
                    lambda: self._node_reference,
                    self._name_competitor,
                )
            if self._pod_recorder is not None:
                group.start_soon(record_pod_events, self._registry, self._pod_recorder)
                group.start_soon(self._gpu_events.run, self._pod_recorder)
                group.start_soon(
                    record_refusals,
                    *(self._registry, self._pod_recorder, self._refusals, self._settings.node),
                )
            if self._janitor is not None:
                group.start_soon(self._janitor.watch)
            group.start_soon(self._publish_slices, client, self._node)

    async def _publish_slices(self, client: "KubeClient", node: WatchedObject) -> None:
        """Publish ResourceSlices once a pool has DRA."""
        async for used in self._registry.watch(lambda now: bool(now.offers_of(Api.DRA))):
            if used:
                break
        await self._wait_registered()
        library = await to_thread.run_sync(_load_publisher)
        self._slices = library.SlicePublisher(
            *(client, node, self._registry, self._dra_driver, self._pcie_root),
            note_dropped=self._record_dropped,
        )
        await self._slices.run()

    def _trigger(self) -> None:
        for reconciler in self._beside:
            reconciler.trigger()
        if self._slices is not None:
            self._slices.reconciler.trigger()
        for feature, reconciler in self._reconcilers:
            if feature not in {Feature.EVENTS, Feature.POD_EVENTS}:
                reconciler.trigger()

    async def _trigger_amounts(self) -> None:
        """Trigger the Node's amounts at each change, at once.

        Until the Node has a number that falls, the scheduler binds pods that find nothing.
        """
        amounts = [it for feature, it in self._reconcilers if feature is Feature.ALLOCATABLE]
        async for _ in self._registry.watch(watched_state):
            for reconciler in amounts:
                reconciler.trigger()

    async def _trigger_others(self) -> None:
        async for _ in self._registry.watch(watched_state):
            await anyio.sleep(self._settings.timing.others_delay)
            self._trigger()

    async def _trigger_free_labels(self) -> None:
        (labels,) = (it for feature, it in self._reconcilers if feature is Feature.LABELS)
        async for _ in self._registry.watch(free_labels):
            labels.trigger()

    def _record_competing_pod(self, pod: CompetingPod) -> None:
        log.warning("competing device plugin found", program=pod.program, pod=pod.pod)
        note = describe_competing_pod(pod, self._registry.snapshot.offers)
        # Anyone can name a DaemonSet so and have it create pod after pod: one Event per program.
        self._record(EventReason.COMPETING_PLUGIN, note, "Register", warning=True, key=pod.program)

    def _record_difference(self, resource: ResourceName, problem: str) -> None:
        self._record(
            EventReason.NODE_AMOUNT_DIFFERS, f"{resource}: {problem}", "Register", warning=True
        )

    def _record_dropped(self, problem: str) -> None:
        reason = EventReason.RESOURCE_SLICE_FIELDS_DROPPED
        self._record(reason, problem, "Publish", warning=True)

    @property
    def _node_reference(self) -> ObjectReference:
        """The Node, for Events about it."""
        node = self._node.object if self._node else None
        uid = str(node["metadata"].get("uid", "")) if node else ""
        return ObjectReference("Node", self._settings.node, uid)

    def _name_competitor(self, resource: ResourceName) -> str:
        names = [str(it) for it in self._competing_pods.found if it.contested([resource])]
        return " or ".join(names) or "another device plugin"

    def _record(
        self, reason: EventReason, note: str, action: str, *, warning: bool = False, key: str = ""
    ) -> None:
        """Record an Event of the node, where the feature `events` is in use."""
        if self._recorder is None or Feature.EVENTS not in self._settings.features:
            return
        data = EventData(self._node_reference, reason, note, action, warning, key)
        self._recorder.record(data)


def _load_client() -> "ModuleType":
    """Load the client of the API server: 12 MB and a fifth of a second."""
    from metagpu.plugins.cluster import client  # noqa: PLC0415 - behind the switch

    return client


def _load_publisher() -> "ModuleType":
    """Load the publisher of ResourceSlices, with its computation of devices."""
    from metagpu.plugins.cluster import slice_publisher  # noqa: PLC0415 - behind the switch

    return slice_publisher


def _dropped_by(recorder: EventRecorder | None) -> int:
    return recorder.dropped if recorder else 0


async def _run_removals(removals: Sequence[Callable[[], Awaitable[None]]]) -> None:
    for remove in removals:
        try:
            await remove()
        except ClusterError as error:
            log.warning("label or condition removal failed", error=str(error))
