"""The one rule of sharing: what excludes what on a GPU."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from metagpu.core.model import Lease, Share, ShareId, Stock, Verdict


def conflicts(a: Share, b: Share) -> bool:
    """Tell whether two shares exclude each other: the one rule of sharing.

    They do when they sit on the same GPU and belong to different backends (an idle GPU belongs to
    nobody, a held one to whoever came first) or occupy a slot in common.
    """
    return a.gpu == b.gpu and (a.backend != b.backend or not a.footprint.isdisjoint(b.footprint))


def strays(shares: Sequence[Share], leases: Mapping[ShareId, Lease]) -> tuple[Lease, ...]:
    """Find the leases of one GPU on shares that are not on offer as they were granted.

    A pod keeps what it got under an earlier configuration; another plugin may hold the GPU too.
    """
    offered = {share.id: share for share in shares}
    return tuple(
        lease for share_id, lease in leases.items() if offered.get(share_id) != lease.share
    )


def withheld(
    shares: Sequence[Share],
    leases: Mapping[ShareId, Lease],
    cleaning: Iterable[str] = (),
    stocks: Mapping[str, Stock] = MappingProxyType({}),
) -> frozenset[ShareId]:
    """Find the shares of one GPU that nobody may have while these leases and cleanings last.

    What a backend has made and nobody holds is in the way too, until it is known to be idle; of
    itself it is not, if it may be had again. What is late is not had yet.

    While there are strays, nobody can say what of the GPU is left: all of it waits for their end.
    A backend that cleans the GPU excludes all others, as one that has leases does.
    """
    held = {lease.share for lease in leases.values()}
    if strays(shares, leases):
        return frozenset(
            share.id
            for share in shares
            if (lease := leases.get(share.id)) is None or lease.share != share
        )

    owners = {share.backend for share in held} | set(cleaning)
    taken = {slot for share in held for slot in share.footprint}
    owners |= {backend for backend, stock in stocks.items() if stock.alone}
    left, again, late = set[ShareId](), set[ShareId](), set[ShareId]()
    for stock in stocks.values():
        taken.update(stock.blocked)
        left |= {i for i, made in stock.made.items() if i not in leases and not made.idle}
        again |= {i for i in left & stock.made.keys() if stock.made[i].again}
        late |= stock.late
    taken.update(slot for share in shares if share.id in left - again for slot in share.footprint)
    leaving = {slot for share in shares if share.id in again for slot in share.footprint}

    # `conflicts` with any of the held shares, or with who cleans, said for all of them at once.
    return frozenset(
        share.id
        for share in shares
        if share.id not in leases
        and (
            not owners <= {share.backend}
            or not share.footprint.isdisjoint(taken)
            or (share.id not in again and not share.footprint.isdisjoint(leaving))
            or share.id in late
        )
    )


def broken(stocks: Mapping[str, Stock], faults: Mapping[str, Verdict]) -> frozenset[ShareId]:
    """Find the shares of one GPU that stand for MIG devices which are out of service.

    A verdict belongs to a device by its uuid: what was made later in its place is another.
    """
    if not faults:
        return frozenset()
    return frozenset(
        share
        for stock in stocks.values()
        for share, made in stock.made.items()
        if made.device in faults
    )


def contended(shares: Sequence[Share]) -> bool:
    """Tell whether any two shares of one GPU could conflict."""
    slots = [slot for share in shares for slot in share.footprint]

    return len({share.backend for share in shares}) > 1 or len(slots) != len(set(slots))
