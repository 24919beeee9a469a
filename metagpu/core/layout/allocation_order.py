"""Orders MIG instances for the first fit of the scheduler, with DRA. Pure.

The scheduler allocates the first device that fits. So the places of each profile come in the order
in which the backend would fill an idle GPU.
"""

from collections.abc import Iterator, Sequence

from metagpu.core.availability.conflict import conflicts_of
from metagpu.core.contracts.backend import Backend
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.mig import is_mig, profile_of, share_suffix
from metagpu.core.model.shares import Share
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import GpusFound, SharesClaimed, SharesOffered
from metagpu.core.state.reduce import reduce


def in_allocation_order(backend: Backend, gpu: Gpu, shares: Sequence[Share]) -> list[Share]:
    """Return shares of a GPU, the places of each MIG profile in order."""
    if not shares or not is_mig(shares[0].id) or share_suffix(shares[0].id):
        return list(shares)

    idle, _ = reduce(Snapshot(), GpusFound((gpu,), at=0))
    resources = tuple(dict.fromkeys(share.resource for share in shares))
    idle, _ = reduce(idle, SharesOffered(resources, tuple(shares)))
    by_profile: dict[str, list[Share]] = {}
    for share in shares:
        by_profile.setdefault(profile_of(share.id), []).append(share)
    return [it for places in by_profile.values() for it in _filled(backend, places, idle)]


def _filled(backend: Backend, places: Sequence[Share], snapshot: Snapshot) -> Iterator[Share]:
    """Yield the places that fit together in the backend's order, then the others."""
    rest = list(places)
    while True:
        unavailable = conflicts_of(snapshot.gpus[places[0].gpu]).all
        free = [it for it in rest if it.id not in unavailable]
        if not free:
            break
        [best] = backend.prefer(free, (), 1, snapshot)
        rest.remove(best)
        yield best
        snapshot, _ = reduce(snapshot, SharesClaimed((best,), at=0))
    yield from rest
