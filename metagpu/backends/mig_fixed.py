"""A fixed layout of MIG instances: where they go on a GPU. Pure, and the same after a reboot."""

from collections.abc import Mapping
from functools import lru_cache

from metagpu.backends.mig_board import board_of
from metagpu.backends.mig_planner import Misfit, plan_layout
from metagpu.backends.mig_profiles import Board, Spot
from metagpu.core.model import Gpu


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
