"""NUMA hints and their merging: pure functions (kubelet.md §1.5, cases 46-48).

Follows the device manager's `topology_hints.go` and the topology manager's `policy.go` with the
device manager as the only hint provider and the container as the scope.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.sim.kubelet.device_manager import DeviceManagerState, nodes_of

TopologyPolicy = Literal["none", "best-effort", "restricted", "single-numa-node"]


class TopologyHint(msgspec.Struct, frozen=True):
    """A set of NUMA nodes that could satisfy a request; None stands for "any"."""

    nodes: frozenset[int] | None
    preferred: bool


def has_topology(state: DeviceManagerState, resource: str) -> bool:
    """Return whether any device of the resource names a NUMA node."""
    return any(nodes_of(device) for device in state.devices.get(resource, {}).values())


def topology_hints(
    state: DeviceManagerState,
    resource: str,
    request: int,
    *,
    numa_nodes: Collection[int],
    held: frozenset[str] | None,
    reusable: Collection[str],
) -> list[TopologyHint] | None:
    """Return the node sets that could satisfy a request, narrowest first.

    None means no preference; an empty list means that nothing satisfies the request. Only nodes of
    the machine that carry devices are listed; others are left out silently.
    """
    if not has_topology(state, resource):
        return None
    devices = state.devices[resource]
    if held:
        if len(held) != request:
            return []
        return _enumerate(devices, request, numa_nodes, held, ())
    available = state.available(resource)
    if len(available | set(reusable)) < request:
        return []
    return _enumerate(devices, request, numa_nodes, available, reusable)


def _enumerate(
    devices: Mapping[str, v1beta1.Device],
    request: int,
    numa_nodes: Collection[int],
    available: Collection[str],
    reusable: Collection[str],
) -> list[TopologyHint]:
    homes = {name: nodes_of(device) & set(numa_nodes) for name, device in devices.items()}
    carrying = sorted(frozenset[int]().union(*homes.values()))
    smallest, found = len(carrying), list[frozenset[int]]()
    for nodes in _subsets(carrying):
        if len(nodes) < smallest and sum(bool(home & nodes) for home in homes.values()) >= request:
            smallest = len(nodes)
        placed = [name for name in reusable if nodes_of(devices.get(name))]
        if not all(homes[name] & nodes for name in placed):
            continue
        free = sum(bool(homes.get(name, frozenset()) & nodes) for name in available)
        if len(placed) + free >= request:
            found.append(nodes)
    return [TopologyHint(nodes, preferred=len(nodes) == smallest) for nodes in found]


def _subsets(nodes: Sequence[int]) -> Iterator[frozenset[int]]:
    for size in range(1, len(nodes) + 1):
        yield from map(frozenset, itertools.combinations(nodes, size))


def merge_hints(
    policy: TopologyPolicy,
    hint_lists: Iterable[Sequence[TopologyHint] | None],
    numa_nodes: Collection[int],
) -> tuple[frozenset[int] | None, bool]:
    """Merge a container's hints into one node set; also return whether to admit it.

    A node set of None allows devices from anywhere.
    """
    if policy == "none":
        return None, True
    anywhere = frozenset(numa_nodes)
    single = policy == "single-numa-node"
    lists = [_choices(hints, single=single) for hints in hint_lists]
    widest = max(
        (min((len(h.nodes) for h in many if h.nodes), default=0) for many in lists), default=0
    )
    best: TopologyHint | None = None
    for permutation in itertools.product(*lists):
        candidate = _intersect(permutation, anywhere)
        if candidate.nodes and (best is None or _rank(candidate, widest) < _rank(best, widest)):
            best = candidate
    best = best or TopologyHint(anywhere, preferred=False)
    if single and best.nodes == anywhere:
        best = TopologyHint(None, best.preferred)
    return best.nodes, best.preferred or policy == "best-effort"


def _choices(hints: Sequence[TopologyHint] | None, *, single: bool) -> list[TopologyHint]:
    if hints is None:
        return [TopologyHint(None, preferred=True)]
    if not hints:
        return [TopologyHint(None, preferred=False)]
    if single:
        return [hint for hint in hints if hint.preferred and len(hint.nodes or ()) == 1]
    return list(hints)


def _intersect(permutation: Sequence[TopologyHint], anywhere: frozenset[int]) -> TopologyHint:
    named = [hint.nodes for hint in permutation if hint.nodes is not None]
    preferred = all(hint.preferred for hint in permutation) and len(set(named)) <= 1
    return TopologyHint(anywhere.intersection(*named), preferred)


def _rank(hint: TopologyHint, widest: int) -> tuple[bool, int, int, int]:
    """Order hints, best first: preferred, then narrow, then low node numbers.

    Among hints that are not preferred the best is as wide as the neediest resource's narrowest
    hint, else narrower by as little as possible, else wider by as little as possible.
    """
    nodes = hint.nodes or frozenset()
    mask = sum(1 << node for node in nodes)
    if hint.preferred:
        return False, 0, len(nodes), mask
    wider = len(nodes) > widest
    return True, int(wider), len(nodes) if wider else widest - len(nodes), mask


def split_by_affinity(
    state: DeviceManagerState,
    resource: str,
    available: Collection[str],
    nodes: frozenset[int] | None,
) -> tuple[set[str], set[str], set[str]]:
    """Split devices into those on the preferred nodes, on others, and on no node.

    Without preferred nodes, or without a NUMA node on any device, all devices are of the third
    kind.
    """
    if nodes is None or not has_topology(state, resource):
        return set(), set(), set(available)
    devices = state.devices[resource]
    homes = {name: nodes_of(devices.get(name)) for name in available}
    aligned = {name for name, home in homes.items() if home & nodes}
    rootless = {name for name, home in homes.items() if not home}
    return aligned, set(available) - aligned - rootless, rootless
