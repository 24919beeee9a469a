"""The free capacity of GPUs with instances on demand, and helpful moves. Pure.

A GPU that gives nothing now, for any reason, has no free capacity, and is no target of a move.
"""

from collections import defaultdict
from collections.abc import Sequence

from metagpu.backends.mig.geometry import geometry_of
from metagpu.backends.mig.planner import GpuOccupancy, InstanceMove, find_moves
from metagpu.backends.mig.profiles import PlacedProfile, ProfileGeometry
from metagpu.core.model.capacity import DefragMove, FreeCapacity
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.mig import slot_of
from metagpu.core.model.shares import Holder, ProvisionedState
from metagpu.core.model.snapshot import GpuState


def free_capacity(
    states: Sequence[GpuState], names: frozenset[str], backend: str
) -> list[FreeCapacity]:
    """Return the free capacity of each GPU, for the profiles that its pool allows."""
    occupancies = {state.gpu.id: _occupancy(state, names, backend) for state in states}
    is_open = [occupancies[state.gpu.id] for state in states if state.open_to(backend)]
    moves = _defrag_moves(is_open, states)
    return [
        _capacity(
            occupancies[state.gpu.id], tuple(moves[state.gpu.id]), gives=state.open_to(backend)
        )
        for state in states
    ]


def _capacity(
    occupancy: GpuOccupancy, moves: tuple[DefragMove, ...], *, gives: bool
) -> FreeCapacity:
    whole = geometry_of(occupancy.gpu.mig_profiles)
    held = (placed.footprint for placed in occupancy.held)
    taken = whole.mask(occupancy.other_slots.union(*held))
    largest = occupancy.geometry.largest(occupancy.occupied) if gives else None
    return FreeCapacity(
        occupancy.gpu,
        largest.name if largest else None,
        largest.memory_slices if largest else 0,
        whole.free_slices(taken),
        whole.free_slices(0),
        not gives,
        moves,
    )


def _defrag_moves(
    occupancies: Sequence[GpuOccupancy], states: Sequence[GpuState]
) -> defaultdict[GpuId, list[DefragMove]]:
    """Find the cheapest move for each profile that fits nowhere, by the GPU it frees."""
    found = defaultdict[GpuId, list[DefragMove]](list)
    profiles = {profile.name: profile for it in occupancies for profile in it.geometry.profiles}

    for profile in sorted(profiles.values(), key=_size, reverse=True):
        for move in find_moves(profile.name, occupancies)[:1]:
            defrag_move = DefragMove(
                profile.name,
                str(move.opened),
                _holder(move, states),
                str(move.source),
                move.target_gpu,
                str(move.destination),
            )
            found[move.gpu.id].append(defrag_move)
    return found


def _occupancy(state: GpuState, names: frozenset[str], backend: str) -> GpuOccupancy:
    geometry = geometry_of(state.gpu.mig_profiles, names)
    by_slot = {str(placed): placed for placed in geometry.placed_profiles}
    held: list[PlacedProfile] = []
    other_slots = set(state.provisioned.get(backend, ProvisionedState()).blocked)

    for share, lease in state.leases.items():
        placed = by_slot.get(slot_of(share))
        if placed is not None and lease.holder is not None:
            held.append(placed)
        else:
            other_slots |= lease.share.footprint
    return GpuOccupancy(state.gpu, geometry, tuple(held), frozenset(other_slots))


def _holder(move: InstanceMove, states: Sequence[GpuState]) -> Holder | None:
    holders = (
        lease.holder
        for state in states
        if state.gpu.id == move.gpu.id
        for share, lease in state.leases.items()
        if slot_of(share) == str(move.source)
    )
    return next(holders, None)


def _size(profile: ProfileGeometry) -> tuple[int, int]:
    return profile.memory_slices, profile.compute_slices
