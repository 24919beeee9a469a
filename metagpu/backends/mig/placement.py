"""Where an instance goes: a pure choice of the spots that leave the most valuable future."""

from collections.abc import Iterator, Sequence
from operator import add
from typing import Final, NamedTuple, TypeAlias

import msgspec

from metagpu.backends.mig.profiles import Board, disjoint
from metagpu.core.gpu import Gpu
from metagpu.core.model import Share


class Seat(msgspec.Struct, frozen=True):
    """One GPU as the choice sees it.

    Attributes:
        occupied: the slots that are taken: by leases, and by instances that are not ours.
        free: the shares that may be taken; what overlaps `occupied` is not.
        required: those that must be taken. They may be occupied: a pod's own, of its init
            container.
        warm: shares, of any resource, whose instances exist and are idle: they are taken, and left
            alone, where that costs nothing.
    """

    gpu: Gpu
    board: Board
    occupied: frozenset[str]
    free: Sequence[Share]
    required: frozenset[Share] = frozenset()
    warm: frozenset[Share] = frozenset()


_Rank: TypeAlias = tuple[int, ...]
"""What is better is lower: GPUs taken from, worth lost, warm instances broken less those taken,
memory slices that were free. Those of several GPUs are summed."""
_NOTHING: Final[_Rank] = (0, 0, 0, 0)


class _Way(NamedTuple):
    rank: _Rank
    shares: Sequence[Share]


class _Question(NamedTuple):
    """What decides which spots of a GPU are best: GPUs that are alike are looked at once.

    Attributes:
        board: the board's identity.
        masks: what may be taken, the highest slices first: where no way is better, the first wins,
            and NVIDIA's driver takes the highest too.
        warm: what idle instances occupy, and which of `masks` each is, -1 if none.
    """

    board: int
    occupied: int
    masks: tuple[int, ...]
    warm: tuple[tuple[int, int], ...]
    number: int


_Answer: TypeAlias = tuple[int, int, tuple[int, ...]]
"""Worth lost, change of warm instances, and which of the masks to take."""


def choose(size: int, seats: Sequence[Seat]) -> list[Share] | None:
    """Choose `size` shares, the required ones first; `None` when so many cannot be together.

    They are taken from as few GPUs as will do. Of the ways to do that, the one that lowers
    `Board.worth` least; of equal ones, the one that makes the fewest changes to warm instances;
    then the fullest GPU, the lowest index, the highest slices.
    """
    known: dict[_Question, _Answer | None] = {}
    ordered = [_Ready(seat, known) for seat in sorted(seats, key=lambda seat: seat.gpu.index)]
    bound = [seat for seat in ordered if seat.required]

    if len(bound) <= 1:
        ways = [way for seat in bound or ordered if (way := seat.way(size))]
        if ways:
            return list(min(ways, key=lambda way: way.rank).shares)
    return _on_several(size, ordered)


class _Ready:
    """A GPU with its slots as numbers.

    Attributes:
        required: the shares that must be taken, in their order.
        most: how many can be taken at best.
    """

    def __init__(self, seat: Seat, known: dict[_Question, _Answer | None]) -> None:
        self._board = board = seat.board
        self._known = known
        self.required = sorted(seat.required, key=_number)
        self._occupied = board.mask(seat.occupied)
        for share in self.required:
            self._occupied |= board.mask(share.footprint)

        free = [share for share in seat.free if share not in seat.required]
        free.sort(key=_number, reverse=True)
        self._free = free
        self._masks = tuple([board.mask(share.footprint) for share in free])
        self._warm = tuple(
            (board.mask(share.footprint), free.index(share) if share in free else -1)
            for share in seat.warm
        )
        self.most = len(free) + len(self.required)

    def way(self, size: int) -> _Way | None:
        """Find the best way to take all of `size` shares, one or more, from here."""
        count = size - len(self.required)
        if count < 0 or size > self.most:
            return None

        asked = _Question(id(self._board), self._occupied, self._masks, self._warm, count)
        if asked not in self._known:
            self._known[asked] = min(_answers(self._board, asked), default=None, key=_cost)
        answer = self._known[asked]
        if answer is None:
            return None

        lost, changes, places = answer
        chosen = sorted((self._free[place] for place in places), key=_number)
        rank = (1, lost, changes, self._board.free_slices(self._occupied))
        return _Way(rank, [*self.required, *chosen])


def _answers(board: Board, asked: _Question) -> Iterator[_Answer]:
    before = board.worth(asked.occupied)

    for places in disjoint(asked.masks, asked.number, asked.occupied):
        taken = 0
        for place in places:
            taken |= asked.masks[place]
        changes = sum(-1 if own in places else bool(mask & taken) for mask, own in asked.warm)
        yield before - board.worth(asked.occupied | taken), changes, places


def _cost(answer: _Answer) -> tuple[int, int]:
    return answer[:2]


def _on_several(size: int, seats: Sequence[_Ready]) -> list[Share] | None:
    """Find the best way over all GPUs: for each number of shares, one GPU after the other."""
    best = {0: _Way(_NOTHING, ())}

    for seat in seats:
        counts = range(max(1, len(seat.required)), min(size, seat.most) + 1)
        parts = [(count, way) for count in counts if (way := seat.way(count))]
        grown = {} if seat.required else dict(best)
        for total, way in best.items():
            for count, part in parts:
                rank = tuple(map(add, way.rank, part.rank))
                known = grown.get(total + count)
                if total + count <= size and (known is None or rank < known.rank):
                    grown[total + count] = _Way(rank, [*way.shares, *part.shares])
        best = grown

    found = best.get(size)
    required = {share for seat in seats for share in seat.required}
    return found and sorted(found.shares, key=lambda share: share not in required)


def _number(share: Share) -> int:
    return share.number
