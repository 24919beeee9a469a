"""The choice of placements of a request and of a layout. Pure.

The best placements leave the most future capacity.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import add, attrgetter
from typing import Final, NamedTuple, TypeAlias

import msgspec

from metagpu.backends.common.packing import AllocationPolicy
from metagpu.backends.mig.profiles import (
    MigGeometry,
    PlacedProfile,
    ProfileGeometry,
    disjoint,
    geometry_of,
)
from metagpu.core.availability.reasons import availability_of, open_to
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.mig import slot_of
from metagpu.core.model.shares import Share, by_gpu
from metagpu.core.model.snapshot import Snapshot


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


class UnplaceableLayout(msgspec.Struct, frozen=True):
    """A layout that does not fit on a GPU, and the reason.

    Attributes:
        profile: the first profile, from the largest on, whose instances do not all fit.
        fits: how many of its instances fit beside those of all larger profiles.
        reason: a sentence for people.
    """

    profile: str
    fits: int
    reason: str


def plan_layout(
    geometry: MigGeometry,
    wanted: Mapping[str, int],
    occupied: Collection[str] = (),
    keep: Collection[PlacedProfile] = (),
) -> tuple[PlacedProfile, ...] | UnplaceableLayout:
    """Find the exact placements of a layout, such as `{"2g.10gb": 2, "1g.5gb": 3}`.

    Exact: a layout that fits is always placed. Among several placements the one with the most of
    `keep` wins; then the one that leaves most for the next requests; then the one with the highest
    slices, for the largest profiles first, as NVIDIA's driver takes them.

    Args:
        geometry: of the GPU.
        wanted: the number of instances of each profile, beside the occupied slots.
        occupied: slots that stay taken: those of leases and of foreign instances.
        keep: idle instances that exist. Those that are not in the result must be removed.
    """
    profiles = {profile.name: profile for profile in geometry.profiles}
    for name in wanted:
        if name not in profiles:
            known = ", ".join(profiles)
            reason = f"the GPU has no profile {name}; it has {known or 'none'}"
            return UnplaceableLayout(name, 0, reason)

    mask = geometry.mask(occupied)
    asked = [profiles[name] for name, count in wanted.items() if count > 0]
    order = sorted(asked, key=attrgetter("size"), reverse=True)
    counts = [wanted[profile.name] for profile in order]
    kept = frozenset(keep)

    # Among equal placements, the first wins.
    best = min(
        _placements(geometry, order, counts, mask),
        default=None,
        key=lambda placed: (
            -len(kept & set(placed)),
            -geometry.future_requests(mask | geometry.taken(placed)),
        ),
    )
    return _explain(geometry, order, counts, mask) if best is None else best


def layout_name(layout: Mapping[str, int]) -> str:
    """Return the name of a layout as in mig-parted: `2x2g.10gb-3x1g.5gb`."""
    return "-".join(f"{count}x{profile}" for profile, count in sorted(layout.items())[::-1])


def place_layout(
    gpu: Gpu, layout: Mapping[str, int]
) -> tuple[PlacedProfile, ...] | UnplaceableLayout:
    """Place the instances of a layout on a GPU, or return why they do not fit.

    The placement follows from the layout and its own profiles alone: share ids rest on it.
    """
    missing = layout.keys() - {profile.name for profile in gpu.mig_profiles}
    if missing:
        # The planner, with all profiles of the GPU, gives the reason.
        return plan_layout(geometry_of(gpu.mig_profiles), dict.fromkeys(sorted(missing), 1))
    geometry = geometry_of(gpu.mig_profiles, frozenset(layout))
    return _place(geometry, frozenset(layout.items()))


@lru_cache(maxsize=64)
def _place(
    geometry: MigGeometry, wanted: frozenset[tuple[str, int]]
) -> tuple[PlacedProfile, ...] | UnplaceableLayout:
    found = plan_layout(geometry, dict(sorted(wanted)))
    if isinstance(found, UnplaceableLayout):
        return found
    chosen = set(found)
    return tuple(placed for placed in geometry.placed_profiles if placed in chosen)


def _placements(
    geometry: MigGeometry, profiles: Sequence[ProfileGeometry], counts: Sequence[int], occupied: int
) -> Iterator[tuple[PlacedProfile, ...]]:
    """Yield every placement of so many of each profile, the highest slices first."""
    if not profiles:
        yield ()
        return

    placed = profiles[0].placed_profiles[::-1]
    masks = [geometry.masks[instance] for instance in placed]
    for indices in disjoint(masks, counts[0], occupied):
        chosen = [placed[index] for index in indices]
        taken = occupied | geometry.taken(chosen)
        for others in _placements(geometry, profiles[1:], counts[1:], taken):
            yield (*chosen, *others)


def _explain(
    geometry: MigGeometry, profiles: Sequence[ProfileGeometry], counts: Sequence[int], occupied: int
) -> UnplaceableLayout:
    """Find the first profile, from the largest on, at which a layout does not fit."""
    for at, profile in enumerate(profiles):
        upto = profiles[: at + 1]
        # A count may be any number; no more instances fit than the profile has placements.
        fits = next(
            n
            for n in range(min(counts[at], len(profile.placements)), -1, -1)
            for _ in _placements(geometry, upto, [*counts[:at], n], occupied)
        )
        if fits < counts[at]:
            beside = [f"{n} x {p.name}" for p, n in zip(profiles, counts[:at], strict=False) if n]
            taken = [*beside, *(["the slots in use"] if occupied else [])]
            reason = f"{counts[at]} x {profile.name} wanted, room for {fits}"
            reason += f" next to {' and '.join(taken)}" if taken else ""
            return UnplaceableLayout(profile.name, fits, reason)
    raise AssertionError("a layout that does not fit has a profile that does not fit")


def choose_replicas(
    size: int,
    available: Sequence[Share],
    required: Sequence[Share],
    snapshot: Snapshot,
    policy: AllocationPolicy,
) -> list[Share]:
    """Choose shares of instances by the policy, the required ones first.

    Among equal instances, the GPU with the lowest index comes first. Shares that cannot be given
    now come last: the kubelet may not have the newest list yet.
    """
    packed = policy is AllocationPolicy.PACKED
    shares_by_gpu = by_gpu([*required, *available])
    taken = Counter((share.gpu, slot_of(share.id)) for share in required)
    for gpu in shares_by_gpu:
        taken.update((gpu, slot_of(share)) for share in snapshot.gpus[gpu].leases)

    ranked = []
    for gpu, shares in shares_by_gpu.items():
        state = snapshot.gpus[gpu]
        unhealthy = availability_of(state).unlisted
        for share in sorted(shares, key=lambda share: share.number):
            if share in required:
                continue
            last = share.id in unhealthy or not open_to(state, share.backend)
            instance = gpu, slot_of(share.id)
            rank = -taken[instance] if packed else taken[instance]
            ranked.append(((last, rank, state.gpu.index, share.number), share))
            taken[instance] += not packed  # the first of a packed request stays first
    ranked.sort(key=lambda pair: pair[0])
    return [*required, *(share for _, share in ranked)][:size]
