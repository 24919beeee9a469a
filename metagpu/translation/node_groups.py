"""Nodes in groups of equals: a translation looks at each group, not at each node."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, KeysView, Mapping, Sequence
from typing import Any, Final, TypeVar

from metagpu.translation.parts import (
    GPU_MEMORY,
    PRODUCT,
    OfferedPart,
    label_of,
    memory_label,
    parts_of,
)
from metagpu.translation.values import NodeOffer

_OF_RESOURCE: Final = ("backend", "memory", "replicas", "gpus")
"""The labels of a resource that an affinity may have (`narrowing`)."""

_REMEMBERED: Final = 8
"""Findings that are kept: each may hold all nodes once more."""
_KEY: Final = 4096
"""Bytes of the longest key that is kept."""

T = TypeVar("T")


class NodeGroup:
    """Nodes with the same parts of GPUs, by the same labels.

    They differ in their names, in other labels, and in the shares that they count now.

    Attributes:
        parts: what each of them offers; groups with equal parts have the same object.
        nodes: by name.
    """

    def __init__(self, parts: Sequence[OfferedPart], nodes: Iterable[NodeOffer] = ()) -> None:
        self.parts = parts
        self.nodes: dict[str, NodeOffer] = {}
        self._amounts: dict[str, Counter[int]] = {}
        for node in nodes:
            self.add(node)

    @property
    def resources(self) -> KeysView[str]:
        """The names of the extended resources of each node."""
        return self._amounts.keys()

    def offers(self, resource: str) -> bool:
        """Return whether the nodes offer a resource: by a label, or by a number above 0.

        A kubelet counts 0 of a resource whose device plugin is gone.
        """
        labels = next(iter(self.nodes.values())).labels
        return any(self._amounts.get(resource, ())) or label_of(resource, "backend") in labels

    def add(self, node: NodeOffer) -> None:
        """Add a node that is not there."""
        self.nodes[node.name] = node
        for resource, amount in node.allocatable.items():
            self._amounts.setdefault(resource, Counter())[amount] += 1

    def remove(self, node: NodeOffer) -> None:
        """Remove a node."""
        del self.nodes[node.name]
        for resource, amount in node.allocatable.items():
            amounts = self._amounts[resource]
            amounts[amount] -= 1
            if not amounts[amount]:
                del amounts[amount]

    def has_room(self, demand: Mapping[str, int]) -> bool:
        """Return whether some node counts shares for one pod of so many now."""
        if len(demand) == 1:
            [(resource, shares)] = demand.items()
            return max(self._amounts[resource], default=0) >= shares
        return self.copies(demand) > 0

    def copies(self, demand: Mapping[str, int]) -> int:
        """Return how many pods of so many shares all nodes count shares for now."""
        if len(demand) == 1:
            [(resource, shares)] = demand.items()
            amounts = self._amounts[resource]
            return sum(amount // shares * nodes for amount, nodes in amounts.items())
        wanted = demand.items()
        return sum(
            min(node.allocatable[resource] // shares for resource, shares in wanted)
            for node in self.nodes.values()
        )


class NodeGroups:
    """All nodes; each is read once, when it comes or changes.

    Attributes:
        nodes: by name.
    """

    def __init__(self, nodes: Iterable[NodeOffer] = ()) -> None:
        self.nodes: dict[str, NodeOffer] = {}
        self._keys: dict[str, Hashable] = {}
        self._groups: dict[Hashable, NodeGroup] = {}
        self._offered: frozenset[str] | None = None
        self._remembered: dict[bytes, Any] = {}
        for node in nodes:
            self.put(node)

    @property
    def groups(self) -> Iterable[NodeGroup]:
        """The groups; none is empty."""
        return self._groups.values()

    @property
    def offered(self) -> frozenset[str]:
        """The names of all resources that nodes offer."""
        if self._offered is None:
            self._offered = frozenset(
                name for group in self.groups for name in group.resources if group.offers(name)
            )
        return self._offered

    def remember(self, key: bytes, compute: Callable[[], T]) -> T:
        """Return what `compute` finds in the nodes.

        Equal keys share it, until a node changes.
        """
        if key in self._remembered:
            found: T = self._remembered[key]
            return found
        found = compute()
        if len(key) <= _KEY:
            if len(self._remembered) >= _REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
            self._remembered[key] = found
        return found

    def put(self, node: NodeOffer) -> None:
        """Take in a node that is new or changed."""
        self.remove(node.name)
        self._forget()
        parts = parts_of(node)
        key = self._keys[node.name] = _key(node, parts)
        self.nodes[node.name] = node
        if key not in self._groups:
            equal = (it.parts for it in self.groups if it.parts == parts)
            self._groups[key] = NodeGroup(next(equal, parts))
        self._groups[key].add(node)

    def remove(self, name: str) -> None:
        """Forget a node, if it is known."""
        if (node := self.nodes.pop(name, None)) is None:
            return
        self._forget()
        key = self._keys.pop(name)
        group = self._groups[key]
        group.remove(node)
        if not group.nodes:
            del self._groups[key]

    def _forget(self) -> None:
        self._offered = None
        self._remembered.clear()


def _key(node: NodeOffer, parts: Sequence[OfferedPart]) -> Hashable:
    """Return what nodes of one group have in common."""
    names = sorted(node.allocatable)
    of_resources = (label_of(name, it) for name in names for it in _OF_RESOURCE)
    labels = (PRODUCT, GPU_MEMORY, *map(memory_label, names), *of_resources)
    return frozenset(parts), tuple(names), tuple(node.labels.get(it) for it in labels)
