"""Orders of arrival on one GPU: how many a rule places in full, and how many any rule can.

An order is a sequence of requests that fit on the empty GPU together; nobody leaves. A rule sees
one request after the other, and places the order if it has a place for each.
"""

from collections import Counter
from functools import lru_cache
from math import factorial, prod

from bench import arrivals
from bench.arrivals import Rule
from metagpu.backends.mig.profiles import MigGeometry, PlacedProfile


class OneGpu:
    """The choices of a rule on one GPU, each made once."""

    def __init__(self, geometry: MigGeometry, rule: Rule) -> None:
        self._rule = rule
        self._node = arrivals.node(geometry, 1)
        self._placed = {str(placed): placed for placed in geometry.placed_profiles}
        self._known: dict[tuple[frozenset[str], str], PlacedProfile | None] = {}

    def place(self, occupied: frozenset[str], profile: str) -> PlacedProfile | None:
        """Return where an instance goes beside the occupied slots, `None` where it does not fit."""
        key = occupied, profile
        if key not in self._known:
            self._node.taken[self._node.gpus[0].id] = set(occupied)
            share = self._rule(self._node, profile)
            self._known[key] = self._placed[share.id.partition("::")[2]] if share else None
        return self._known[key]


@lru_cache(maxsize=8)
def one_gpu(geometry: MigGeometry, rule: Rule) -> OneGpu:
    """Return the choices of a rule, the same ones for the same rule and geometry."""
    return OneGpu(geometry, rule)


def possible_orders(geometry: MigGeometry) -> int:
    """Count the orders that fit, if all requests are known before the first is placed."""
    fitting = {
        tuple(sorted(Counter(placed.profile.name for placed in arrangement).items()))
        for arrangement in geometry.arrangements()
        if arrangement
    }
    return sum(
        factorial(sum(count for _, count in counts))
        // prod(factorial(count) for _, count in counts)
        for counts in fitting
    )


def best_orders(geometry: MigGeometry) -> int:
    """Count the orders that the best rule places in full: exact, over all rules."""
    known: dict[int, int] = {}

    def count(occupied: int) -> int:
        if occupied not in known:
            best: dict[str, int] = {}
            for placed in geometry.free_placements(occupied):
                name = placed.profile.name
                after = 1 + count(occupied | geometry.masks[placed])
                best[name] = max(best.get(name, 0), after)
            known[occupied] = sum(best.values())
        return known[occupied]

    return count(0)


def placed_orders(geometry: MigGeometry, rule: Rule) -> int:
    """Count the orders that a rule places in full."""
    gpu = one_gpu(geometry, rule)
    known: dict[frozenset[str], int] = {}

    def count(occupied: frozenset[str]) -> int:
        if occupied not in known:
            places = [gpu.place(occupied, profile.name) for profile in geometry.profiles]
            known[occupied] = sum(
                1 + count(occupied | place.footprint) for place in places if place
            )
        return known[occupied]

    return count(frozenset())
