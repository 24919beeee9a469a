"""What each fact makes of a snapshot.

`reduce` is the whole mutation of the daemon: no clock, no logger, no waiting. It gives the next
snapshot and the news that others hear; a fact that says nothing new gives the same snapshot
object and no news.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import assert_never

from metagpu.core.facts import (
    Fact,
    GpuFaulted,
    GpuRecovered,
    GpusFound,
    LeasesObserved,
    SharesGranted,
    SharesOffered,
    SharesReleased,
    TopologyRead,
)
from metagpu.core.model import (
    FOREIGN,
    GpuId,
    GpuState,
    Lease,
    Offer,
    ResourceName,
    Share,
    ShareId,
    Snapshot,
    Topology,
    Verdict,
    contended,
    gpu_of,
    withheld,
)


def reduce(  # noqa: PLR0911 - one return for each kind of fact
    snapshot: Snapshot, fact: Fact
) -> tuple[Snapshot, tuple[Fact, ...]]:
    """Give the snapshot that follows from a fact, and the news in it.

    News are facts that changed something: `LeasesObserved` becomes `SharesReleased` for what ended.
    A fact about a GPU that is not known changes nothing.
    """
    match fact:
        case GpusFound():
            return _found(snapshot, fact)
        case TopologyRead():
            return _connected(snapshot, fact)
        case GpuFaulted():
            return _judged(
                snapshot, fact, Verdict(healthy=False, since=fact.at, reason=fact.reason)
            )
        case GpuRecovered():
            return _judged(snapshot, fact, Verdict(healthy=True, since=fact.at))
        case SharesOffered():
            return _offered(snapshot, fact)
        case SharesGranted():
            return _with_leases(
                snapshot, fact.at, started=[Lease(share, fact.at) for share in fact.shares]
            )
        case SharesReleased():
            return _with_leases(snapshot, fact.at, ended=[share.id for share in fact.shares])
        case LeasesObserved():
            return _observed(snapshot, fact)
        case _:
            assert_never(fact)


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


def _connected(snapshot: Snapshot, fact: TopologyRead) -> tuple[Snapshot, tuple[Fact, ...]]:
    before = snapshot.topology.connections
    connections = {**before, **fact.topology.connections}
    if connections == before:
        return snapshot, ()

    return replace(snapshot, topology=Topology(MappingProxyType(connections))), (fact,)


def _judged(
    snapshot: Snapshot, fact: GpuFaulted | GpuRecovered, verdict: Verdict
) -> tuple[Snapshot, tuple[Fact, ...]]:
    state = snapshot.gpus.get(fact.gpu)
    if state is None or state.verdict.healthy == verdict.healthy:
        return snapshot, ()

    return _with_states(snapshot, [replace(state, verdict=verdict)]), (fact,)


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
                withheld=withheld(shares, leases),
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
    return replace(_with_states(snapshot, states), offers=MappingProxyType(kept)), (fact,)


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


def _observed(snapshot: Snapshot, fact: LeasesObserved) -> tuple[Snapshot, tuple[Fact, ...]]:
    started: list[Lease] = []
    ended = [
        share_id
        for state in snapshot.gpus.values()
        for share_id, lease in state.leases.items()
        if share_id not in fact.holders
        and lease.since < fact.at
        and (lease.holder is not None or fact.at - lease.since >= fact.patience)
    ]

    for share_id, holder in fact.holders.items():
        if (state := snapshot.gpus.get(gpu_of(share_id))) is None:
            continue
        known = state.leases.get(share_id)
        if known is not None and known.since >= fact.at:
            continue  # granted since: the answer may be about who had it before
        share = _held_share(snapshot, share_id, known, fact.resources.get(share_id))
        if known is None or (known.holder, known.share) != (holder, share):
            started.append(Lease(share, known.since if known else fact.at, holder))

    return _with_leases(snapshot, fact.at, started=started, ended=ended)


def _held_share(
    snapshot: Snapshot, share_id: ShareId, known: Lease | None, resource: ResourceName | None
) -> Share:
    """Find what the kubelet means by an id that a container holds under a resource's name."""
    if known is not None and resource in (None, known.share.resource):
        return known.share

    for offer in snapshot.offers.values():
        if share_id in offer.shares and resource in (None, offer.resource):
            return offer.shares[share_id]

    slot = share_id.partition("::")[2]
    name = resource or ResourceName("")
    return Share(share_id, gpu_of(share_id), name, FOREIGN, -1, frozenset((slot,)), 0)


def _with_leases(
    snapshot: Snapshot,
    at: float,
    *,
    started: Iterable[Lease] = (),
    ended: Iterable[ShareId] = (),
) -> tuple[Snapshot, tuple[Fact, ...]]:
    starting: defaultdict[GpuId, dict[ShareId, Lease]] = defaultdict(dict)
    ending: defaultdict[GpuId, list[ShareId]] = defaultdict(list)
    for lease in started:
        starting[lease.share.gpu][lease.share.id] = lease
    for share_id in ended:
        ending[gpu_of(share_id)].append(share_id)

    states: list[GpuState] = []
    granted: list[Share] = []
    released: list[Share] = []

    for gpu, state in snapshot.gpus.items():
        if gpu not in ending and gpu not in starting:
            continue

        new, held = starting[gpu], dict(state.leases)
        released += [held.pop(i).share for i in ending[gpu] if i in held]
        granted += [lease.share for i, lease in new.items() if i not in held]
        held |= new
        if held != state.leases:
            # What is on offer of a GPU where nothing can conflict may be granted without a count.
            unknown = any(lease.share.backend == FOREIGN for lease in new.values())
            simple = not (state.contended or state.withheld or ending[gpu] or unknown)
            lost = state.withheld if simple else withheld(state.shares, held)
            states.append(replace(state, leases=MappingProxyType(held), withheld=lost))

    if not states:
        return snapshot, ()
    news: list[Fact] = [SharesReleased(tuple(released), at)] if released else []
    news += [SharesGranted(tuple(granted), at)] if granted else []
    return _with_states(snapshot, states), tuple(news)


def _with_states(snapshot: Snapshot, states: Iterable[GpuState]) -> Snapshot:
    gpus = dict(snapshot.gpus)
    gpus.update((state.gpu.id, state) for state in states)
    return replace(snapshot, gpus=MappingProxyType(gpus))
