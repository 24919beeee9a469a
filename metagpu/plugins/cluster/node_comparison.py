"""The comparison of the Node's numbers with metagpu's lists.

The kubelet writes these numbers from the lists, within 10 s of a change. A difference that stays
has another cause: a kubelet that does not reach the API server, or another client that writes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import anyio
import structlog

from metagpu.core.model.quantities import whole_number
from metagpu.core.model.shares import ResourceName
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.node_object import (
    KubeObject,
    allocatable_of,
    healthy_shares_of,
)
from metagpu.plugins.cluster.settings import ClusterTiming
from metagpu.plugins.cluster.watch import WatchedObject

log = structlog.get_logger()


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
