"""The choice of placements that leave the most future capacity. Pure."""

from collections.abc import Iterator, Sequence
from operator import add
from typing import Final, NamedTuple, TypeAlias

import msgspec

from metagpu.backends.mig.profiles import MigGeometry, disjoint
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import Share


class PlacementCandidate(msgspec.Struct, frozen=True):
    """One GPU to choose placements on.

    Attributes:
        occupied: the slots that leases and foreign instances take.
        free: the shares that may be chosen; none overlaps `occupied`.
        required: the shares that must be chosen. They may be occupied: a pod's own, from its init
            container.
        warm: the shares, of any resource, with an idle instance. The choice takes them, and leaves
            the others alone, where that costs nothing.
    """

    gpu: Gpu
    geometry: MigGeometry
    occupied: frozenset[str]
    free: Sequence[Share]
    required: frozenset[Share] = frozenset()
    warm: frozenset[Share] = frozenset()


_Rank: TypeAlias = tuple[int, ...]
"""The lower, the better: the GPUs used, the future capacity lost, the warm instances removed less
those taken, and the memory slices that were free. The ranks of several GPUs are summed."""
_NOTHING: Final[_Rank] = (0, 0, 0, 0)


class _Selection(NamedTuple):
    rank: _Rank
    shares: Sequence[Share]


class _SearchKey(NamedTuple):
    """All that decides the best placements of a GPU: equal GPUs are searched once.

    Attributes:
        geometry: the identity of the geometry.
        masks: of the free shares, the highest slices first. Among equal choices the first wins,
            and NVIDIA's driver takes the highest slices too.
        warm: the mask of each idle instance, and its index in `masks`, -1 if it is not there.
    """

    geometry: int
    occupied: int
    masks: tuple[int, ...]
    warm: tuple[tuple[int, int], ...]
    size: int


class _SearchResult(NamedTuple):
    """One choice on a GPU; the first by its order is the best one of the GPU.

    Attributes:
        requests: what the next requests can get less than before.
        alone: the same on an empty GPU, as the GPU may become.
        changes: the warm instances removed less those taken.
        lost: the future capacity lost, by which GPUs are compared.
        indices: of the chosen masks.
    """

    requests: float
    alone: float
    changes: int
    lost: int
    indices: tuple[int, ...]


def choose_placements(size: int, candidates: Sequence[PlacementCandidate]) -> list[Share] | None:
    """Choose `size` shares, the required ones first; `None` if so many do not fit.

    The shares come from as few GPUs as possible. On each GPU the placements that lower
    `MigGeometry.future_requests` least win; then those that would lower it least on an empty GPU;
    then those with the fewest changes to warm instances; then the highest slices. Among the GPUs
    the one that loses least of `MigGeometry.future_capacity` wins; then the one with the fewest
    changes; then the fullest, the lowest index.
    """
    known: dict[_SearchKey, _SearchResult | None] = {}
    by_index = sorted(candidates, key=lambda candidate: candidate.gpu.index)
    searches = [_GpuSearch(candidate, known) for candidate in by_index]
    with_required = [search for search in searches if search.required]

    if len(with_required) <= 1:
        found = [best for search in with_required or searches if (best := search.best(size))]
        if found:
            return list(min(found, key=lambda selection: selection.rank).shares)
    return _choose_on_several(size, searches)


class _GpuSearch:
    """The search on one GPU, with slots as numbers.

    Attributes:
        required: the shares that must be chosen, in their order.
        most: an upper bound of the shares that can be chosen.
    """

    def __init__(
        self, candidate: PlacementCandidate, known: dict[_SearchKey, _SearchResult | None]
    ) -> None:
        self._geometry = geometry = candidate.geometry
        self._known = known
        self.required = sorted(candidate.required, key=_number)
        self._occupied = geometry.mask(candidate.occupied)
        for share in self.required:
            self._occupied |= geometry.mask(share.footprint)

        free = [share for share in candidate.free if share not in candidate.required]
        free.sort(key=_number, reverse=True)
        self._free = free
        self._masks = tuple([geometry.mask(share.footprint) for share in free])
        self._warm = tuple(
            (geometry.mask(share.footprint), free.index(share) if share in free else -1)
            for share in candidate.warm
        )
        self.most = len(free) + len(self.required)

    def best(self, size: int) -> _Selection | None:
        """Find the best selection of all `size` shares, at least one, on this GPU."""
        count = size - len(self.required)
        if count < 0 or size > self.most:
            return None

        key = _SearchKey(id(self._geometry), self._occupied, self._masks, self._warm, count)
        if key not in self._known:
            self._known[key] = min(_search(self._geometry, key), default=None, key=_rank_on_gpu)
        result = self._known[key]
        if result is None:
            return None

        chosen = sorted((self._free[index] for index in result.indices), key=_number)
        rank = (1, result.lost, result.changes, self._geometry.free_slices(self._occupied))
        return _Selection(rank, [*self.required, *chosen])


def _search(geometry: MigGeometry, key: _SearchKey) -> Iterator[_SearchResult]:
    capacity = geometry.future_capacity(key.occupied)
    requests = geometry.future_requests(key.occupied)
    empty = geometry.future_requests(0)

    for indices in disjoint(key.masks, key.size, key.occupied):
        taken = 0
        for index in indices:
            taken |= key.masks[index]
        changes = sum(-1 if own in indices else bool(mask & taken) for mask, own in key.warm)
        yield _SearchResult(
            requests - geometry.future_requests(key.occupied | taken),
            empty - geometry.future_requests(taken),
            changes,
            capacity - geometry.future_capacity(key.occupied | taken),
            indices,
        )


def _rank_on_gpu(result: _SearchResult) -> tuple[float, float, int]:
    return result[:3]


def _choose_on_several(size: int, searches: Sequence[_GpuSearch]) -> list[Share] | None:
    """Find the best selection over all GPUs, for each number of shares, GPU by GPU."""
    best = {0: _Selection(_NOTHING, ())}

    for search in searches:
        counts = range(max(1, len(search.required)), min(size, search.most) + 1)
        parts = [(count, found) for count in counts if (found := search.best(count))]
        extended = {} if search.required else dict(best)
        for total, selection in best.items():
            for count, part in parts:
                rank = tuple(map(add, selection.rank, part.rank))
                known = extended.get(total + count)
                if total + count <= size and (known is None or rank < known.rank):
                    shares = [*selection.shares, *part.shares]
                    extended[total + count] = _Selection(rank, shares)
        best = extended

    found = best.get(size)
    required = {share for search in searches for share in search.required}
    return found and sorted(found.shares, key=lambda share: share not in required)


def _number(share: Share) -> int:
    return share.number
