"""Shares that nodes offer, read from their labels and allocatable amounts.

Equal nodes are in one group: a translation looks at each group, not at each node.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, KeysView, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from metagpu.translation.values import NodeOffer

MIG: Final = "mig"
FRACTION: Final = "fraction"
MPS: Final = "mps"
WHOLE: Final = "whole"
_TECHNIQUES: Final = frozenset((MIG, FRACTION, MPS, WHOLE))
"""Each has the name of its backend. Time-slices have no memory of their own."""
PRODUCT: Final = "nvidia.com/gpu.product"
GPU_COUNT: Final = "nvidia.com/gpu.count"
GPU_MEMORY: Final = "nvidia.com/gpu.memory"
_ALIKE: Final = 1.2
"""Memory of a GPU by that of its shares, at most: what a driver reserves is in no share."""
_INSTANCE: Final = re.compile(r"nvidia\.com/mig-\d+g\..+")


class OfferedPart(msgspec.Struct, frozen=True):
    """Shares of one resource on a node.

    Attributes:
        technique: `MIG`, `FRACTION`, `MPS` or `WHOLE`.
        memory: MiB of one share, rounded down.
        per_gpu: shares of the GPU with the most of them.
        gpus: GPUs of the node that have such shares.
        most: the most shares that pods could hold at once, if they held nothing else.
        gpu_memory: MiB of a GPU, 0 where they are not known.
        slices: compute slices of an instance, 0 where they are not known.
    """

    resource: str
    technique: str
    memory: int
    per_gpu: int
    gpus: int
    most: int
    gpu_memory: int
    slices: int = 0

    @property
    def room(self) -> int:
        """The most MiB that one request may have of a GPU.

        A share's memory is rounded down: all shares are the whole GPU all the same.
        """
        if self.technique in (MIG, WHOLE):
            return self.memory
        rounded_up = self.per_gpu * (self.memory + 1) - 1
        return max(self.per_gpu * self.memory, min(self.gpu_memory, rounded_up))

    @property
    def differ(self) -> bool:
        """True if some GPU has clearly more memory than the smallest, which a share is of."""
        return self.technique != MIG and self.gpu_memory > self.room * _ALIKE


def parts_of(node: NodeOffer) -> tuple[OfferedPart, ...]:
    """Return what a node offers, as far as its labels describe it."""
    return tuple(_parts(node))


def label_of(resource: str, key: str) -> str:
    """Return the label of metagpu that describes a resource."""
    return f"metagpu.io/{resource.replace('/', '_')}.{key}"


def memory_label(resource: str) -> str:
    """Return the label with the MiB of an instance; metagpu writes it as others do."""
    return f"{resource}.memory" if _INSTANCE.fullmatch(resource) else label_of(resource, "memory")


def _parts(node: NodeOffer) -> Iterator[OfferedPart]:
    instances = "-MIG-" in node.labels.get(PRODUCT, "")  # they stand for GPUs in the labels
    gpu_memory = 0 if instances else _number(node, GPU_MEMORY)
    for resource, allocatable in node.allocatable.items():
        gpus = _number(node, label_of(resource, "gpus")) or _number(node, GPU_COUNT)
        backend = node.labels.get(label_of(resource, "backend"), "")
        technique = backend or _of_others(resource, node)
        if technique not in _TECHNIQUES or not gpus:
            continue
        per_gpu = 1
        if technique in (FRACTION, MPS):
            per_gpu = _number(node, label_of(resource, "replicas"))
        memory = _memory(resource, technique, node)
        most = per_gpu * gpus
        if technique == MIG:
            places = _number(node, label_of(resource, "replicas")) * gpus
            counted = _number(node, f"{resource}.count") * _number(node, f"{resource}.replicas")
            most = counted or max(places, allocatable)
        if memory and per_gpu:
            slices = _number(node, f"{resource}.slices.gi")
            yield OfferedPart(resource, technique, memory, per_gpu, gpus, most, gpu_memory, slices)


def _of_others(resource: str, node: NodeOffer) -> str:
    """Return the technique of a resource that GPU Feature Discovery describes."""
    if _INSTANCE.fullmatch(resource):
        return MIG
    alone = node.labels.get("nvidia.com/gpu.replicas", "1") in ("0", "1")
    if resource == "nvidia.com/gpu" and alone and "-MIG-" not in node.labels.get(PRODUCT, ""):
        return WHOLE
    return ""


def _memory(resource: str, technique: str, node: NodeOffer) -> int:
    """Return the MiB of a share, 0 where a share has none of its own."""
    if own := _number(node, label_of(resource, "memory")):
        return own
    if technique == WHOLE:
        return _number(node, GPU_MEMORY)
    if technique == MIG and _number(node, f"{resource}.replicas") == 1:
        return _number(node, f"{resource}.memory")
    return 0


def _number(node: NodeOffer, label: str) -> int:
    text = node.labels.get(label, "")
    return int(text) if text.isdecimal() else 0


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

    @property
    def parts(self) -> Mapping[str, OfferedPart]:
        """The parts that nodes offer, by resource: of each that of one group."""
        return {part.resource: part for group in self.groups for part in group.parts}

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
            equal = (group.parts for group in self.groups if group.parts == parts)
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
    of_resources = (label_of(name, suffix) for name in names for suffix in _OF_RESOURCE)
    labels = (PRODUCT, GPU_MEMORY, *map(memory_label, names), *of_resources)
    return frozenset(parts), tuple(names), tuple(node.labels.get(label) for label in labels)
