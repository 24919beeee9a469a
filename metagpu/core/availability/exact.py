"""Exact offers: the free shares that are held back from the scheduler. Pure.

The scheduler counts the shares of a node; it does not know on which GPU they are. Where 30 shares
are free on each of two GPUs, it would send a request of 40 that no GPU can take.

It frees a pod's shares at the pod's end and tries waiting pods at once, before any list or number
can change. So the shares of a pod that is about to end leave the list, and the number with it,
beforehand. They come back once they are free, in the choice of that moment.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from metagpu.core.availability.conflict import NONE, with_same_conflicts
from metagpu.core.availability.reasons import availability_of
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.offers import RequestRule
from metagpu.core.model.shares import ResourceName, ShareId, count_containers
from metagpu.core.model.snapshot import GpuState, HiddenShares, Offer, Snapshot, with_states


class FreePart(msgspec.Struct, frozen=True):
    """The part of one GPU that is free.

    Attributes:
        total: the shares of the resource on the GPU, free or not.
        free: the shares that could be granted now.
        full: whether the GPU serves as many containers as it can: nobody gets its free shares.
    """

    gpu: GpuId
    total: int
    free: int
    full: bool = False

    @property
    def usable(self) -> int:
        """The shares that the next request could take."""
        return 0 if self.full else self.free


def free_part(state: GpuState, offer: Offer) -> FreePart:
    """Return the part of a GPU that is free, of one resource.

    The kubelet waits while the parts of all GPUs are compared: a state keeps its own.
    """
    available, resource = availability_of(state), offer.resource
    known: tuple[Offer, FreePart] | None = available.parts.get(resource)
    if known is not None and known[0] is offer:
        return known[1]
    gpu, shares, full = state.gpu.id, offer.ids[state.gpu.id], False
    if (most := offer.rule.max_containers.get(gpu)) is not None:
        backend = offer.by_gpu[gpu][0].backend
        leases = (lease for lease in state.leases.values() if lease.share.backend == backend)
        full = count_containers(leases) >= most
    part = FreePart(gpu, len(shares), available.count_free(shares), full)
    available.parts[resource] = offer, part
    return part


def free_parts(snapshot: Snapshot, offer: Offer) -> list[FreePart]:
    """Return the free part of each GPU of a resource, by index."""
    return [free_part(snapshot.gpus[gpu], offer) for gpu in offer.by_gpu]


def _counted_parts(snapshot: Snapshot, offer: Offer) -> list[FreePart]:
    """Return the free parts that pods are bound for: of no GPU whose turn ends."""
    parts = []
    for gpu, shares in offer.by_gpu.items():
        state = snapshot.gpus[gpu]
        turn = state.present_turn if state.turn is not None else None
        if turn is None or not turn.withdrawn or turn.backend != shares[0].backend:
            parts.append(free_part(state, offer))
    return parts


def held_back_gpus(rule: RequestRule, parts: Sequence[FreePart]) -> frozenset[GpuId]:
    """Return the GPUs whose free shares are held back, of one resource.

    Of what is left, each request up to the sum can be placed, under `ONE_GPU` each request that a
    GPU could ever take. No larger sum has this property: the GPUs left are those that a request of
    the whole sum would need.

    Args:
        rule: the sets of shares that one request may take.
        parts: every GPU with shares of the resource, by index: of equal parts the first is offered.
    """
    if rule is RequestRule.ANY:
        return frozenset()

    usable = {part.gpu: 0 if part.full else part.free for part in parts}
    totals = {part.gpu: part.total for part in parts}
    largest = max(totals.values(), default=0)
    fits_largest = largest in usable.values()
    if rule is RequestRule.ONE_GPU and fits_largest:
        offered = {gpu for gpu, count in usable.items() if count}
    else:
        offered = {gpu for gpu in usable if fits_largest and usable[gpu] == totals[gpu]}
        rest = {gpu: count for gpu, count in usable.items() if count and gpu not in offered}
        if rest:
            offered.add(max(rest, key=rest.__getitem__))
    return frozenset([part.gpu for part in parts if part.free and part.gpu not in offered])


def largest_request(rule: RequestRule, parts: Sequence[FreePart]) -> int:
    """Return the number of shares of the largest request that could be placed now."""
    if rule is RequestRule.ANY:
        return sum(part.usable for part in parts)

    one_gpu = max((part.usable for part in parts), default=0)
    if rule is RequestRule.ONE_GPU:
        return one_gpu
    whole = sum(part.total for part in parts if part.usable == part.total)
    rest = max((part.usable for part in parts if part.usable != part.total), default=0)
    largest = max((part.total for part in parts), default=0)
    return whole + rest if whole + rest > largest else one_gpu


def with_held_back(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with the shares that its offers' rules hide.

    These are free shares, and leased ones of pods that are about to end, or have ended.
    """
    held: dict[GpuId, dict[ResourceName, frozenset[ShareId]]] = {}
    ending = defaultdict[GpuId, set[ShareId]](set)
    pods = snapshot.pods.terminating - snapshot.readmitted
    for resource, offer in snapshot.offers.items():
        if offer.rule.requests is not RequestRule.ANY:
            for gpu in held_back_gpus(offer.rule.requests, _counted_parts(snapshot, offer)):
                held.setdefault(gpu, {})[resource] = offer.ids[gpu]
            if pods:
                for gpu, shares in _ending_shares(snapshot, offer, pods).items():
                    ending[gpu] |= shares

    changed = []
    for gpu, state in snapshot.gpus.items():
        hidden = None
        if gpu in held or gpu in ending:
            own = MappingProxyType(held.get(gpu, {}))
            hidden = HiddenShares(own, frozenset(ending.get(gpu, NONE)))
        if hidden != state.hidden:
            changed.append(with_same_conflicts(state, replace(state, hidden=hidden)))
    return with_states(snapshot, changed) if changed else snapshot


def held_back_of(state: GpuState) -> Mapping[ResourceName, frozenset[ShareId]]:
    """Return the shares of a GPU that are held back, by resource."""
    return state.hidden.held_back if state.hidden is not None else {}


def _ending_shares(
    snapshot: Snapshot, offer: Offer, pods: AbstractSet[tuple[str, str]]
) -> Mapping[GpuId, set[ShareId]]:
    """Return the shares of an offer that these pods hold, which are about to end."""
    found = defaultdict[GpuId, set[ShareId]](set)
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
        hidden = ((gpu, snapshot.gpus[gpu].hidden) for gpu in ids)
        ending = sum(len(shares.ending & ids[gpu]) for gpu, shares in hidden if shares is not None)
        wanted = min(snapshot.pods.requested.get(resource, 0), numbers[resource] + ending)
        numbers[resource] = max(numbers[resource], wanted)
    return numbers
