"""The one rule of sharing: which shares of a GPU exclude each other."""

from collections.abc import Iterable, Mapping, Sequence
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


def orphaned_leases(shares: Sequence[Share], leases: Mapping[ShareId, Lease]) -> tuple[Lease, ...]:
    """Find the leases of one GPU on shares that are not on offer as they were granted.

    A pod keeps its shares of an earlier configuration; another plugin may hold the GPU too.
    """
    offered = {share.id: share for share in shares}
    return tuple(
        lease for share_id, lease in leases.items() if offered.get(share_id) != lease.share
    )


def unavailable_shares(
    shares: Sequence[Share],
    leases: Mapping[ShareId, Lease],
    cleaning: Iterable[str] = (),
    provisioned: Mapping[str, ProvisionedState] = MappingProxyType({}),
) -> frozenset[ShareId]:
    """Find the shares of one GPU that these leases and cleanups make unavailable.

    A device that no container holds makes the shares on its slots unavailable until it is known to
    be idle; a reusable one leaves its own share available. Delayed shares are unavailable.

    While the GPU has orphaned leases, its free capacity is unknown: every share that is not leased
    is unavailable. A backend that cleans the GPU up excludes all others, as one with leases does.
    """
    held = {lease.share for lease in leases.values()}
    if orphaned_leases(shares, leases):
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
