"""The shares that exact offers hold back, applied to a snapshot. Pure.

The scheduler frees a pod's shares at its end and tries waiting pods at once, before any list or
number can change. So the shares of a pod that is about to end leave the list, and the number with
it, beforehand. They come back once they are free, in the choice of that moment.
"""

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.offers import RequestRule, held_back_gpus
from metagpu.core.model.shares import ResourceName, ShareId
from metagpu.core.model.snapshot import Offer, Snapshot, counted_parts, with_states

_NONE: Final[frozenset[ShareId]] = frozenset()


def with_held_back(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with the shares that its offers' rules hold back.

    These are free shares, and leased ones of pods that are about to end, or have ended.
    """
    held: dict[GpuId, dict[ResourceName, frozenset[ShareId]]] = {}
    ending = defaultdict[GpuId, set[ShareId]](set)
    for resource, offer in snapshot.offers.items():
        if offer.rule.requests is not RequestRule.ANY:
            for gpu in held_back_gpus(offer.rule.requests, counted_parts(snapshot, offer)):
                held.setdefault(gpu, {})[resource] = offer.ids[gpu]
            for gpu, shares in _ending_shares(snapshot, offer).items():
                ending[gpu] |= shares

    changed = [
        replace(
            state,
            held_back=MappingProxyType(held.get(gpu, {})),
            ending_shares=frozenset(ending.get(gpu, _NONE)),
        )
        for gpu, state in snapshot.gpus.items()
        if state.held_back != held.get(gpu, {}) or state.ending_shares != ending.get(gpu, _NONE)
    ]
    return with_states(snapshot, changed) if changed else snapshot


def _ending_shares(snapshot: Snapshot, offer: Offer) -> Mapping[GpuId, set[ShareId]]:
    """Return the shares of an offer that pods hold which are about to end."""
    found = defaultdict[GpuId, set[ShareId]](set)
    if not (pods := snapshot.pods.terminating - snapshot.readmitted):
        return found
    for gpu, ids in offer.ids.items():
        for share, lease in snapshot.gpus[gpu].leases.items():
            holder = lease.holder
            if holder is not None and (holder.namespace, holder.pod) in pods and share in ids:
                found[gpu].add(share)
    return found


def with_place_for_arriving(
    snapshot: Snapshot, healthy: Mapping[ResourceName, int]
) -> Mapping[ResourceName, int]:
    """Return healthy shares, raised to what pods request while some arrive.

    The kubelet refuses a pod above the Node's number, also where its shares are free. It counts the
    pods that have not ended.
    """
    numbers = dict(healthy)
    for resource in healthy.keys() & snapshot.pods.arriving.keys():
        ids = snapshot.offers[resource].ids
        ending = sum(len(snapshot.gpus[gpu].ending_shares & ids[gpu]) for gpu in ids)
        wanted = min(snapshot.pods.requested.get(resource, 0), numbers[resource] + ending)
        numbers[resource] = max(numbers[resource], wanted)
    return numbers
