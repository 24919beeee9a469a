"""Transitions of leases: claims, releases and the kubelet's lists of holders."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import (
    UNKNOWN_BACKEND,
    Holder,
    Lease,
    ResourceName,
    Share,
    ShareId,
    by_gpu,
    gpu_of,
)
from metagpu.core.model.snapshot import Cleanup, GpuState, Snapshot, with_states
from metagpu.core.state.facts import (
    Fact,
    KubeletStarted,
    LeasesObserved,
    ResourceClaimsRead,
    SharesClaimed,
    SharesPending,
    SharesReleased,
)

_GPU: Final = "GPU-"
_MIG: Final = "MIG-"
"""The prefix of the ids under which NVIDIA's device plugin offers MIG devices."""


def apply_observed(snapshot: Snapshot, fact: LeasesObserved) -> tuple[Snapshot, tuple[Fact, ...]]:
    """Begin and end leases by what a look at the kubelet found: the one rule.

    `docs/development/leases.md` has it as a table.
    """
    known = {i: lease for state in snapshot.gpus.values() for i, lease in state.leases.items()}
    # A claim after the request is not in the list, which may name the holder before.
    asked = {i: lease for i, lease in known.items() if lease.since < fact.at}
    gone = {
        i: lease
        for i, lease in snapshot.vanished.items()
        if lease.resource_claim is not None and lease.share.gpu not in snapshot.gpus
    }
    named = _named_by_claims([*known.values(), *gone.values()], fact)
    asked = {i: lease for i, lease in asked.items() if lease.resource_claim is None}
    unnamed = [lease for i, lease in asked.items() if i not in fact.holders]
    ended = _ended(known.values(), unnamed, fact)
    allocated = fact.allocated or {}

    confirmed = [
        replace(lease, unconfirmed=False)
        for lease in unnamed
        if lease.unconfirmed and fact.confirms and lease.share.id in allocated
    ]
    listed = [
        _listed(snapshot, share_id, holder, lease, fact)
        for share_id, holder in fact.holders.items()
        if (lease := asked.get(share_id)) is None or _is_news(lease, holder, fact)
        if gpu_of(share_id) in snapshot.gpus and (lease or share_id not in known)
    ]
    late = {gpu for gpu, state in snapshot.gpus.items() if state.kubelet.unknown_leases}
    fresh = allocated.keys() - known.keys() - fact.holders.keys() if fact.begins or late else ()
    begun = [
        Lease(
            _held_share(snapshot, i, None, allocated[i]),
            fact.at,
            unconfirmed=not fact.confirms,
            from_checkpoint=True,
        )
        for i in fresh
        if gpu_of(i) in (snapshot.gpus if fact.begins else late)
    ]

    if fact.kubelet_ready:
        vanished = {
            i: _listed(snapshot, i, holder, snapshot.vanished.get(i), fact)
            for i, holder in fact.holders.items()
            if i not in known and i.startswith(_GPU)
            if gpu_of(i) not in snapshot.gpus and i not in fact.ended
        }
        renamed = {lease.share.id: lease for lease in named if lease.share.id in gone}
        vanished |= gone | renamed
        if vanished != snapshot.vanished:
            snapshot = replace(snapshot, vanished=MappingProxyType(vanished))
        snapshot = _with_allocated(snapshot, fact)
    snapshot = _with_word(snapshot, fact)
    started = _by_gpu([*confirmed, *listed, *begun, *named])
    return with_leases(snapshot, fact.at, started=started, ended=ended)


def _is_news(lease: Lease, holder: Holder, fact: LeasesObserved) -> bool:
    """Return whether a list that has a lease's share changes the lease."""
    return (
        lease.holder != holder
        or lease.unconfirmed
        or lease.unanswered
        or lease.from_checkpoint
        or fact.resources.get(lease.share.id) not in (None, lease.share.resource)
    )


def _listed(
    snapshot: Snapshot,
    share_id: ShareId,
    holder: Holder,
    known: Lease | None,
    fact: LeasesObserved,
) -> Lease:
    """Return the lease of a share whose holder the list names."""
    share = _held_share(snapshot, share_id, known, fact.resources.get(share_id))
    if known is None:
        return Lease(share, fact.at, holder)
    at_start = known.provisioned_at_start and known.holder in (None, holder)
    return Lease(share, known.since, holder, at_start)


def _named_by_claims(known: Iterable[Lease], fact: LeasesObserved) -> list[Lease]:
    """Return the leases of ResourceClaims whose containers are others than before.

    The holder of a claim that several containers share is the same as long as the kubelet lists it.
    """
    found = []
    for lease in known:
        if (claim := lease.resource_claim) is not None:
            holders = fact.of_claims.get((claim.uid, lease.share.id), ())
            if holders:
                holder = lease.holder if lease.holder in holders else holders[0]
                sharers = tuple(other for other in sorted(set(holders), key=str) if other != holder)
                if (holder, sharers) != (lease.holder, lease.sharers):
                    found.append(replace(lease, holder=holder, sharers=sharers))
    return found


def _ended(known: Iterable[Lease], unnamed: Iterable[Lease], fact: LeasesObserved) -> list[ShareId]:
    """Return the shares whose leases have ended, of those that the list does not name."""
    claims = [
        fact.at if lease.unanswered else lease.since
        for lease in known
        if lease.holder is None
        and lease.share.id not in fact.holders
        and lease.resource_claim is None
    ]
    last_claim = max(claims, default=fact.at)
    held_again = {(holder, fact.resources.get(i)) for i, holder in fact.holders.items()}
    return [lease.share.id for lease in unnamed if _has_ended(lease, fact, last_claim, held_again)]


def _has_ended(
    lease: Lease,
    fact: LeasesObserved,
    last_claim: float,
    held_again: Collection[tuple[Holder, ResourceName | None]],
) -> bool:
    """Return whether a lease that the list does not name has ended.

    Args:
        lease: was there when the kubelet was asked.
        fact: what the kubelet says.
        last_claim: the time of the last claim of a pod that may still be in admission.
        held_again: the holders in the list, each with a resource that it holds.
    """
    share, holder = lease.share, lease.holder
    if not fact.kubelet_ready or lease.unanswered:
        return False
    if share.id in fact.released:
        return True
    if holder is None:
        # A pod in admission, or an init container, which the kubelet never lists.
        named = fact.allocated is not None and share.id in fact.allocated
        longest = fact.longest_admission if named else fact.admission_timeout
        return fact.at - last_claim >= longest and share.id not in fact.running
    if lease.unconfirmed and (holder.namespace, holder.pod) in fact.pods:
        # The kubelet lost its checkpoint: the pod goes on without the kubelet's knowledge of it.
        return holder in fact.stopped or (holder, share.resource) in held_again
    return True


def apply_kubelet_started(
    snapshot: Snapshot, fact: KubeletStarted
) -> tuple[Snapshot, tuple[Fact, ...]]:
    """Make all leases unconfirmed: the new kubelet may not know of them.

    Those of ResourceClaims stay: the kubelet gives their shares to nobody.
    """
    if fact.kubelet == snapshot.kubelet:
        return snapshot, ()
    leases = [
        replace(lease, unconfirmed=True)
        for state in snapshot.gpus.values()
        for lease in state.leases.values()
        if lease.resource_claim is None
    ]
    snapshot, _ = with_leases(snapshot, 0, started=_by_gpu(leases))
    readmitted = snapshot.pods.terminating
    return replace(snapshot, kubelet=fact.kubelet, readmitted=readmitted), (fact,)


def _with_allocated(snapshot: Snapshot, fact: LeasesObserved) -> Snapshot:
    """Return the snapshot with the ids of the checkpoint; unread, it changes none."""
    if fact.allocated is None:
        return snapshot
    found = defaultdict[GpuId, dict[ShareId, frozenset[tuple[str, str]]]](dict)
    for share_id in fact.allocated.keys() - fact.ended:
        found[gpu_of(share_id)][share_id] = fact.containers.get(share_id, frozenset())
    changed = [
        replace(state, allocated=MappingProxyType(found[gpu]))
        for gpu, state in snapshot.gpus.items()
        if state.allocated != found[gpu]
    ]
    return with_states(snapshot, changed) if changed else snapshot


def _with_word(snapshot: Snapshot, fact: LeasesObserved) -> Snapshot:
    """Return the snapshot with the kubelet's word beside leases; unread parts stay."""
    devices = frozenset(str(share) for share in fact.holders if share.startswith(_MIG))
    states = []
    for gpu, state in snapshot.gpus.items():
        word = state.kubelet
        if fact.kubelet_ready:
            word = replace(word, mig_devices_of_other_plugins=devices)
        if fact.allocated is not None:
            word = replace(word, nodes=fact.nodes.get(gpu, {}))
        if word != state.kubelet:
            states.append(replace(state, kubelet=word))
    return with_states(snapshot, states) if states else snapshot


def _held_share(
    snapshot: Snapshot, share_id: ShareId, known: Lease | None, resource: ResourceName | None
) -> Share:
    """Return the share that an id of the kubelet names under a resource name."""
    if known is not None and resource in (None, known.share.resource):
        return known.share

    for offer in snapshot.offers.values():
        if share_id in offer.shares and resource in (None, offer.resource):
            return offer.shares[share_id]

    slot = share_id.partition("::")[2]
    name = resource or ResourceName("")
    return Share(share_id, gpu_of(share_id), name, UNKNOWN_BACKEND, -1, frozenset((slot,)), 0)


def apply_pending(snapshot: Snapshot, fact: SharesPending) -> tuple[Snapshot, tuple[Fact, ...]]:
    """Record that containers wait for their hardware devices (see `SharesPending`)."""
    pending = [
        replace(lease, since=fact.at, provisioned_at_start=True, unconfirmed=False)
        for share in fact.shares
        if (state := snapshot.gpus.get(share.gpu)) and (lease := state.leases.get(share.id))
    ]
    return with_leases(snapshot, fact.at, started=_by_gpu(pending))


def apply_claimed(snapshot: Snapshot, fact: SharesClaimed) -> tuple[Snapshot, tuple[Fact, ...]]:
    """Begin the leases of claimed shares."""
    started = {
        gpu: {
            share.id: Lease(
                share,
                fact.at,
                provisioned_at_start=fact.resource_claim is not None,
                unanswered=fact.unanswered,
                resource_claim=fact.resource_claim,
                settings=fact.settings.get(share.id, ""),
                pool=fact.pools.get(share.id, ""),
            )
            for share in shares
        }
        for gpu, shares in by_gpu(fact.shares).items()
    }
    return with_leases(snapshot, fact.at, started=started)


def apply_resource_claims(
    snapshot: Snapshot, fact: ResourceClaimsRead
) -> tuple[Snapshot, tuple[Fact, ...]]:
    """Begin the leases of prepared ResourceClaims that have none.

    Those of a claim whose pool was not known get it. Of a GPU that the node does not have, they are
    kept as `vanished`.
    """
    leases = [
        Lease(
            _held_share(snapshot, share_id, None, None),
            fact.at,
            provisioned_at_start=True,
            resource_claim=claim,
            settings=device.settings,
            pool=device.pool,
        )
        if known is None
        else replace(known, pool=device.pool)
        for claim, devices in fact.claims.items()
        for device in devices
        for state in (snapshot.gpus.get(device.gpu),)
        for share_id in device.share_ids
        for known in ((snapshot.vanished if state is None else state.leases).get(share_id),)
        if known is None or (known.resource_claim == claim and known.pool == "" != device.pool)
    ]
    if gone := {lease.share.id: lease for lease in leases if lease.share.gpu not in snapshot.gpus}:
        snapshot = replace(snapshot, vanished=MappingProxyType({**snapshot.vanished, **gone}))
    return with_leases(snapshot, fact.at, started=_by_gpu(leases))


def with_returned(snapshot: Snapshot, at: float) -> tuple[Snapshot, tuple[Fact, ...]]:
    """Return leases of ResourceClaims to GPUs that are found again."""
    found = {
        i: lease
        for i, lease in snapshot.vanished.items()
        if lease.resource_claim is not None and lease.share.gpu in snapshot.gpus
    }
    left = {i: lease for i, lease in snapshot.vanished.items() if i not in found}
    snapshot = replace(snapshot, vanished=MappingProxyType(left)) if found else snapshot
    return with_leases(snapshot, at, started=_by_gpu(found.values()))


def _by_gpu(leases: Iterable[Lease]) -> dict[GpuId, dict[ShareId, Lease]]:
    found = defaultdict[GpuId, dict[ShareId, Lease]](dict)
    for lease in leases:
        found[lease.share.gpu][lease.share.id] = lease
    return found


def with_leases(
    snapshot: Snapshot,
    at: float,
    *,
    started: Mapping[GpuId, Mapping[ShareId, Lease]] = MappingProxyType({}),
    ended: Iterable[ShareId] = (),
) -> tuple[Snapshot, tuple[Fact, ...]]:
    """Begin and end leases; the events are the releases, then the claims."""
    ending = defaultdict[GpuId, list[ShareId]](list)
    for share_id in ended:
        ending[gpu_of(share_id)].append(share_id)
    if gone := snapshot.vanished.keys() & set(chain.from_iterable(ending.values())):
        left = {
            share_id: its for share_id, its in snapshot.vanished.items() if share_id not in gone
        }
        snapshot = replace(snapshot, vanished=MappingProxyType(left))

    states: list[GpuState] = []
    begun: list[Share] = []
    released: list[Share] = []

    for gpu, state in snapshot.gpus.items():
        if gpu not in ending and gpu not in started:
            continue

        new, held = started.get(gpu, {}), state.leases.copy()
        if gpu in ending:
            released += [held.pop(i).share for i in ending[gpu] if i in held]
        begun += [lease.share for i, lease in new.items() if i not in held]
        held.update(new)
        if held != state.leases:
            # A lease of a share on offer changes nothing about whether shares can conflict.
            unknown = UNKNOWN_BACKEND in {lease.share.backend for lease in new.values()}
            states.append(
                replace(
                    state,
                    leases=MappingProxyType(held),
                    can_conflict=state.can_conflict or unknown,
                    cleanup=_cleanup(state, held, at) if state.cleanup.backends else state.cleanup,
                )
            )

    if not states:
        return snapshot, ()
    events: list[Fact] = [SharesReleased(tuple(released), at)] if released else []
    events += [SharesClaimed(tuple(begun), at)] if begun else []
    return with_states(snapshot, states), tuple(events)


def _cleanup(state: GpuState, held: Mapping[ShareId, Lease], at: float) -> Cleanup:
    """Return the cleanups of a GPU with these leases.

    A backend begins when its last lease has ended, and stops when it gets another lease.
    """
    backends, since = state.cleanup.backends, state.cleanup.since
    before = {lease.share.backend for lease in state.leases.values()}
    now = {lease.share.backend for lease in held.values()}
    begun = dict.fromkeys(sorted((before - now) & backends), at)
    left = {backend: time for backend, time in {**since, **begun}.items() if backend not in now}
    return Cleanup(backends, MappingProxyType(left))
