"""The one rule of sharing: which shares of a GPU exclude each other, and by what."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil
from types import MappingProxyType
from typing import Final

import msgspec

from metagpu.core.model.shares import (
    Lease,
    ProvisionedState,
    Share,
    ShareId,
)
from metagpu.core.model.snapshot import GpuState

NONE: Final[frozenset[ShareId]] = frozenset()
_MAX_HOLDERS: Final = 5
"""Pods that one reason lists; `metagpu status` lists every lease."""


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
    return [
        share for share in shares if owners <= {share.backend} and share.footprint.isdisjoint(taken)
    ]


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
    before, an earlier lease takes as many of the new parts as its memory needs, and a replica
    takes one. The free capacity beside any other orphaned lease is unknown: shares of one MIG
    instance say nothing of those of another.
    """
    orphaned = [lease.share for lease in orphaned_leases(shares, leases)]
    if not orphaned:
        return frozenset()
    kinds = {(share.backend, share.resource, share.replica) for share in orphaned}
    parts = [share for share in shares if (share.backend, share.resource, share.replica) in kinds]
    part = parts[0].memory if parts else 0
    countable = all(share.interchangeable for share in (*parts, *orphaned)) and part > 0
    if len(kinds) > 1 or not countable or any(share.memory != part for share in parts):
        return None

    needed = len(orphaned)
    if not parts[0].replica:
        # Each part is rounded down to a byte: so many of them need no part more.
        needed = ceil(sum(share.memory for share in orphaned) / (part + 1))
    ids = {share.id for share in orphaned}
    missing = needed - sum(share.id in ids for share in parts)
    free = [share.id for share in parts if share.id not in leases]
    return frozenset(free[max(0, len(free) - missing) :] if missing > 0 else ())


def unavailable_shares(
    shares: Sequence[Share],
    leases: Mapping[ShareId, Lease],
    cleaning: Iterable[str] = (),
    provisioned: Mapping[str, ProvisionedState] = MappingProxyType({}),
) -> frozenset[ShareId]:
    """Find the shares of one GPU that these leases and cleanups make unavailable.

    A device that no container holds makes the shares on its slots unavailable until it is known to
    be idle; a reusable one leaves its own share available. Delayed shares are unavailable. So is a
    leased one that no container is known to hold and whose slots something else occupies: its pod
    has ended, and another pod could not have it.

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
    blocked = {slot for state in provisioned.values() for slot in state.blocked}
    taken |= blocked
    released, reusable, delayed = set[ShareId](), set[ShareId](), set[ShareId]()
    for state in provisioned.values():
        released |= {
            i for i, device in state.devices.items() if i not in leases and not device.idle
        }
        reusable |= {i for i in released & state.devices.keys() if state.devices[i].reusable}
        delayed |= state.delayed
    in_use = released - reusable
    taken.update(slot for share in shares if share.id in in_use for slot in share.footprint)
    being_released = {slot for share in shares if share.id in reusable for slot in share.footprint}

    # `conflicts` with all held shares and all cleaning backends, computed once for all shares.
    return frozenset(
        share.id
        for share in shares
        if (_has_no_holder(leases.get(share.id)) and not share.footprint.isdisjoint(blocked))
        or (
            share.id not in leases
            and (
                not owners <= {share.backend}
                or not share.footprint.isdisjoint(taken)
                or (share.id not in reusable and not share.footprint.isdisjoint(being_released))
                or share.id in delayed
                or share.id in waiting
            )
        )
    )


def _has_no_holder(lease: Lease | None) -> bool:
    return lease is not None and lease.holder is None and lease.resource_claim is None


def conflicting_shares(state: GpuState) -> frozenset[ShareId]:
    """Return the shares of a GPU that conflict, computed once for each state."""
    known: frozenset[ShareId] | None = state.__dict__.get("conflicting")
    if known is None:
        known = state.__dict__["conflicting"] = _find_conflicting(state)
    return known


def _find_conflicting(state: GpuState) -> frozenset[ShareId]:
    if state.kubelet.unknown_leases:  # of any configuration, also of other shares than these
        return frozenset(share.id for share in state.shares if share.id not in state.leases)
    if not (state.can_conflict or state.cleanup.since or state.provisioned):
        return NONE
    return unavailable_shares(state.shares, state.leases, state.cleanup.since, state.provisioned)


def with_same_conflicts(before: GpuState, after: GpuState) -> GpuState:
    """Return a state that has the conflicts of the one before, with these known."""
    if (known := before.__dict__.get("conflicting")) is not None:
        after.__dict__["conflicting"] = known
    return after


class Conflicts(msgspec.Struct, frozen=True):
    """The shares of one GPU that conflict with something, by what is in the way.

    Attributes:
        orphaned: those that wait for orphaned leases.
        occupied: those whose slots have something else on them, or a device that is not idle.
        staggered: those that are free and not on offer again yet.
        in_use: all others, while anything of the GPU is leased; `cleanup` while nothing is.
    """

    orphaned: frozenset[ShareId] = NONE
    occupied: frozenset[ShareId] = NONE
    staggered: frozenset[ShareId] = NONE
    in_use: frozenset[ShareId] = NONE
    cleanup: frozenset[ShareId] = NONE


def conflicts_of(state: GpuState) -> Conflicts:
    """Find the causes of a GPU's conflicts, for each share the first that applies."""
    every = conflicting_shares(state)
    if state.kubelet.unknown_leases:
        return Conflicts(every)
    if not every:
        return Conflicts()
    waiting = shares_to_wait(state.shares, state.leases)
    orphaned = every if waiting is None else every & waiting
    rest = {share.id: share for share in state.shares if share.id in every - orphaned}
    blocked, delayed = set[str](), set[ShareId]()
    for made in state.provisioned.values():
        blocked.update(made.blocked)
        delayed |= made.delayed
    unidle = _unidle_devices(state)
    slots = blocked.union(*(share.footprint for share in state.shares if share.id in unidle))
    free = without_conflict(rest.values(), (lease.share for lease in state.leases.values()))
    staggered = delayed & {share.id for share in free}
    occupied = {i for i, share in rest.items() if not share.footprint.isdisjoint(slots)}
    others = frozenset(rest.keys() - occupied - staggered)
    return Conflicts(
        orphaned,
        frozenset(occupied),
        frozenset(staggered - occupied),
        others if state.leases else NONE,
        NONE if state.leases else others,
    )


def _unidle_devices(state: GpuState) -> set[ShareId]:
    """Return the shares whose devices have no lease and are not idle."""
    return {
        share
        for made in state.provisioned.values()
        for share, device in made.devices.items()
        if share not in state.leases and not device.idle
    }


def orphaned_text(state: GpuState) -> str:
    """Return which pods a GPU, or a part of it, waits for."""
    if why := state.kubelet.unknown_leases:
        return f"GPU {state.gpu} waits until it is known which pods hold it: {why}"
    orphaned = orphaned_leases(state.shares, state.leases)
    waiting = shares_to_wait(state.shares, state.leases)
    holders = dict.fromkeys(
        str(lease.holder or "a pod that is being admitted") for lease in orphaned
    )
    names = dict.fromkeys(lease.share.resource or "another name" for lease in orphaned)
    what = "the GPU waits" if waiting is None else f"{len(waiting)} free shares wait"
    if waiting is not None and len(waiting) == 1:
        what = "1 free share waits"
    pods = "that pod" if len(holders) == 1 else "these pods"
    return (
        f"GPU {state.gpu} is held by {_listed(holders)} under {', '.join(names)}, "
        f"which is not on offer as it was granted; {what} for the end of {pods}"
    )


def _listed(names: Iterable[str]) -> str:
    given = list(names)
    more = [f"{len(given) - _MAX_HOLDERS} more"] if len(given) > _MAX_HOLDERS else []
    return ", ".join([*given[:_MAX_HOLDERS], *more])


def occupied_text(state: GpuState, share: Share) -> str:
    """Return what is on the slots of a share, apart from leases."""
    for made in state.provisioned.values():
        for slot in sorted(share.footprint & made.blocked.keys()):
            return f"GPU {state.gpu}: {made.blocked[slot]}"
    released = next(_released_on(state, share), share.id)
    return f"GPU {state.gpu}: {released} was just released and is being checked for processes"


def _released_on(state: GpuState, share: Share) -> Iterator[ShareId]:
    for made in state.provisioned.values():
        for other in state.shares:
            device = made.devices.get(other.id)
            unleased = device is not None and not device.idle and other.id not in state.leases
            if unleased and not share.footprint.isdisjoint(other.footprint):
                yield other.id


def shares_of_moved_nodes(state: GpuState) -> frozenset[ShareId]:
    """Find the leased shares whose answers name the device nodes of other GPUs.

    A boot without one GPU renumbers those behind it, and the kubelet starts a container with the
    answer that it has. It rejects a pod at its own start whose shares are Unhealthy.
    """
    nodes, number = state.kubelet.nodes, state.gpu.minor
    moved = [ids for named, ids in nodes.items() if number is not None and number not in named]
    return NONE.union(*moved).intersection(state.leases)


def shares_on_faulty_devices(state: GpuState) -> frozenset[ShareId]:
    """Find the shares of a GPU whose MIG devices are out of service.

    A verdict belongs to a device by its uuid: a device created later in its place is healthy.
    """
    if not state.mig_faults:
        return NONE
    return frozenset(
        share
        for made in state.provisioned.values()
        for share, device in made.devices.items()
        if device.device in state.mig_faults
    )


def can_conflict(shares: Sequence[Share], leases: Mapping[ShareId, Lease]) -> bool:
    """Return whether any two shares of one GPU, on offer or held, could conflict."""
    # Leased shares that are not on offer any more still conflict with others.
    every = list(dict.fromkeys([*shares, *(lease.share for lease in leases.values())]))
    slots = [slot for share in every for slot in share.footprint]
    several = len({share.backend for share in every}) > 1 or len(slots) != len(set(slots))
    return several or bool(orphaned_leases(shares, leases))
