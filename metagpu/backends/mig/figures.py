"""What is made of GPUs by MIG and what is left of them, in numbers: for monitoring."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from metagpu.backends.mig.board import board_of
from metagpu.backends.mig.profiles import Board
from metagpu.core.figures import Figure, FigureKind
from metagpu.core.mig import profile_of
from metagpu.core.model import Stock
from metagpu.core.snapshot import GpuState

INSTANCES: Final = FigureKind(
    "mig_instances",
    "MIG instances that metagpu has made: held by a container, warm (kept for the next one), "
    "checked (given back, until it is known to be idle), or broken (out of service).",
    ("profile", "state"),
)
PLACEABLE: Final = FigureKind(
    "mig_placeable_instances",
    "How many more instances of a profile could be made now, if no other is asked for; where "
    "instances are made on demand.",
    ("profile",),
)
FREE: Final = FigureKind(
    "mig_free_slices",
    "Memory slices that nothing occupies; where instances are made on demand.",
)
LARGEST: Final = FigureKind(
    "mig_largest_placeable_slices",
    "Memory slices of the largest instance that could be made now, 0 if none could.",
)
FRAGMENTATION: Final = FigureKind(
    "mig_fragmentation_ratio",
    "What of the largest instance that the free slices could be, side by side, is lost by where "
    "they are: 0 when it fits, 1 when nothing does.",
)
KINDS: Final = (INSTANCES, PLACEABLE, FREE, LARGEST, FRAGMENTATION)

_STATES: Final = ("held", "warm", "checked", "broken")


def made(state: GpuState, names: Sequence[str], backend: str) -> Iterator[Figure]:
    """Count the instances of a GPU, by profile and by what becomes of them."""
    profiles = [profile.name for profile in state.gpu.mig_profiles if profile.name in names]
    counts = Counter(_instances(state, backend).values())

    for profile in dict.fromkeys([*profiles, *(profile for profile, _ in counts)]):
        for at in _STATES:
            yield Figure(INSTANCES, state.gpu.id, counts[profile, at], (profile, at))


def _instances(state: GpuState, backend: str) -> dict[str, tuple[str, str]]:
    """Tell profile and state of each MIG device; of several replicas, one is enough to hold it."""
    found: dict[str, tuple[str, str]] = {}

    for share, it in state.stocks.get(backend, Stock()).made.items():
        held = share in state.leases
        if held or it.device not in found:
            at = "held" if held else "warm" if it.idle else "checked"
            at = "broken" if it.device in state.faults else at
            found[it.device] = profile_of(share), at
    return found


def left(state: GpuState, names: frozenset[str], backend: str) -> Iterator[Figure]:
    """Say what there is room for on a GPU whose instances are made on demand, as `rooms` does.

    A GPU that gives nothing now, whatever the reason, has no room.
    """
    board, whole = (board_of(state.gpu.mig_profiles, those) for those in (names, None))
    slots = set(state.stocks.get(backend, Stock()).blocked)
    slots.update(slot for lease in state.leases.values() for slot in lease.share.footprint)
    gpu, occupied, free = state.gpu.id, board.mask(slots), whole.free_slices(whole.mask(slots))
    gives = state.open_to(backend)

    for profile, count in board.room(occupied).items():
        yield Figure(PLACEABLE, gpu, count if gives else 0, (profile,))
    yield Figure(FREE, gpu, free)
    yield Figure(LARGEST, gpu, _largest(board, occupied) if gives else 0)
    yield Figure(FRAGMENTATION, gpu, fragmentation(board, occupied, free))


def fragmentation(board: Board, occupied: int, free: int) -> float:
    """Say how much smaller the largest instance that fits is than so many slices would allow.

    Free slices that no profile is small enough for are no loss: nothing ever fits in so few.
    """
    could = max((p.memory_slices for p in board.profiles if p.memory_slices <= free), default=0)
    return 1 - _largest(board, occupied) / could if could else 0.0


def _largest(board: Board, occupied: int) -> int:
    largest = board.largest(occupied)
    return largest.memory_slices if largest else 0
