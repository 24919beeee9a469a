"""What is left of GPUs whose instances are made on demand, and which pod's move would help. Pure.

A GPU that gives nothing now, whatever the reason, has no room, and is nobody's way out.
"""

from collections import defaultdict
from collections.abc import Sequence

from metagpu.backends.mig.board import board_of
from metagpu.backends.mig.planner import Move, Site, moves
from metagpu.backends.mig.profiles import Profile, Spot
from metagpu.core.gpu import GpuId
from metagpu.core.mig import slot_of
from metagpu.core.model import Holder, Stock
from metagpu.core.room import Relief, Room
from metagpu.core.snapshot import GpuState


def rooms(states: Sequence[GpuState], names: frozenset[str], backend: str) -> list[Room]:
    """Say what is left of each GPU, for the profiles that its pool allows."""
    sites = {state.gpu.id: _site(state, names, backend) for state in states}
    gives = [sites[state.gpu.id] for state in states if state.open_to(backend)]
    reliefs = _reliefs(gives, states)
    return [
        _room(sites[state.gpu.id], state.open_to(backend), tuple(reliefs[state.gpu.id]))
        for state in states
    ]


def _room(site: Site, gives: bool, reliefs: tuple[Relief, ...]) -> Room:  # noqa: FBT001 - private
    whole = board_of(site.gpu.mig_profiles)
    taken = whole.mask(site.others.union(*(spot.footprint for spot in site.held)))
    largest = site.board.largest(site.occupied) if gives else None
    return Room(
        site.gpu,
        largest.name if largest else None,
        largest.memory_slices if largest else 0,
        whole.free_slices(taken),
        whole.free_slices(0),
        not gives,
        reliefs,
    )


def _reliefs(sites: Sequence[Site], states: Sequence[GpuState]) -> defaultdict[GpuId, list[Relief]]:
    """Find for each profile that fits nowhere the move that costs least, by the GPU it opens."""
    found = defaultdict[GpuId, list[Relief]](list)
    profiles = {profile.name: profile for site in sites for profile in site.board.profiles}

    for profile in sorted(profiles.values(), key=_size, reverse=True):
        for move in moves(profile.name, sites)[:1]:
            relief = Relief(
                profile.name,
                str(move.opens),
                _holder(move, states),
                str(move.spot),
                move.target,
                str(move.onto),
            )
            found[move.gpu.id].append(relief)
    return found


def _site(state: GpuState, names: frozenset[str], backend: str) -> Site:
    board = board_of(state.gpu.mig_profiles, names)
    spots = {str(spot): spot for spot in board.spots}
    held: list[Spot] = []
    others = set(state.stocks.get(backend, Stock()).blocked)

    for share, lease in state.leases.items():
        spot = spots.get(slot_of(share))
        if spot is not None and lease.holder is not None:
            held.append(spot)
        else:
            others |= lease.share.footprint
    return Site(state.gpu, board, tuple(held), frozenset(others))


def _holder(move: Move, states: Sequence[GpuState]) -> Holder | None:
    holders = (
        lease.holder
        for state in states
        if state.gpu.id == move.gpu.id
        for share, lease in state.leases.items()
        if slot_of(share) == str(move.spot)
    )
    return next(holders, None)


def _size(profile: Profile) -> tuple[int, int]:
    return profile.memory_slices, profile.compute_slices
