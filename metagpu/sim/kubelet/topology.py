"""NUMA hints and their merging: pure functions (kubelet.md §1.5, cases 46-48).

Follows the device manager's `topology_hints.go` and the topology manager's `policy.go` with the
device manager as the only hint provider and the container as the scope.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from metagpu.plugins.pb import v1beta1
from metagpu.sim.kubelet.ledger import Ledger, nodes_of

TopologyPolicy = Literal["none", "best-effort", "restricted", "single-numa-node"]


class Hint(msgspec.Struct, frozen=True):
    """A set of NUMA nodes that could satisfy a request; None stands for "any"."""

    nodes: frozenset[int] | None
    preferred: bool


def is_aligned(ledger: Ledger, resource: str) -> bool:
    """Tell whether any device of the resource names a NUMA node."""
    return any(nodes_of(device) for device in ledger.devices.get(resource, {}).values())


def hints(
    ledger: Ledger,
    resource: str,
    request: int,
    *,
    numa_nodes: Collection[int],
    held: frozenset[str] | None,
    reusable: Collection[str],
) -> list[Hint] | None:
    """Give the node sets that could satisfy a request, narrowest first.

    None means no preference, an empty list that nothing can satisfy it. Only nodes that the
    machine has and that carry devices are enumerated; others drop out silently.
    """
    if not is_aligned(ledger, resource):
        return None
    devices = ledger.devices[resource]
    if held:
        if len(held) != request:
            return []
        return _enumerate(devices, request, numa_nodes, held, ())
    available = ledger.available(resource)
    if len(available | set(reusable)) < request:
        return []
    return _enumerate(devices, request, numa_nodes, available, reusable)


def _enumerate(
    devices: Mapping[str, v1beta1.Device],
    request: int,
    numa_nodes: Collection[int],
    available: Collection[str],
    reusable: Collection[str],
) -> list[Hint]:
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
    return [Hint(nodes, preferred=len(nodes) == smallest) for nodes in found]


def _subsets(nodes: Sequence[int]) -> Iterator[frozenset[int]]:
    for size in range(1, len(nodes) + 1):
        yield from map(frozenset, itertools.combinations(nodes, size))


def merge_hints(
    policy: TopologyPolicy,
    wishes: Iterable[Sequence[Hint] | None],
    numa_nodes: Collection[int],
) -> tuple[frozenset[int] | None, bool]:
    """Merge the hints of a container's resources into one node set; tell whether it is admitted.

    A node set of None lets devices come from anywhere.
    """
    if policy == "none":
        return None, True
    anywhere = frozenset(numa_nodes)
    single = policy == "single-numa-node"
    lists = [_choices(wish, single=single) for wish in wishes]
    widest = max(
        (min((len(h.nodes) for h in many if h.nodes), default=0) for many in lists), default=0
    )
    best: Hint | None = None
    for permutation in itertools.product(*lists):
        candidate = _intersect(permutation, anywhere)
        if candidate.nodes and (best is None or _rank(candidate, widest) < _rank(best, widest)):
            best = candidate
    best = best or Hint(anywhere, preferred=False)
    if single and best.nodes == anywhere:
        best = Hint(None, best.preferred)
    return best.nodes, best.preferred or policy == "best-effort"


def _choices(wish: Sequence[Hint] | None, *, single: bool) -> list[Hint]:
    if wish is None:
        return [Hint(None, preferred=True)]
    if not wish:
        return [Hint(None, preferred=False)]
    if single:
        return [hint for hint in wish if hint.preferred and len(hint.nodes or ()) == 1]
    return list(wish)


def _intersect(permutation: Sequence[Hint], anywhere: frozenset[int]) -> Hint:
    named = [hint.nodes for hint in permutation if hint.nodes is not None]
    preferred = all(hint.preferred for hint in permutation) and len(set(named)) <= 1
    return Hint(anywhere.intersection(*named), preferred)


def _rank(hint: Hint, widest: int) -> tuple[bool, int, int, int]:
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


def split(
    ledger: Ledger, resource: str, available: Collection[str], nodes: frozenset[int] | None
) -> tuple[set[str], set[str], set[str]]:
    """Part devices into those on the wanted nodes, those on others, and those on none.

    Without a wish, or without any NUMA node on the whole resource, all are of the third kind.
    """
    if nodes is None or not is_aligned(ledger, resource):
        return set(), set(), set(available)
    devices = ledger.devices[resource]
    homes = {name: nodes_of(devices.get(name)) for name in available}
    aligned = {name for name, home in homes.items() if home & nodes}
    rootless = {name for name, home in homes.items() if not home}
    return aligned, set(available) - aligned - rootless, rootless
