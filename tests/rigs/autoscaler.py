"""The utilization of a node by its ResourceClaims, as cluster-autoscaler computes it.

The rule is that of cluster-autoscaler's simulator, read in November 2026 (`HighestDynamicResource-
Utilization`, kubernetes/autoscaler at 0046c5d): the highest of the node's pools counts. Of devices
without counters it is the allocated part of them. Of devices with counters it is the mean of all
counter sets that devices consume, each as full as its fullest counter. A pool with both kinds
allocated has the mean of both, weighted by devices and counter sets.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

Document = Mapping[str, Any]
Amounts = Mapping[str, Mapping[str, Fraction]]
"""By counter set and counter."""


class IncompletePoolError(Exception):
    """The newest generation of a pool lacks slices: the autoscaler leaves the node alone."""


def utilization(specs: Iterable[Document], allocated: Iterable[tuple[str, str]]) -> Fraction:
    """Return how full a node is, from its ResourceSlices and allocated devices.

    Args:
        specs: the `spec` of each slice of the node, of one driver.
        allocated: pool and name of each device that a claim holds, without adminAccess.
    """
    names = defaultdict[str, set[str]](set)
    for pool, device in allocated:
        names[pool].add(device)
    pools = defaultdict[str, list[Document]](list)
    for spec in specs:
        pools[spec["pool"]["name"]].append(spec)
    of_pools = [_of_pool(_newest(found), names[pool]) for pool, found in pools.items()]
    return max(of_pools, default=Fraction(0))


def _newest(specs: Sequence[Document]) -> Sequence[Document]:
    newest = max(spec["pool"]["generation"] for spec in specs)
    found = [spec for spec in specs if spec["pool"]["generation"] == newest]
    if len(found) != found[0]["pool"]["resourceSliceCount"]:
        raise IncompletePoolError(found[0]["pool"]["name"])
    return found


def _of_pool(specs: Sequence[Document], allocated: Collection[str]) -> Fraction:
    devices = [device for spec in specs for device in spec.get("devices", ())]
    plain = [
        device["name"] in allocated for device in devices if not device.get("consumesCounters")
    ]
    counted = [device for device in devices if device.get("consumesCounters")]
    sets = {
        consumed["counterSet"] for document in counted for consumed in document["consumesCounters"]
    }
    held = [document for document in counted if document["name"] in allocated]
    of_plain = Fraction(sum(plain), len(plain) or 1)
    if not held:
        return of_plain
    of_sets = _of_sets(_amounts(specs, "sharedCounters", "name"), held) / len(sets)
    if not any(plain):
        return of_sets
    return (of_sets * len(sets) + of_plain * len(plain)) / (len(sets) + len(plain))


def _of_sets(total: Amounts, held: Sequence[Document]) -> Fraction:
    """Return the sum of the sets' utilizations, each that of its fullest counter."""
    used = _amounts(held, "consumesCounters", "counterSet")
    return sum(
        (
            max(used.get(name, {}).get(text, Fraction(0)) / n for text, n in counters.items() if n)
            for name, counters in total.items()
        ),
        Fraction(0),
    )


def _amounts(owners: Iterable[Document], field: str, name: str) -> Amounts:
    found = defaultdict[str, Counter[str]](Counter)
    for owner in owners:
        for part in owner.get(field, ()):
            for counter, document in part["counters"].items():
                found[part[name]][counter] += int(document["value"])
    return {
        key: {counter: Fraction(n) for counter, n in counters.items()}
        for key, counters in found.items()
    }
