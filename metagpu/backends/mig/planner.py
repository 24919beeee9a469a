"""Which instances go where when they are known beforehand, and what moving one would open."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from metagpu.backends.mig.profiles import Board, Profile, Spot, disjoint
from metagpu.core.gpu import Gpu


class Misfit(msgspec.Struct, frozen=True):
    """Why a layout cannot be.

    Attributes:
        profile: the first of which there is not room for all, the largest profiles coming first.
        fits: how many of it there is room for, beside all that are larger.
        reason: a sentence for people.
    """

    profile: str
    fits: int
    reason: str


def plan_layout(
    board: Board,
    wanted: Mapping[str, int],
    occupied: Collection[str] = (),
    keep: Collection[Spot] = (),
) -> tuple[Spot, ...] | Misfit:
    """Find the exact placements of a layout, such as `{"2g.10gb": 2, "1g.5gb": 3}`.

    Exact: if there is a way, it is found. Of several, the one that has the most of `keep`; then the
    one that leaves the most valuable future; then the highest slices, for the largest profiles
    first, as NVIDIA's driver takes them.

    Args:
        board: what the GPU can be cut into.
        wanted: how many instances of each profile, beside what is occupied.
        occupied: slots that are taken and stay so: what pods hold, and what is not ours.
        keep: idle instances that exist. Those that are not in the answer have to go.
    """
    profiles = {profile.name: profile for profile in board.profiles}
    for name in wanted:
        if name not in profiles:
            known = ", ".join(profiles)
            reason = f"the GPU has no profile {name}; it has {known or 'none'}"
            return Misfit(name, 0, reason)

    mask = board.mask(occupied)
    asked = [profiles[name] for name, count in wanted.items() if count > 0]
    order = sorted(asked, key=_size, reverse=True)
    counts = [wanted[profile.name] for profile in order]
    kept = frozenset(keep)

    # Of ways that are equal, the first is taken.
    best = min(
        _layouts(board, order, counts, mask),
        default=None,
        key=lambda spots: (-len(kept & set(spots)), -board.worth(mask | _taken(board, spots))),
    )
    return _misfit(board, order, counts, mask) if best is None else best


class Site(msgspec.Struct, frozen=True):
    """One GPU and what is on it.

    Attributes:
        held: the instances that pods hold, and so could be moved with their pods.
        others: slots that are taken by what nobody here could move.
    """

    gpu: Gpu
    board: Board
    held: tuple[Spot, ...]
    others: frozenset[str] = frozenset()

    @property
    def occupied(self) -> int:
        """All that is taken."""
        return self.board.mask(self.others) | _taken(self.board, self.held)


class Move(msgspec.Struct, frozen=True):
    """What one pod's move would open: its instance goes from `spot` of `gpu` to `onto` of `target`.

    Attributes:
        opens: where the wanted profile would then fit, on `gpu`.
    """

    gpu: Gpu
    spot: Spot
    target: Gpu
    onto: Spot
    opens: Spot


def moves(profile: str, sites: Sequence[Site]) -> list[Move]:
    """Find the single moves after which one more instance of a profile would fit.

    There are none if it fits already. Of each instance that could make room, the one that stays on
    its GPU, or else loses least; the smallest instances first, and those first that stay.
    """
    taken = [(site, site.occupied) for site in sites]
    if any(site.board.free(occupied, profile) for site, occupied in taken):
        return []

    found = []
    for site, occupied in taken:
        for spot in site.held:
            without = occupied & ~site.board.mask(spot.footprint)
            found += _best_of(_moves_of(spot, site, without, profile, taken))
    return sorted(found, key=_cost)


def _layouts(
    board: Board, profiles: Sequence[Profile], counts: Sequence[int], occupied: int
) -> Iterator[tuple[Spot, ...]]:
    """Give every way to place so many of each profile, the highest slices first."""
    if not profiles:
        yield ()
        return

    spots = profiles[0].spots[::-1]
    masks = [board.masks[spot] for spot in spots]
    for places in disjoint(masks, counts[0], occupied):
        those = [spots[place] for place in places]
        taken = occupied | _taken(board, those)
        for others in _layouts(board, profiles[1:], counts[1:], taken):
            yield (*those, *others)


def _misfit(
    board: Board, profiles: Sequence[Profile], counts: Sequence[int], occupied: int
) -> Misfit:
    """Find the profile at which a layout that has no way fails, the largest coming first."""
    for at, profile in enumerate(profiles):
        upto = profiles[: at + 1]
        fits = next(
            n
            for n in range(counts[at], -1, -1)
            for _ in _layouts(board, upto, [*counts[:at], n], occupied)
        )
        if fits < counts[at]:
            beside = [f"{n} x {p.name}" for p, n in zip(profiles, counts[:at], strict=False) if n]
            taken = [*beside, *(["what is in use"] if occupied else [])]
            reason = f"{counts[at]} x {profile.name} wanted, room for {fits}"
            reason += f" beside {' and '.join(taken)}" if taken else ""
            return Misfit(profile.name, fits, reason)
    raise AssertionError("a layout without a way has a profile at which it fails")


def _moves_of(
    spot: Spot, site: Site, without: int, profile: str, sites: Sequence[tuple[Site, int]]
) -> Iterator[tuple[tuple[int, ...], Move]]:
    """Give every move of an instance that makes room, with what is better being lower.

    `without` is what is occupied on its GPU when it has gone.
    """
    board = site.board

    for opened in board.free(without, profile):
        for target, taken in sites:
            here = target is site
            occupied = without | board.masks[opened] if here else taken
            for onto in target.board.free(occupied, spot.profile.name):
                after = occupied | target.board.masks[onto]
                lost = target.board.worth(occupied) - target.board.worth(after)
                rank = (
                    not here,
                    lost,
                    target.gpu.index,
                    -onto.placement.start,
                    -opened.placement.start,
                )
                yield rank, Move(site.gpu, spot, target.gpu, onto, opened)


def _best_of(ranked: Iterable[tuple[tuple[int, ...], Move]]) -> list[Move]:
    best = min(ranked, default=None, key=lambda pair: pair[0])
    return [best[1]] if best else []


def _cost(move: Move) -> tuple[int, int, int, int]:
    """Rank moves: the less memory a pod has, the sooner it is moved."""
    size = move.spot.profile.memory_slices
    return size, move.target != move.gpu, move.gpu.index, move.spot.placement.start


def _taken(board: Board, spots: Collection[Spot]) -> int:
    taken = 0
    for spot in spots:
        taken |= board.mask(spot.footprint)  # a spot that is held need not be one of the board's
    return taken


def _size(profile: Profile) -> tuple[int, int]:
    return profile.memory_slices, profile.compute_slices
