"""The Node's taint, conditions and allocatable numbers: written, and compared.

The kubelet writes these numbers from the lists, within 10 s of a change. A difference that stays
has another cause: a kubelet that does not reach the API server, or another client that writes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import anyio
import structlog

from metagpu.core.availability.reasons import availability_of
from metagpu.core.errors import ClusterError
from metagpu.core.model.offers import Api
from metagpu.core.model.quantities import whole_number
from metagpu.core.model.shares import ResourceName
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.registry import Registry
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
from metagpu.plugins.cluster.settings import ClusterTiming
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
        self._lowered = {it: ours for it, ours in self._lowered.items() if shown.get(it) in ours}
        amounts = stale_allocatable(node, allocatable_of(self.registry.snapshot), lowest)
        ours = self._lowered.keys() | in_turns
        await self._write({it: n for it, n in amounts.items() if it in ours and self._listed(it)})

    def _adopt_lowered(self) -> None:
        """Count low numbers of new lists as lowered by the daemon before this one."""
        shown = _allocatable(self.node.object or {})
        for resource, amount in allocatable_of(self.registry.snapshot).items():
            if resource in self._met or resource not in shown or not self._listed(resource):
                continue
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
        self._lowered |= {it: frozenset((before[it], n)) for it, n in numbers.items()}
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
    requested = snapshot.pods.requested if snapshot.withdrawn else None
    return pods, requested, gpus, snapshot.unreadable_gpus, snapshot.offers, *node


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
        self._since = {it: since for it, since in self._since.items() if it in listed}
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
