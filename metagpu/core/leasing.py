"""What grants, releases and the kubelet's account make of a snapshot: the part about leases."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from metagpu.core.facts import (
    Fact,
    LeasesObserved,
    SharesAwaited,
    SharesGranted,
    SharesReleased,
)
from metagpu.core.gpu import GpuId
from metagpu.core.model import FOREIGN, Lease, ResourceName, Share, ShareId, by_gpu, gpu_of
from metagpu.core.sharing import withheld
from metagpu.core.snapshot import GpuState, Snapshot

_MIG: Final = "MIG-"
"""Begins the ids by which NVIDIA's device plugin offers MIG devices."""


def observed(snapshot: Snapshot, fact: LeasesObserved) -> tuple[Snapshot, tuple[Fact, ...]]:
    """Take in the kubelet's account (see `LeasesObserved`)."""
    started: list[Lease] = []
    ended = [
        share_id
        for state in snapshot.gpus.values()
        for share_id, lease in state.leases.items()
        if fact.settled
        and share_id not in fact.holders
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
            same = known is not None and known.holder in (None, holder)
            waits = known is not None and known.awaited and same
            started.append(Lease(share, known.since if known else fact.at, holder, waits))

    elsewhere = frozenset(str(share) for share in fact.holders if share.startswith(_MIG))
    new = [it for it in snapshot.gpus.values() if it.elsewhere != elsewhere]
    if new and fact.settled:
        snapshot = with_states(snapshot, [replace(it, elsewhere=elsewhere) for it in new])
    return with_leases(snapshot, fact.at, started=_by_gpu(started), ended=ended)


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


def awaited(snapshot: Snapshot, fact: SharesAwaited) -> tuple[Snapshot, tuple[Fact, ...]]:
    """Take in that containers wait for what stands for their shares (see `SharesAwaited`)."""
    again = [
        replace(lease, since=fact.at, awaited=True)
        for share in fact.shares
        if (state := snapshot.gpus.get(share.gpu)) and (lease := state.leases.get(share.id))
    ]
    return with_leases(snapshot, fact.at, started=_by_gpu(again))


def granted(snapshot: Snapshot, fact: SharesGranted) -> tuple[Snapshot, tuple[Fact, ...]]:
    """Begin the leases of what was granted."""
    started = {
        gpu: {share.id: Lease(share, fact.at) for share in those}
        for gpu, those in by_gpu(fact.shares).items()
    }
    return with_leases(snapshot, fact.at, started=started)


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
    """Begin and end leases; the news are the releases, then the grants."""
    ending = defaultdict[GpuId, list[ShareId]](list)
    for share_id in ended:
        ending[gpu_of(share_id)].append(share_id)

    states: list[GpuState] = []
    begun: list[Share] = []
    released: list[Share] = []

    for gpu, state in snapshot.gpus.items():
        if gpu not in ending and gpu not in started:
            continue

        new, held = started.get(gpu, {}), state.leases.copy()
        released += [held.pop(i).share for i in ending[gpu] if i in held]
        begun += [lease.share for i, lease in new.items() if i not in held]
        held.update(new)
        if held != state.leases:
            # What is on offer of a GPU where nothing can conflict may be granted without a count.
            unknown = FOREIGN in {lease.share.backend for lease in new.values()}
            cleaning = _cleaning(state, held, at)
            busy = state.contended or state.withheld or state.cleaning or cleaning or state.stocks
            simple = not (busy or ending[gpu] or unknown)
            lost = (
                state.withheld if simple else withheld(state.shares, held, cleaning, state.stocks)
            )
            states.append(
                replace(state, leases=MappingProxyType(held), withheld=lost, cleaning=cleaning)
            )

    if not states:
        return snapshot, ()
    news: list[Fact] = [SharesReleased(tuple(released), at)] if released else []
    news += [SharesGranted(tuple(begun), at)] if begun else []
    return with_states(snapshot, states), tuple(news)


def _cleaning(state: GpuState, held: Mapping[ShareId, Lease], at: float) -> Mapping[str, float]:
    """Say who cleans a GPU once these are its leases: who had some, has none and does clean."""
    if not state.cleans:
        return state.cleaning

    before = {lease.share.backend for lease in state.leases.values()}
    now = {lease.share.backend for lease in held.values()}
    begun = dict.fromkeys(sorted((before - now) & state.cleans), at)
    return MappingProxyType({b: t for b, t in {**state.cleaning, **begun}.items() if b not in now})


def with_states(snapshot: Snapshot, states: Iterable[GpuState]) -> Snapshot:
    """Put new states of some GPUs in the place of the old."""
    gpus = snapshot.gpus.copy()
    gpus.update((state.gpu.id, state) for state in states)
    return replace(snapshot, gpus=MappingProxyType(gpus))
