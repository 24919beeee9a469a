"""A fixed layout of MIG instances: where they are, and which of them a container gets. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from metagpu.backends.mig.board import board_of
from metagpu.backends.mig.planner import Misfit, plan_layout
from metagpu.backends.mig.profiles import Board, Spot
from metagpu.core.gpu import Gpu
from metagpu.core.mig import slot_of
from metagpu.core.model import Share, by_gpu
from metagpu.core.snapshot import Snapshot


def title(layout: Mapping[str, int]) -> str:
    """Name a layout as mig-parted does, the largest profiles first: `2x2g.10gb-3x1g.5gb`."""
    return "-".join(f"{count}x{profile}" for profile, count in sorted(layout.items())[::-1])


def planned(gpu: Gpu, layout: Mapping[str, int]) -> tuple[Spot, ...] | Misfit:
    """Find where the instances of a layout are on a GPU, by profile and slice, or why not.

    Where they are follows from the layout and its own profiles alone: ids of shares rest on it.
    """
    missing = layout.keys() - {profile.name for profile in gpu.mig_profiles}
    if missing:
        # The planner knows how to say it, of a board with all profiles.
        return plan_layout(board_of(gpu.mig_profiles), dict.fromkeys(sorted(missing), 1))
    board = board_of(gpu.mig_profiles, frozenset(layout))
    return _planned(board, frozenset(layout.items()))


@lru_cache(maxsize=64)
def _planned(board: Board, wanted: frozenset[tuple[str, int]]) -> tuple[Spot, ...] | Misfit:
    found = plan_layout(board, dict(sorted(wanted)))
    if isinstance(found, Misfit):
        return found
    there = set(found)
    return tuple(spot for spot in board.spots if spot in there)


def fairest(
    size: int, available: Sequence[Share], required: Sequence[Share], snapshot: Snapshot
) -> list[Share]:
    """Choose shares of the instances that the fewest containers have, the required ones first.

    Then those of the GPU with the lowest index. What cannot be given now comes last: the kubelet
    may not have heard of it yet.
    """
    those = by_gpu([*required, *available])
    taken = Counter((share.gpu, slot_of(share.id)) for share in required)
    for gpu in those:
        taken.update((gpu, slot_of(share)) for share in snapshot.gpus[gpu].leases)

    ranked = []
    for gpu, shares in those.items():
        state = snapshot.gpus[gpu]
        shut = state.shut
        for share in sorted(shares, key=lambda share: share.number):
            if share in required:
                continue
            last = share.id in shut or not state.open_to(share.backend)
            instance = gpu, slot_of(share.id)
            ranked.append(((last, taken[instance], state.gpu.index, share.number), share))
            taken[instance] += 1
    ranked.sort(key=lambda pair: pair[0])
    return [*required, *(share for _, share in ranked)][:size]
