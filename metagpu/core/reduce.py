"""What each fact makes of a snapshot.

`reduce` is the whole mutation of the daemon: no clock, no logger, no waiting. It gives the next
snapshot and the news that others hear; a fact that says nothing new gives the same snapshot
object and no news.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from metagpu.core.facts import (
    DriverRead,
    Fact,
    GpuFact,
    GpusFound,
    LeasesObserved,
    PodsTold,
    RivalLeft,
    RivalMet,
    SharesAwaited,
    SharesGranted,
    SharesOffered,
    SharesReleased,
    TopologyRead,
)
from metagpu.core.gpu import GpuId, Topology
from metagpu.core.leasing import awaited, granted, observed, with_leases, with_states
from metagpu.core.model import FOREIGN, Lease, ResourceName, Share, ShareId, Verdict
from metagpu.core.news import Event, PodEnded
from metagpu.core.pods import KnownPods
from metagpu.core.sharing import contended, withheld
from metagpu.core.snapshot import GpuState, Offer, Snapshot
from metagpu.core.standing import stand


def reduce(  # noqa: C901, PLR0911 - one return for each kind of fact
    snapshot: Snapshot, fact: Fact
) -> tuple[Snapshot, tuple[Event, ...]]:
    """Give the snapshot that follows from a fact, and the news in it.

    News are facts that changed something: `LeasesObserved` becomes `SharesReleased` for what ended.
    A fact about a GPU that is not known changes nothing.
    """
    match fact:
        case GpusFound():
            return _found(snapshot, fact)
        case TopologyRead():
            return _connected(snapshot, fact)
        case DriverRead():
            same = fact.versions == snapshot.versions
            return (snapshot, ()) if same else (replace(snapshot, versions=fact.versions), (fact,))
        case RivalMet() | RivalLeft():
            return _rivalled(snapshot, fact)
        case SharesOffered():
            return _offered(snapshot, fact)
        case SharesGranted():
            return granted(snapshot, fact)
        case SharesAwaited():
            return awaited(snapshot, fact)
        case SharesReleased():
            return with_leases(snapshot, fact.at, ended=[share.id for share in fact.shares])
        case LeasesObserved():
            return observed(snapshot, fact)
        case PodsTold():
            return _peopled(snapshot, fact)
        case _:
            return _of_one_gpu(snapshot, fact)


def _found(snapshot: Snapshot, fact: GpusFound) -> tuple[Snapshot, tuple[Fact, ...]]:
    states = dict(snapshot.gpus)

    for gpu in fact.gpus:
        known = states.get(gpu.id)
        if known is None:
            states[gpu.id] = GpuState(gpu, Verdict(healthy=True, since=fact.at))
        elif known.gpu != gpu:
            states[gpu.id] = replace(known, gpu=gpu)

    if states == snapshot.gpus:
        return snapshot, ()

    ordered = sorted(states.values(), key=lambda state: (state.gpu.index, state.gpu.id))
    gpus = MappingProxyType({state.gpu.id: state for state in ordered})
    return replace(snapshot, gpus=gpus), (fact,)


def _rivalled(snapshot: Snapshot, fact: RivalMet | RivalLeft) -> tuple[Snapshot, tuple[Fact, ...]]:
    rivals = {it: where for it, where in snapshot.rivals.items() if it != fact.resource}
    if isinstance(fact, RivalMet):
        rivals[fact.resource] = fact.where
    if rivals == snapshot.rivals:
        return snapshot, ()
    return replace(snapshot, rivals=MappingProxyType(rivals)), (fact,)


def _connected(snapshot: Snapshot, fact: TopologyRead) -> tuple[Snapshot, tuple[Fact, ...]]:
    before = snapshot.topology.connections
    connections = {**before, **fact.topology.connections}
    if connections == before:
        return snapshot, ()

    return replace(snapshot, topology=Topology(MappingProxyType(connections))), (fact,)


def _peopled(snapshot: Snapshot, fact: PodsTold) -> tuple[Snapshot, tuple[Event, ...]]:
    before, after = snapshot.pods.by_uid, {pod.uid: pod for pod in fact.pods}
    if after == before:
        return snapshot, ()

    ended = [
        PodEnded(pod)
        for uid, pod in before.items()
        if not pod.ended and (uid not in after or after[uid].ended)
    ]
    return replace(snapshot, pods=KnownPods.of(fact.pods)), (fact, *ended)


def _of_one_gpu(snapshot: Snapshot, fact: GpuFact) -> tuple[Snapshot, tuple[Fact, ...]]:
    before = snapshot.gpus.get(fact.gpu)
    if before is None or (after := stand(before, fact)) is before:
        return snapshot, ()

    return with_states(snapshot, [after]), (fact,)


def _offered(snapshot: Snapshot, fact: SharesOffered) -> tuple[Snapshot, tuple[Fact, ...]]:
    states = []
    offered = [share for share in fact.shares if share.gpu in snapshot.gpus]

    for state in snapshot.gpus.values():
        shares = tuple(share for share in offered if share.gpu == state.gpu.id)
        leases = _recognised(state.leases, shares)
        states.append(
            state
            if shares == state.shares
            else replace(
                state,
                shares=shares,
                leases=leases,
                # Held shares that are not on offer any more are still in the way of others.
                contended=contended(list(dict.fromkeys([*shares, *_held(leases)]))),
                withheld=withheld(shares, leases, state.cleaning, state.stocks),
            )
        )

    offers = {resource: _offer(resource, offered) for resource in fact.resources}
    if offers == snapshot.offers:
        return snapshot, ()

    # An offer that stays the same stays the same object: its readers are not woken.
    kept = {
        resource: snapshot.offers[resource] if snapshot.offers.get(resource) == offer else offer
        for resource, offer in offers.items()
    }
    return replace(with_states(snapshot, states), offers=MappingProxyType(kept)), (fact,)


def _held(leases: Mapping[ShareId, Lease]) -> list[Share]:
    return [lease.share for lease in leases.values()]


def _recognised(
    leases: Mapping[ShareId, Lease], shares: Iterable[Share]
) -> Mapping[ShareId, Lease]:
    """Take foreign leases for ours where the ids turn out to be on offer under the same name.

    At a start the kubelet may have told of them before anything was offered.
    """
    foreign = {i: lease for i, lease in leases.items() if lease.share.backend == FOREIGN}
    ours = {
        share.id: Lease(share, lease.since, lease.holder)
        for share in shares
        if (lease := foreign.get(share.id)) and lease.share.resource in ("", share.resource)
    }
    return MappingProxyType({**leases, **ours}) if ours else leases


def _offer(resource: ResourceName, shares: Iterable[Share]) -> Offer:
    mine = {share.id: share for share in shares if share.resource == resource}
    by_gpu: dict[GpuId, list[Share]] = {}

    for share in mine.values():
        by_gpu.setdefault(share.gpu, []).append(share)

    return Offer(resource, {gpu: tuple(those) for gpu, those in by_gpu.items()}, mine)
