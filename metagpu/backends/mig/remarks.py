"""What is left of GPUs whose instances are made on demand, for an operator: sentences."""

from collections.abc import Iterator, Sequence

from metagpu.backends.mig.board import board_of
from metagpu.backends.mig.planner import Move, Site, moves
from metagpu.backends.mig.profiles import Profile, Spot
from metagpu.core.mig import slot_of
from metagpu.core.model import Lease, Stock
from metagpu.core.snapshot import GpuState


def remarks(states: Sequence[GpuState], names: frozenset[str], backend: str) -> Iterator[str]:
    """Say the largest instance that fits on each GPU, and which pod's move would open a larger one.

    Of what fits nowhere, by profile, the move that costs least.
    """
    sites = [_site(state, names, backend) for state in states]
    fitting = set[str]()

    for site in sites:
        rooms = site.board.room(site.occupied)
        fitting.update(name for name, count in rooms.items() if count)
        largest = site.board.largest(site.occupied)
        what = f"the largest instance that fits is {largest.name}" if largest else "it is full"
        yield f"GPU {site.gpu.index}: {what}"

    profiles = {profile.name: profile for site in sites for profile in site.board.profiles}
    for profile in sorted(profiles.values(), key=_size, reverse=True):
        if profile.name not in fitting and (found := moves(profile.name, sites)):
            yield _advice(found[0], profile, states)


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


def _advice(move: Move, profile: Profile, states: Sequence[GpuState]) -> str:
    lease = next(_leases_of(move, states))
    onto = f"{move.onto} of GPU {move.target.index}"
    return (
        f"if {lease.holder} moved from {move.spot} of GPU {move.gpu.index} to {onto}, "
        f"a {profile.name} would fit on GPU {move.gpu.index}"
    )


def _leases_of(move: Move, states: Sequence[GpuState]) -> Iterator[Lease]:
    for state in states:
        if state.gpu.id == move.gpu.id:
            yield from (it for i, it in state.leases.items() if slot_of(i) == str(move.spot))


def _size(profile: Profile) -> tuple[int, int]:
    return profile.memory_slices, profile.compute_slices
