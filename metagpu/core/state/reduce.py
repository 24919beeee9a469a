"""The reducer: the snapshot that follows from a fact.

`reduce` is the whole mutation of the daemon: no clock, no logger, no waiting. It returns the next
snapshot and the events for the bus; a fact without a change returns the same snapshot object and no
events.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from metagpu.core.availability.conflict import can_conflict
from metagpu.core.availability.exact import with_held_back
from metagpu.core.model.gpu import GpuId, Topology
from metagpu.core.model.offers import Api, OfferRule
from metagpu.core.model.pods import PodIndex
from metagpu.core.model.shares import (
    UNKNOWN_BACKEND,
    Fault,
    Lease,
    ResourceName,
    Share,
    ShareId,
    Verdict,
)
from metagpu.core.model.snapshot import GpuState, KubeletWord, Offer, Snapshot, with_states
from metagpu.core.state.events import Event, PodEnded
from metagpu.core.state.facts import (
    CompetingPluginFound,
    CompetingPluginGone,
    DriverRead,
    EarlierLeases,
    Fact,
    GpuFact,
    GpusFound,
    KubeletStarted,
    LeasesObserved,
    NodeWithdrawn,
    PodsListed,
    RegistrationProblemFound,
    RegistrationProblemGone,
    ResourceClaimsRead,
    SharesClaimed,
    SharesOffered,
    SharesPending,
    SharesReleased,
    TopologyRead,
    TurnsChanged,
    UnreadableGpusFound,
)
from metagpu.core.state.gpu_state import apply_gpu_fact
from metagpu.core.state.leases import (
    apply_claimed,
    apply_kubelet_started,
    apply_observed,
    apply_pending,
    apply_resource_claims,
    with_leases,
    with_returned,
)

UNASKED: Final = "it has just been found, and the kubelet has not been asked since"


def reduce(snapshot: Snapshot, fact: Fact) -> tuple[Snapshot, tuple[Event, ...]]:
    """Return the snapshot that follows from a fact, and the events.

    Events are facts that changed something: `LeasesObserved` becomes `SharesReleased` for the
    leases that ended. A fact about an unknown GPU changes nothing.
    """
    following, events = _follow(snapshot, fact)
    offered = following.gpus is not snapshot.gpus or following.offers is not snapshot.offers
    ending = following.pods.terminating, following.readmitted
    if offered or ending != (snapshot.pods.terminating, snapshot.readmitted):
        following = with_held_back(following)
    return following, events


def _follow(  # noqa: C901, PLR0911, PLR0912 - one return for each kind of fact
    snapshot: Snapshot, fact: Fact
) -> tuple[Snapshot, tuple[Event, ...]]:
    match fact:
        case GpusFound():
            return _gpus_found(snapshot, fact)
        case UnreadableGpusFound():
            return _unreadable_found(snapshot, fact)
        case TopologyRead():
            return _topology_read(snapshot, fact)
        case DriverRead():
            same = fact.versions == snapshot.versions
            return (snapshot, ()) if same else (replace(snapshot, versions=fact.versions), (fact,))
        case CompetingPluginFound() | CompetingPluginGone():
            return _competitor(snapshot, fact)
        case RegistrationProblemFound() | RegistrationProblemGone():
            return _registration_problem(snapshot, fact)
        case SharesOffered():
            return _shares_offered(snapshot, fact)
        case TurnsChanged():
            return _turns_changed(snapshot, fact)
        case SharesClaimed():
            return apply_claimed(snapshot, fact)
        case SharesPending():
            return apply_pending(snapshot, fact)
        case ResourceClaimsRead():
            return apply_resource_claims(snapshot, fact)
        case SharesReleased():
            return with_leases(snapshot, fact.at, ended=[share.id for share in fact.shares])
        case KubeletStarted():
            return apply_kubelet_started(snapshot, fact)
        case EarlierLeases():
            return _earlier_leases(snapshot, fact)
        case LeasesObserved():
            return apply_observed(snapshot, fact)
        case NodeWithdrawn():
            return replace(snapshot, withdrawn=True, hands_over=fact.hands_over), (fact,)
        case PodsListed():
            return _pods_listed(snapshot, fact)
        case _:
            return _of_one_gpu(snapshot, fact)


def _gpus_found(snapshot: Snapshot, fact: GpusFound) -> tuple[Snapshot, tuple[Fact, ...]]:
    states = dict(snapshot.gpus)

    for gpu in fact.gpus:
        known = states.get(gpu.id)
        if known is None:
            verdict = Verdict(healthy=True, since=fact.at)
            # Found later than others, it has to wait for the kubelet's next word.
            unknown = "" if snapshot.unknown_leases is None else snapshot.unknown_leases or UNASKED
            states[gpu.id] = GpuState(gpu, verdict, kubelet=KubeletWord(unknown))
        elif known.gpu != gpu:
            states[gpu.id] = replace(known, gpu=gpu)

    if states == snapshot.gpus:
        return snapshot, ()

    ordered = sorted(states.values(), key=lambda state: (state.gpu.index, state.gpu.id))
    gpus = MappingProxyType({state.gpu.id: state for state in ordered})
    following, events = with_returned(replace(snapshot, gpus=gpus), fact.at)
    return following, (fact, *events)


def _earlier_leases(snapshot: Snapshot, fact: EarlierLeases) -> tuple[Snapshot, tuple[Fact, ...]]:
    states = [
        replace(gpu, kubelet=replace(gpu.kubelet, unknown_leases=fact.unknown))
        for gpu in snapshot.gpus.values()
        if gpu.kubelet.unknown_leases != fact.unknown
    ]
    if fact.unknown == snapshot.unknown_leases and not states:
        return snapshot, ()
    return with_states(replace(snapshot, unknown_leases=fact.unknown), states), (fact,)


def _unreadable_found(
    snapshot: Snapshot, fact: UnreadableGpusFound
) -> tuple[Snapshot, tuple[Fact, ...]]:
    before = snapshot.unreadable_gpus
    after = {
        index: Verdict(
            healthy=False,
            since=before[index].since if index in before else fact.at,
            reason=reason,
            fault=Fault.NO_ANSWER,
        )
        for index, reason in sorted(fact.reasons.items())
    }
    if after == before:
        return snapshot, ()
    return replace(snapshot, unreadable_gpus=MappingProxyType(after)), (fact,)


def _competitor(
    snapshot: Snapshot, fact: CompetingPluginFound | CompetingPluginGone
) -> tuple[Snapshot, tuple[Fact, ...]]:
    plugins = {
        name: where for name, where in snapshot.competing_plugins.items() if name != fact.resource
    }
    if isinstance(fact, CompetingPluginFound):
        plugins[fact.resource] = fact.where
    if plugins == snapshot.competing_plugins:
        return snapshot, ()
    return replace(snapshot, competing_plugins=MappingProxyType(plugins)), (fact,)


def _registration_problem(
    snapshot: Snapshot, fact: RegistrationProblemFound | RegistrationProblemGone
) -> tuple[Snapshot, tuple[Fact, ...]]:
    before = snapshot.registration_problems
    problems = {name: problem for name, problem in before.items() if name != fact.resource}
    if isinstance(fact, RegistrationProblemFound):
        problems[fact.resource] = fact.problem
    if problems == before:
        return snapshot, ()
    return replace(snapshot, registration_problems=MappingProxyType(problems)), (fact,)


def _topology_read(snapshot: Snapshot, fact: TopologyRead) -> tuple[Snapshot, tuple[Fact, ...]]:
    before = snapshot.topology.connections
    connections = {**before, **fact.topology.connections}
    if connections == before:
        return snapshot, ()

    return replace(snapshot, topology=Topology(MappingProxyType(connections))), (fact,)


def _pods_listed(snapshot: Snapshot, fact: PodsListed) -> tuple[Snapshot, tuple[Event, ...]]:
    before, after = snapshot.pods.by_uid, {pod.uid: pod for pod in fact.pods}
    if snapshot.pods.listed and after == before:
        if fact.asked <= snapshot.pods.asked:
            return snapshot, ()
        return replace(snapshot, pods=replace(snapshot.pods, asked=fact.asked)), ()

    ended = [
        PodEnded(pod)
        for uid, pod in before.items()
        if not pod.ended and (uid not in after or after[uid].ended)
    ]
    pods = PodIndex.from_pods(fact.pods, fact.asked)
    readmitted = snapshot.readmitted & pods.terminating
    return replace(snapshot, pods=pods, readmitted=readmitted), (fact, *ended)


def _of_one_gpu(snapshot: Snapshot, fact: GpuFact) -> tuple[Snapshot, tuple[Fact, ...]]:
    before = snapshot.gpus.get(fact.gpu)
    if before is None or (after := apply_gpu_fact(before, fact)) is before:
        return snapshot, ()

    return with_states(snapshot, [after]), (fact,)


def _shares_offered(snapshot: Snapshot, fact: SharesOffered) -> tuple[Snapshot, tuple[Fact, ...]]:
    states = []
    offered = [share for share in fact.shares if share.gpu in snapshot.gpus]
    of_gpu = defaultdict[GpuId, list[Share]](list)
    for share in offered:
        of_gpu[share.gpu].append(share)

    for state in snapshot.gpus.values():
        shares = tuple(of_gpu[state.gpu.id])
        api = _api_of(shares, fact)
        leases = _with_known_shares(state.leases, shares)
        states.append(
            state
            if shares == state.shares and api is state.api
            else replace(
                state,
                shares=shares,
                api=api,
                leases=leases,
                can_conflict=can_conflict(shares, leases),
            )
        )

    offers = {resource: _offer(resource, offered, fact) for resource in fact.resources}
    if offers == snapshot.offers:
        return snapshot, ()

    # An equal offer stays the same object: its readers are not woken.
    reused = {
        resource: snapshot.offers[resource] if snapshot.offers.get(resource) == offer else offer
        for resource, offer in offers.items()
    }
    return replace(with_states(snapshot, states), offers=MappingProxyType(reused)), (fact,)


def _turns_changed(snapshot: Snapshot, fact: TurnsChanged) -> tuple[Snapshot, tuple[Fact, ...]]:
    states = [
        replace(state, turn=turn)
        for gpu, turn in fact.turns.items()
        if (state := snapshot.gpus.get(gpu)) is not None and state.turn != turn
    ]
    return (with_states(snapshot, states), (fact,)) if states else (snapshot, ())


def _with_known_shares(
    leases: Mapping[ShareId, Lease], shares: Iterable[Share]
) -> Mapping[ShareId, Lease]:
    """Resolve leases of an unknown backend where the same name now offers the id.

    At a start the kubelet may report leases before anything is offered.
    """
    unknown = {i: lease for i, lease in leases.items() if lease.share.backend == UNKNOWN_BACKEND}
    recognized = {
        share.id: replace(lease, share=share)
        for share in shares
        if (lease := unknown.get(share.id)) and lease.share.resource in ("", share.resource)
    }
    return MappingProxyType({**leases, **recognized}) if recognized else leases


def _api_of(shares: Iterable[Share], fact: SharesOffered) -> Api:
    """Return the API of a GPU: that of its pool, and so of any of its shares."""
    apis = (fact.apis.get(share.resource, Api.DEVICE_PLUGIN) for share in shares)
    return next(apis, Api.DEVICE_PLUGIN)


def _offer(resource: ResourceName, shares: Iterable[Share], fact: SharesOffered) -> Offer:
    own = {share.id: share for share in shares if share.resource == resource}
    by_gpu: dict[GpuId, list[Share]] = {}

    for share in own.values():
        by_gpu.setdefault(share.gpu, []).append(share)

    ids = {gpu: frozenset(share.id for share in those) for gpu, those in by_gpu.items()}
    return Offer(
        resource,
        {gpu: tuple(those) for gpu, those in by_gpu.items()},
        own,
        ids,
        fact.rules.get(resource, OfferRule()),
        fact.apis.get(resource, Api.DEVICE_PLUGIN),
    )
