"""The one rule of sharing: which shares of a GPU exclude each other."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from types import MappingProxyType

from metagpu.core.model.shares import (
    Lease,
    ProvisionedState,
    Share,
    ShareId,
    Verdict,
)


def conflicts(a: Share, b: Share) -> bool:
    """Return whether two shares exclude each other: the one rule of sharing.

    Two shares conflict when they are on one GPU and belong to different backends or have a slot in
    common. An idle GPU has no owner; the backend of the first lease becomes its owner.
    """
    return a.gpu == b.gpu and (a.backend != b.backend or not a.footprint.isdisjoint(b.footprint))


def without_conflict(shares: Iterable[Share], held: Iterable[Share]) -> list[Share]:
    """Return the shares of one GPU that conflict with none of those that are held."""
    held = tuple(held)
    owners = {share.backend for share in held}
    taken = {slot for share in held for slot in share.footprint}
    return [it for it in shares if owners <= {it.backend} and it.footprint.isdisjoint(taken)]


def orphaned_leases(shares: Sequence[Share], leases: Mapping[ShareId, Lease]) -> tuple[Lease, ...]:
    """Find the leases of one GPU on shares that are not on offer as they were granted.

    A pod keeps its shares of an earlier configuration; another plugin may hold the GPU too.
    """
    offered = {share.id: share for share in shares}
    return tuple(
        lease
        for share_id, lease in leases.items()
        if (now := offered.get(share_id)) != lease.share
        and (now is None or not _means_the_same(now, lease.share))
    )


def _means_the_same(now: Share, granted: Share) -> bool:
    """Return whether two shares of one id are the same part of the GPU.

    A replica stands for a container: more or fewer of them change its memory, and not what it is.
    """
    return (
        (now.resource, now.backend, now.footprint)
        == (granted.resource, granted.backend, granted.footprint)
        and now.replica == granted.replica
        and (now.replica or now.memory == granted.memory)
    )


def shares_to_wait(
    shares: Sequence[Share], leases: Mapping[ShareId, Lease]
) -> frozenset[ShareId] | None:
    """Find the free shares of one GPU that wait for orphaned leases.

    `None` stands for all of them. Where a backend divides the whole GPU into other equal parts than
    before, a lease of before takes as many of the new parts as its memory needs, and a replica
    takes one. The free capacity beside any other orphaned lease is unknown: shares of one MIG
    instance say nothing of those of another.
    """
    orphaned = [lease.share for lease in orphaned_leases(shares, leases)]
    if not orphaned:
        return frozenset()
    kinds = {(it.backend, it.resource, it.replica) for it in orphaned}
    parts = [it for it in shares if (it.backend, it.resource, it.replica) in kinds]
    part = parts[0].memory if parts else 0
    countable = all(it.interchangeable for it in (*parts, *orphaned)) and part > 0
    if len(kinds) > 1 or not countable or any(it.memory != part for it in parts):
        return None

    needed = len(orphaned)
    if not parts[0].replica:
        # Each part is rounded down to a byte: so many of them need no part more.
        needed = ceil(sum(it.memory for it in orphaned) / (part + 1))
    ids = {it.id for it in orphaned}
    missing = needed - sum(it.id in ids for it in parts)
    free = [it.id for it in parts if it.id not in leases]
    return frozenset(free[max(0, len(free) - missing) :] if missing > 0 else ())


def unavailable_shares(
    shares: Sequence[Share],
    leases: Mapping[ShareId, Lease],
    cleaning: Iterable[str] = (),
    provisioned: Mapping[str, ProvisionedState] = MappingProxyType({}),
) -> frozenset[ShareId]:
    """Find the shares of one GPU that these leases and cleanups make unavailable.

    A device that no container holds makes the shares on its slots unavailable until it is known to
    be idle; a reusable one leaves its own share available. Delayed shares are unavailable.

    Orphaned leases make the shares unavailable that wait for them. A backend that cleans the GPU up
    excludes all others, as one with leases does.
    """
    held = {lease.share for lease in leases.values()}
    waiting = shares_to_wait(shares, leases)
    if waiting is None:
        return frozenset(
            share.id
            for share in shares
            if (lease := leases.get(share.id)) is None or lease.share != share
        )

    owners = {share.backend for share in held} | set(cleaning)
    taken = {slot for share in held for slot in share.footprint}
    owners |= {backend for backend, state in provisioned.items() if state.exclusive}
    released, reusable, delayed = set[ShareId](), set[ShareId](), set[ShareId]()
    for state in provisioned.values():
        taken.update(state.blocked)
        released |= {i for i, it in state.devices.items() if i not in leases and not it.idle}
        reusable |= {i for i in released & state.devices.keys() if state.devices[i].reusable}
        delayed |= state.delayed
    in_use = released - reusable
    taken.update(slot for share in shares if share.id in in_use for slot in share.footprint)
    being_released = {slot for share in shares if share.id in reusable for slot in share.footprint}

    # `conflicts` with all held shares and all cleaning backends, computed once for all shares.
    return frozenset(
        share.id
        for share in shares
        if share.id not in leases
        and (
            not owners <= {share.backend}
            or not share.footprint.isdisjoint(taken)
            or (share.id not in reusable and not share.footprint.isdisjoint(being_released))
            or share.id in delayed
            or share.id in waiting
        )
    )


def shares_on_faulty_devices(
    provisioned: Mapping[str, ProvisionedState], faults: Mapping[str, Verdict]
) -> frozenset[ShareId]:
    """Find the shares of one GPU whose MIG devices are out of service.

    A verdict belongs to a device by its uuid: a device created later in its place is healthy.
    """
    if not faults:
        return frozenset()
    return frozenset(
        share
        for state in provisioned.values()
        for share, it in state.devices.items()
        if it.device in faults
    )


def can_conflict(shares: Sequence[Share]) -> bool:
    """Return whether any two shares of one GPU could conflict."""
    slots = [slot for share in shares for slot in share.footprint]

    return len({share.backend for share in shares}) > 1 or len(slots) != len(set(slots))
