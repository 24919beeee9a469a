"""The Node's taint, conditions and amounts, written and compared; its cordons.

The kubelet writes the allocatable numbers from the lists, within 10 s of a change. A difference
that stays has another cause: a kubelet that does not reach the API server, or another client that
writes.

Cordons come by the Node's annotations, for operators without a way onto the node, and during a
driver upgrade. While the GPU operator upgrades the driver, it sees pods by the names of NVIDIA's
resources alone, so others hold the driver unseen: they are named here. The labels are those of
NVIDIA's k8s-operator-libs (`pkg/upgrade/consts.go`) and k8s-driver-manager
(`cmd/driver-manager/main.go`).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import anyio
import structlog

from metagpu.core.availability.reasons import availability_of
from metagpu.core.errors import ClusterError, MetagpuError
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.offers import Api
from metagpu.core.model.quantities import whole_number
from metagpu.core.model.shares import CordonSource, ResourceName, holders_of
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.schema.daemon import DriverPodReport, DriverUpgradeReport
from metagpu.core.reports.status import find_gpu
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.facts import GpuCordoned, GpuUncordoned
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.config_follower import RecordNodeEvent
from metagpu.plugins.cluster.event_recorder import EventReason
from metagpu.plugins.cluster.node_object import (
    CONFLICT,
    KubeObject,
    allocatable_of,
    capacity_of,
    conditions_differ,
    conditions_of,
    healthy_shares_of,
    remaining_taints,
    resources_in_turns,
    stale_allocatable,
)
from metagpu.plugins.cluster.settings import CORDON_PREFIX, ClusterTiming
from metagpu.plugins.cluster.watch import NodePatcher, WatchedObject

log = structlog.get_logger()


@dataclass(eq=False)
class NodeStatusWriter:
    """Compares the Node with the snapshot, and writes only the differences.

    Attributes:
        patcher: provides the Node, and patches it.
        call_stats: has the lists that the kubelet reads now. The number of another list is the
            kubelet's own: it has no shares of ours.
    """

    patcher: NodePatcher
    registry: Registry
    call_stats: KubeletCallStats
    timing: ClusterTiming
    _lowered: dict[ResourceName, frozenset[str]] = field(default_factory=dict)
    _met: set[ResourceName] = field(default_factory=set)

    @property
    def node(self) -> WatchedObject:
        """The Node as the API server reported it last."""
        return self.patcher.node

    async def remove_taint(self) -> None:
        """Remove the startup taint once the Node shows every resource in full."""
        node = self.node.object
        if node is None:
            return
        snapshot = self.registry.snapshot
        dra = bool(snapshot.offers_of(Api.DRA))
        taints = remaining_taints(node, capacity_of(snapshot), dra=dra)
        if taints is None:
            return
        # The list has no keys: it is written as a whole, and only over the version that was read.
        version = node["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version}, "spec": {"taints": taints or None}}
        try:
            await self.patcher.patch("", body)
        except ClusterError as error:
            if error.status != CONFLICT:
                raise
            return  # another client was faster; its change triggers the next run
        log.info("startup taint removed")

    async def reconcile_conditions(self) -> None:
        """Write the conditions of the GPUs' health."""
        node, wanted = self.node.object, conditions_of(self.registry.snapshot)
        if node is None or not wanted or not conditions_differ(node, wanted):
            return
        conditions = [dict(each) for each in wanted]
        await self.patcher.apply("/status", {"status": {"conditions": conditions}}, force=True)

    async def lower_allocatable(self) -> None:
        """Lower the Node's allocatable numbers at once to the shares that are available."""
        if (node := self.node.object) is None:
            return
        await self._write(stale_allocatable(node, allocatable_of(self.registry.snapshot)))

    async def restore_allocatable(self) -> None:
        """Raise the numbers that metagpu lowered, once the kubelet knows the shares.

        Those of resources in turns too: the kubelet may have lowered them first. A number rises to
        the lowest one of the delay: what came back in between needs a delay of its own.
        """
        self._adopt_lowered()
        in_turns = resources_in_turns(self.registry.snapshot)
        if not self._lowered and not in_turns:
            return
        lowest = dict(allocatable_of(self.registry.snapshot))
        with anyio.move_on_after(self.timing.raise_delay):
            async for amounts in self.registry.watch(allocatable_of):
                for resource, amount in amounts.items():
                    lowest[resource] = min(amount, lowest.get(resource, amount))
        if (node := self.node.object) is None:
            return
        shown = _allocatable(node)
        self._lowered = {
            name: ours for name, ours in self._lowered.items() if shown.get(name) in ours
        }
        amounts = stale_allocatable(node, allocatable_of(self.registry.snapshot), lowest)
        ours = self._lowered.keys() | in_turns
        await self._write(
            {name: n for name, n in amounts.items() if name in ours and self._listed(name)}
        )

    def _adopt_lowered(self) -> None:
        """Count low numbers of new lists as lowered by the daemon before this one."""
        shown = _allocatable(self.node.object or {})
        for resource, amount in allocatable_of(self.registry.snapshot).items():
            if resource in self._met or resource not in shown or not self._listed(resource):
                continue
            if not amount:
                continue  # its backend starts: a control daemon of MPS, say
            self._met.add(resource)
            if (whole_number(shown[resource]) or 0) < amount:
                self._lowered.setdefault(resource, frozenset((shown[resource],)))

    def _listed(self, resource: ResourceName) -> bool:
        """Return whether the kubelet has our list of a resource."""
        problems = self.registry.snapshot.registration_problems
        return resource not in problems and self.call_stats.of_resource(resource).listed

    async def remove_conditions(self) -> None:
        """Remove our conditions.

        Raises:
            ClusterError: the API server does not answer, or refuses the change.
        """
        if self.node.object is not None:
            await self.patcher.apply("/status", {"status": {"conditions": []}}, force=True)

    async def _write(self, amounts: Mapping[ResourceName, int]) -> None:
        if not amounts:
            return
        before = _allocatable(self.node.object or {})
        numbers = {resource: str(count) for resource, count in amounts.items()}
        # The number before counts too: the Node that we read may be older than our last write, and
        # newer than its answer, which may be lost.
        self._lowered |= {name: frozenset((before[name], n)) for name, n in numbers.items()}
        await self.patcher.patch("/status", {"status": {"allocatable": numbers}})


def _allocatable(node: KubeObject) -> Mapping[str, str]:
    shown: Mapping[str, str] = (node.get("status") or {}).get("allocatable") or {}
    return shown


def watched_state(snapshot: Snapshot) -> object:
    """Return the state whose change triggers all reconcilers; cheap, as read often."""
    gpus = tuple(
        # Whatever makes a share unhealthy, the Node's amounts follow: they count the same.
        (
            *(state.gpu, state.verdict, state.suspended, state.mig_faults),
            availability_of(state).uncounted,
        )
        for state in snapshot.gpus.values()
    )
    node = snapshot.topology, snapshot.versions, snapshot.competing_plugins
    pods = snapshot.pods.terminating, snapshot.pods.arriving
    return pods, snapshot.withdrawn, gpus, snapshot.unreadable_gpus, snapshot.offers, *node


@dataclass(eq=False)
class NodeComparison:
    """Reports resources whose allocatable number on the Node stays wrong.

    Attributes:
        on_difference: called once for each difference, with the resource and a sentence.
        differences: the present differences, a sentence for each resource.
    """

    node: WatchedObject
    registry: Registry
    timing: ClusterTiming
    on_difference: Callable[[ResourceName, str], None]
    differences: dict[ResourceName, str] = field(default_factory=dict)
    _since: dict[ResourceName, tuple[int, float]] = field(default_factory=dict)

    async def reconcile(self) -> float | None:
        """Compare now; return the seconds after which the next difference has stayed."""
        if (node := self.node.object) is None or self.node.problem:
            return None  # a Node that is not read proves nothing
        snapshot, now = self.registry.snapshot, anyio.current_time()
        listed = {
            resource: count
            for resource, count in healthy_shares_of(snapshot).items()
            if resource not in snapshot.registration_problems
        }
        # While pods terminate, the Node shows fewer where metagpu writes its numbers.
        lowered = allocatable_of(snapshot)
        shown = {
            resource: listed.get(resource, amount) if amount == lowered.get(resource) else amount
            for resource, amount in shown_amounts(node).items()
        }
        due = self._track(listed, shown, now)
        for resource in self.differences.keys() - due.keys():
            del self.differences[resource]
            if resource in listed:
                log.info("node shows the list again", resource=resource)
        for resource, (sentence, wait) in due.items():
            if wait <= 0 and self.differences.get(resource) != sentence:
                self.differences[resource] = sentence
                log.warning("node differs from the list", resource=resource, problem=sentence)
                self.on_difference(resource, sentence)
        return min((wait for _, wait in due.values() if wait > 0), default=None)

    def _track(
        self, listed: Mapping[ResourceName, int], shown: Mapping[ResourceName, int], now: float
    ) -> Mapping[ResourceName, tuple[str, float]]:
        """Return each difference with the seconds until it has stayed long enough.

        A number of ours that changes begins a new difference: the kubelet may follow it.
        """
        found = {}
        self._since = {name: since for name, since in self._since.items() if name in listed}
        for resource, count in listed.items():
            if (there := shown.get(resource, 0)) == count:
                self._since.pop(resource, None)
                continue
            before, since = self._since.get(resource, (count, now))
            self._since[resource] = before, since = count, since if before == count else now
            sentence = f"the Node shows {there} allocatable, and metagpu lists {count}"
            found[resource] = sentence, since + self.timing.difference_after - now
        return found


def shown_amounts(node: KubeObject) -> Mapping[ResourceName, int]:
    """Return the allocatable numbers that a Node shows."""
    shown = (node.get("status") or {}).get("allocatable") or {}
    amounts = {ResourceName(name): whole_number(amount) for name, amount in shown.items()}
    return {name: amount for name, amount in amounts.items() if amount is not None}


_LONGEST_REASON: Final = 200


def cordons_by(
    annotations: Mapping[str, str], snapshot: Snapshot
) -> tuple[Mapping[GpuId, str], Mapping[str, str]]:
    """Return the GPUs that annotations cordon, with the reasons, and what is wrong."""
    cordoned, problems = dict[GpuId, str](), dict[str, str]()
    for key, text in annotations.items():
        if not key.startswith(CORDON_PREFIX):
            continue
        try:
            gpu = find_gpu(snapshot, key.removeprefix(CORDON_PREFIX))
        except MetagpuError as error:
            problems[key] = str(error)
        else:
            cordoned[gpu] = " ".join(text.split())[:_LONGEST_REASON] or "no reason was given"
    return cordoned, problems


@dataclass(eq=False)
class NodeCordonFollower:
    """Cordons the GPUs that annotations of the Node name, and no others.

    Attributes:
        decided: set once the annotations are known, and the GPUs follow them.
    """

    registry: Registry
    clock: Callable[[], float] = time.time
    decided: anyio.Event = field(default_factory=anyio.Event)
    _logged: LogOnce = field(default_factory=LogOnce)

    def follow(self, node: KubeObject | None) -> None:
        """Cordon GPUs, or end their cordons, as the Node's annotations say."""
        if node is None:
            return  # what was known last holds while the API server is away
        snapshot = self.registry.snapshot
        annotations = node["metadata"].get("annotations") or {}
        cordoned, problems = cordons_by(annotations, snapshot)
        for gpu in snapshot.gpus:
            self._set(gpu, cordoned.get(gpu))
        for key, problem in problems.items():
            if snapshot.gpus and self._logged.is_new(key, problem):
                log.warning("cordon ignored", annotation=key, error=problem)
        if snapshot.gpus:
            self.decided.set()

    def _set(self, gpu: GpuId, reason: str | None) -> None:
        now, source = self.clock(), CordonSource.NODE
        if reason is None:
            if self.registry.apply(GpuUncordoned(gpu, now, source)):
                log.info("gpu uncordoned", gpu=gpu, by="annotation")
        elif self.registry.apply(GpuCordoned(gpu, reason, now, source)):
            log.warning("gpu cordoned", gpu=gpu, reason=reason, by="annotation")


STATE_LABEL: Final = "nvidia.com/gpu-driver-upgrade-state"
"""The label by which the operator takes a node through an upgrade."""
OPERAND_LABELS: Final = "nvidia.com/gpu.deploy."
"""The labels by which the driver's container stops the operands before it loads a driver."""
PAUSED: Final = "paused-for-driver-upgrade"
"""What the values of these labels are, or end with, meanwhile."""
HELD_STATES: Final = frozenset(
    {
        "cordon-required",
        "wait-for-jobs-required",
        "pod-deletion-required",
        "drain-required",
        "node-maintenance-required",
        "post-maintenance-required",
        "pod-restart-required",
        "upgrade-failed",
    }
)
"""The states in which the old driver has to go, or is gone.

In `upgrade-required` a node waits for its turn, maybe for days. From `validation-required` on it
has the new driver, and the operator's validator may ask for a share.
"""
SEEN_PREFIXES: Final = ("nvidia.com/gpu", "nvidia.com/mig-")
"""The resource names by which the operator finds pods to evict."""
REASON: Final = "the GPU operator upgrades the driver of this node"
_NAMED: Final = 8
"""Pods that a sentence names; the status has all of them."""


def upgrade_state(labels: Mapping[str, str]) -> str:
    """Return the label and value of the upgrade under way, empty without one."""
    if (state := labels.get(STATE_LABEL, "")) in HELD_STATES:
        return f"{STATE_LABEL}={state}"
    paused = (
        f"{name}={value}"
        for name, value in sorted(labels.items())
        if name.startswith(OPERAND_LABELS) and value.endswith(PAUSED)
    )
    return next(paused, "")


def holding_pods(snapshot: Snapshot) -> Mapping[str, bool]:
    """Return the pods with shares, and whether the operator evicts each by itself."""
    found: dict[str, bool] = {}
    for state in snapshot.gpus.values():
        for lease in state.leases.values():
            # Of pods with ResourceClaims the operator sees those of NVIDIA's own driver alone.
            named = lease.share.resource.startswith(SEEN_PREFIXES)
            seen = named and lease.resource_claim is None
            for holder in holders_of(lease):
                pod = f"{holder.namespace}/{holder.pod}"
                found[pod] = found.get(pod, False) or seen
    return dict(sorted(found.items()))


def summary(state: str, pods: Mapping[str, bool]) -> str:
    """Return one sentence about an upgrade and the pods that hold the driver."""
    named = [
        f"{pod}{'' if seen else ' (the operator does not see it)'}" for pod, seen in pods.items()
    ]
    rest = [f"{len(named) - _NAMED} more"] if len(named) > _NAMED else []
    held = ", ".join([*named[:_NAMED], *rest])
    holders = f"these pods hold the driver: {held}" if held else "no pod holds the driver"
    return f"{REASON} ({state}), and no GPU gives new shares; {holders}"


@dataclass(eq=False)
class DriverUpgradeFollower:
    """Cordons every GPU while the Node's labels report a driver upgrade.

    Attributes:
        record_event: records Events of the node.
        decided: set once the labels are known, and the GPUs follow them.
        state: the label and value of the present upgrade, empty without one.
    """

    registry: Registry
    record_event: RecordNodeEvent
    clock: Callable[[], float] = time.time
    decided: anyio.Event = field(default_factory=anyio.Event)
    state: str = ""

    def follow(self, node: KubeObject | None) -> None:
        """Cordon the GPUs, or end their cordon, as the Node's labels say."""
        if node is None:
            return  # what was known last holds while the API server is away
        before, labels = self.state, node["metadata"].get("labels") or {}
        self.state = upgrade_state(labels)
        self._apply()
        if self.state != before:
            self._record(before)
        if self.registry.snapshot.gpus:
            self.decided.set()

    def report(self) -> DriverUpgradeReport | None:
        """Return the upgrade and the pods that hold the driver, `None` without one."""
        if not self.state:
            return None
        pods = holding_pods(self.registry.snapshot)
        named = [DriverPodReport(pod, seen) for pod, seen in pods.items()]
        return DriverUpgradeReport(self.state, named, summary(self.state, pods))

    def _apply(self) -> None:
        source = CordonSource.DRIVER_UPGRADE
        for gpu in self.registry.snapshot.gpus:
            now = self.clock()
            self.registry.apply(
                GpuCordoned(gpu, REASON, now, source)
                if self.state
                else GpuUncordoned(gpu, now, source)
            )

    def _record(self, before: str) -> None:
        if not self.state:
            log.info("driver upgrade ended", label=before)
            note = "the driver upgrade is over, and the GPUs give shares again"
            self.record_event(EventReason.DRIVER_UPGRADE_ENDED, note, "Configure")
            return
        pods = holding_pods(self.registry.snapshot)
        log.warning("driver upgrade under way", label=self.state, pods=list(pods))
        note = summary(self.state, pods)
        self.record_event(
            EventReason.DRIVER_UPGRADE_UNDER_WAY, note, "Configure", warning=bool(pods)
        )
