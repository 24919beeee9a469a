"""The shares that must not count while pods are about to end.

The scheduler frees a pod's shares at its end and tries waiting pods at once, before any number can
fall. The kubelet has the present list at that moment: of the free shares it can give those alone
that are healthy now, and the pod's. Pure.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Final

from msgspec.structs import replace

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.offers import FreePart, RequestRule, held_back_gpus
from metagpu.core.model.shares import ResourceName
from metagpu.core.model.snapshot import Offer, Snapshot, counted_parts

MOST_PODS: Final = 4
"""Pods that end at the same time, up to which each order of their ends is counted."""

Ends = Mapping[tuple[str, str], Counter[GpuId]]
"""The shares that pods about to end hold of each GPU; a pod is its namespace and name."""


def uncounted_shares(snapshot: Snapshot) -> Mapping[ResourceName, int]:
    """Return the number of healthy shares that must not count, by resource.

    Without them no request that counts as free after the ends of some of these pods is larger than
    what the kubelet can give then. What pods that arrive request stays counted: the kubelet itself
    refuses a pod above the Node's number, also where its shares are there.
    """
    if not snapshot.pods.terminating:
        return {}
    found = {
        resource: _uncounted(snapshot, offer)
        for resource, offer in snapshot.offers.items()
        if offer.rule.requests is not RequestRule.ANY
    }
    return {resource: count for resource, count in found.items() if count}


def _uncounted(snapshot: Snapshot, offer: Offer) -> int:
    ends = _ends(snapshot, offer)
    if not ends:
        return 0
    rule, parts = offer.rule.requests, counted_parts(snapshot, offer)
    held_back = held_back_gpus(rule, parts)
    listed = [replace(it, free=0) if it.gpu in held_back else it for it in parts]
    excess = max(_excess(snapshot, offer, listed, freed) for freed in _orders(list(ends.values())))
    free = sum(it.free for it in parts if it.gpu not in held_back)
    arriving = snapshot.pods.arriving.get(offer.resource, 0)
    return min(excess, max(0, free - arriving)) if arriving else excess


def _orders(ends: Sequence[Counter[GpuId]]) -> Iterator[Counter[GpuId]]:
    """Yield the shares free after some ends; of many pods, after one or all."""
    for size in range(1, len(ends) + 1):
        if size in (1, len(ends)) or len(ends) <= MOST_PODS:
            for some in combinations(ends, size):
                yield sum(some, Counter[GpuId]())


def _ends(snapshot: Snapshot, offer: Offer) -> Ends:
    ends = defaultdict[tuple[str, str], Counter[GpuId]](Counter)
    for gpu in offer.by_gpu:
        state = snapshot.gpus[gpu]
        for share_id, lease in state.leases.items() if state.verdict.healthy else ():
            holder = lease.holder
            if holder is None or share_id not in offer.ids[gpu]:
                continue
            if share_id in state.unhealthy_shares:
                continue  # the Node does not count it now
            if (pod := (holder.namespace, holder.pod)) in snapshot.pods.terminating:
                ends[pod][gpu] += 1
    return ends


def _excess(
    snapshot: Snapshot, offer: Offer, parts: Sequence[FreePart], freed: Mapping[GpuId, int]
) -> int:
    """Return by how much the shares that count as free after an end are too many."""
    backend = next(share.backend for share in offer.shares.values())
    lost = sum(n for gpu, n in freed.items() if not snapshot.gpus[gpu].open_to(backend))
    after = [
        replace(it, free=it.free + freed.get(it.gpu, 0), full=it.full and it.gpu not in freed)
        for it in parts
        if snapshot.gpus[it.gpu].open_to(backend)
    ]
    held_back = held_back_gpus(offer.rule.requests, after)
    return lost + sum(it.free for it in after if it.gpu in held_back)
