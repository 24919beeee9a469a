"""Where a fraction goes: a pure choice among free shares.

The rule: what fits on one GPU lands on ONE GPU; what is larger takes whole GPUs and at most one
part of another.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from operator import attrgetter

import msgspec

from metagpu.core.gpu import Gpu
from metagpu.core.model import Share


class Placement(StrEnum):
    """Which GPU to take when several would do.

    - binpack: the fullest that still has room, so that whole GPUs stay free for large requests.
    - spread: the emptiest, so that neighbours disturb each other least.
    """

    BINPACK = "binpack"
    SPREAD = "spread"


class Seat(msgspec.Struct, frozen=True):
    """One GPU as the choice sees it.

    Attributes:
        whole: how many shares the GPU is cut into.
        free: the shares that may be taken from it, required ones among them.
        required: those that must be taken.
    """

    gpu: Gpu
    whole: int
    free: Sequence[Share]
    required: frozenset[Share] = frozenset()

    @property
    def idle(self) -> bool:
        """Whether all of it may be taken."""
        return len(self.free) == self.whole

    def take(self, count: int) -> list[Share]:
        """Take `count` shares: the required ones, then those of the lowest numbers."""
        ranked = sorted(self.free, key=attrgetter("number"))
        if self.required:
            ranked.sort(key=lambda share: share not in self.required)
        return ranked[:count]


def place(
    size: int, seats: Sequence[Seat], placement: Placement, largest: int
) -> list[Share] | None:
    """Choose `size` shares by the rule; `None` when the free shares do not allow it.

    `largest` is how many shares the largest GPU on offer is cut into, be it free or not.

    Deterministic: equal seats are told apart by their index. Requests over several GPUs take as few
    as will do, on one NUMA node when one has room.
    """
    if size <= largest:
        return _on_one(size, seats, placement)

    for together in _numa_groups(seats):
        chosen = _on_several(size, together, placement)
        if chosen is not None:
            return chosen
    return None


def splits(counts: Iterable[tuple[int, int]], largest: int) -> bool:
    """Tell whether a chosen set breaks the rule.

    Args:
        counts: for each GPU touched, how many shares are taken and how many it is cut into.
        largest: how many shares the largest GPU on offer is cut into.
    """
    pairs = list(counts)
    if len(pairs) <= 1:
        return False

    parts = sum(taken < whole for taken, whole in pairs)
    return sum(taken for taken, _ in pairs) <= largest or parts > 1


def placed_or_gathered(
    size: int, sound: Sequence[Seat], seats: Sequence[Seat], placement: Placement, largest: int
) -> list[Share]:
    """Choose `size` shares by the rule from seats that give some now, or as well as can be.

    Never fails: those of other seats come last, and with fewer than `size` it gives what there is.
    """
    placed = place(size, sound, placement, largest)
    return placed or list(dict.fromkeys([*gather(size, sound), *gather(size, seats)]))[:size]


def gather(size: int, seats: Sequence[Seat]) -> list[Share]:
    """Choose `size` shares from as few GPUs as possible, when the rule cannot be kept."""
    ordered = sorted(seats, key=lambda s: (not s.required, -len(s.free), s.gpu.index))
    required = [share for seat in ordered for share in sorted(seat.required, key=_number)]
    others = [share for seat in ordered for share in seat.take(seat.whole)]

    return list(dict.fromkeys([*required, *others]))[:size]


def _on_one(size: int, seats: Sequence[Seat], placement: Placement) -> list[Share] | None:
    bound = [seat for seat in seats if seat.required]
    if len(bound) > 1:
        return None

    roomy = [seat for seat in bound or seats if len(seat.required) <= size <= len(seat.free)]
    return min(roomy, key=_rank(placement)).take(size) if roomy else None


def _on_several(size: int, seats: Sequence[Seat], placement: Placement) -> list[Share] | None:
    way = min(_ways(size, seats, placement), key=len, default=None)
    return None if way is None else [share for seat, count in way for share in seat.take(count)]


def _ways(
    size: int, seats: Sequence[Seat], placement: Placement
) -> Iterator[list[tuple[Seat, int]]]:
    """Find ways to take whole GPUs and at most one part, the better ones first."""
    for part in (None, *sorted(seats, key=_rank(placement))):
        others = sorted((s for s in seats if s is not part), key=lambda s: (-s.whole, s.gpu.index))
        bound = [seat for seat in others if seat.required]
        if any(not seat.idle for seat in bound):
            continue  # they would be a second part

        sums = _sums([seat for seat in others if seat.idle and not seat.required])
        missing = size - sum(seat.whole for seat in bound)
        for count in _parts(part):
            if (wholes := sums.get(missing - count)) is not None:
                taken_whole = [(seat, seat.whole) for seat in (*bound, *wholes)]
                yield [*taken_whole, *([(part, count)] if part else [])]


def _sums(seats: Iterable[Seat]) -> Mapping[int, tuple[Seat, ...]]:
    """Find all numbers of shares that some of these GPUs have together, each with the fewest."""
    sums: dict[int, tuple[Seat, ...]] = {0: ()}

    for seat in seats:
        for total, those in list(sums.items()):
            known = sums.get(total + seat.whole)
            if known is None or len(known) > len(those) + 1:
                sums[total + seat.whole] = (*those, seat)
    return sums


def _parts(seat: Seat | None) -> range:
    """Say how many shares may be taken from a GPU that is not taken whole; without one, none."""
    if seat is None:
        return range(1)
    return range(max(1, len(seat.required)), min(len(seat.free), seat.whole - 1) + 1)


def _numa_groups(seats: Sequence[Seat]) -> Iterator[Sequence[Seat]]:
    """Give the GPUs of each NUMA node that holds all required shares, then all GPUs."""
    required_on = {seat.gpu.numa_node for seat in seats if seat.required}

    for node in sorted({s.gpu.numa_node for s in seats if s.gpu.numa_node is not None}):
        if required_on <= {node}:
            yield [seat for seat in seats if seat.gpu.numa_node == node]
    yield seats


def _rank(placement: Placement) -> Callable[[Seat], tuple[int, int]]:
    sign = 1 if placement is Placement.BINPACK else -1
    return lambda seat: (sign * len(seat.free), seat.gpu.index)


def _number(share: Share) -> int:
    return share.number
