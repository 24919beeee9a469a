"""Free capacity, the moves of pods that make room, and metrics of instances. Pure.

A GPU that gives nothing now, for any reason, has no free capacity, and is no target of a move.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final

import msgspec

from metagpu.backends.mig.profiles import (
    MigGeometry,
    PlacedProfile,
    geometry_of,
)
from metagpu.core.availability.reasons import open_to
from metagpu.core.model.backend_reports import BackendMetric, DefragMove, FreeCapacity, MetricKind
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.mig import profile_of, slot_of
from metagpu.core.model.shares import Holder, ProvisionedState
from metagpu.core.model.snapshot import GpuState


class GpuOccupancy(msgspec.Struct, frozen=True):
    """The occupied slots of one GPU.

    Attributes:
        held: the instances that pods hold: each could be moved with its pod.
        other_slots: slots that are taken by anything else, which no move frees.
    """

    gpu: Gpu
    geometry: MigGeometry
    held: tuple[PlacedProfile, ...]
    other_slots: frozenset[str] = frozenset()

    @property
    def occupied(self) -> int:
        """The mask of all occupied slots."""
        return self.geometry.mask(self.other_slots) | self.geometry.taken(self.held)


class InstanceMove(msgspec.Struct, frozen=True):
    """The move of one pod's instance, from `source` on `gpu` to another placement.

    Attributes:
        destination: the new placement, on `target_gpu`.
        opened: the placement on `gpu` where the wanted profile would then fit.
    """

    gpu: Gpu
    source: PlacedProfile
    target_gpu: Gpu
    destination: PlacedProfile
    opened: PlacedProfile


def find_moves(profile: str, occupancies: Sequence[GpuOccupancy]) -> list[InstanceMove]:
    """Find the single moves after which one more instance of a profile would fit.

    No moves if it fits already. For each instance that could make room, its best move: on its own
    GPU, or else the one that loses least. The smallest instances come first, and among them those
    that stay on their GPU.
    """
    taken = [(occupancy, occupancy.occupied) for occupancy in occupancies]
    if any(occupancy.geometry.free_placements(occupied, profile) for occupancy, occupied in taken):
        return []

    found = []
    for occupancy, occupied in taken:
        for instance in occupancy.held:
            without = occupied & ~occupancy.geometry.mask(instance.footprint)
            found += _best(_moves(instance, occupancy, without, profile, taken))
    return sorted(found, key=_cost)


def _moves(
    instance: PlacedProfile,
    occupancy: GpuOccupancy,
    without: int,
    profile: str,
    occupancies: Sequence[tuple[GpuOccupancy, int]],
) -> Iterator[tuple[tuple[int, ...], InstanceMove]]:
    """Yield the moves of an instance that make room, each with its rank, lower first.

    `without` is the mask of its GPU without the instance.
    """
    geometry = occupancy.geometry

    for opened in geometry.free_placements(without, profile):
        for target, taken in occupancies:
            here = target is occupancy
            occupied = without | geometry.masks[opened] if here else taken
            for destination in target.geometry.free_placements(occupied, instance.profile.name):
                after, room = occupied | target.geometry.masks[destination], target.geometry
                lost = room.future_capacity(occupied) - room.future_capacity(after)
                rank = (
                    not here,
                    lost,
                    target.gpu.index,
                    -destination.placement.start,
                    -opened.placement.start,
                )
                yield rank, InstanceMove(occupancy.gpu, instance, target.gpu, destination, opened)


def _best(ranked: Iterable[tuple[tuple[int, ...], InstanceMove]]) -> list[InstanceMove]:
    best = min(ranked, default=None, key=lambda pair: pair[0])
    return [best[1]] if best else []


def _cost(move: InstanceMove) -> tuple[int, int, int, int]:
    """Return the rank of a move: pods with little memory move first."""
    size = move.source.profile.memory_slices
    return size, move.target_gpu != move.gpu, move.gpu.index, move.source.placement.start


def free_capacity(
    states: Sequence[GpuState], names: frozenset[str], backend: str
) -> list[FreeCapacity]:
    """Return the free capacity of each GPU, for the profiles that its pool allows."""
    occupancies = {state.gpu.id: _occupancy(state, names, backend) for state in states}
    is_open = [occupancies[state.gpu.id] for state in states if open_to(state, backend)]
    moves = _defrag_moves(is_open, states)
    return [
        _capacity(
            occupancies[state.gpu.id], tuple(moves[state.gpu.id]), gives=open_to(state, backend)
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
    profiles = {
        profile.name: profile
        for occupancy in occupancies
        for profile in occupancy.geometry.profiles
    }

    for profile in sorted(profiles.values(), key=attrgetter("size"), reverse=True):
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


INSTANCES: Final = MetricKind(
    "mig_instances",
    "MIG instances of metagpu: held by a container, warm (idle, kept for the next container), "
    "released (not held, and not known to be idle yet), or faulty (out of service).",
    ("profile", "state"),
)
FREE: Final = MetricKind(
    "mig_free_slices",
    "Memory slices that nothing occupies; where instances are created on demand.",
)
LARGEST: Final = MetricKind(
    "mig_largest_placeable_slices",
    "Memory slices of the largest instance that could be created now, 0 if none could.",
)
FRAGMENTATION: Final = MetricKind(
    "mig_fragmentation_ratio",
    "Part of the largest instance possible with as many adjacent free slices that is lost to "
    "fragmentation: 0 when that instance fits, 1 when no instance fits.",
)
KINDS: Final = (INSTANCES, FREE, LARGEST, FRAGMENTATION)

_HELD: Final = "held"


def instance_metrics(state: GpuState, backend: str) -> Iterator[BackendMetric]:
    """Count the instances of a GPU, by profile and state.

    A GPU has seven at most: zeros, for each profile and state, would be many more series.
    """
    for labels, count in Counter(_instances(state, backend).values()).items():
        yield BackendMetric(INSTANCES, state.gpu.id, count, labels)


def _instances(state: GpuState, backend: str) -> dict[str, tuple[str, str]]:
    """Return the profile and state of each MIG device; one held replica holds it."""
    found: dict[str, tuple[str, str]] = {}

    for share, device in state.provisioned.get(backend, ProvisionedState()).devices.items():
        held = share in state.leases
        if held or device.device not in found:
            at = _HELD if held else "warm" if device.idle else "released"
            at = "faulty" if device.device in state.mig_faults else at
            found[device.device] = profile_of(share), at
    return found


def capacity_metrics(
    state: GpuState, names: frozenset[str], backend: str
) -> Iterator[BackendMetric]:
    """Return the free capacity of a GPU with instances on demand, as `capacity` does.

    A GPU that gives nothing now, for any reason, has no placeable instances.
    """
    geometry, whole = (geometry_of(state.gpu.mig_profiles, profiles) for profiles in (names, None))
    slots = set(state.provisioned.get(backend, ProvisionedState()).blocked)
    slots.update(slot for lease in state.leases.values() for slot in lease.share.footprint)
    gpu, occupied, free = state.gpu.id, geometry.mask(slots), whole.free_slices(whole.mask(slots))
    gives = open_to(state, backend)

    yield BackendMetric(FREE, gpu, free)
    yield BackendMetric(LARGEST, gpu, _largest(geometry, occupied) if gives else 0)
    yield BackendMetric(FRAGMENTATION, gpu, fragmentation(geometry, occupied, free))


def fragmentation(geometry: MigGeometry, occupied: int, free: int) -> float:
    """Return the part of the largest possible instance that is lost to fragmentation.

    Free slices too few for every profile are no loss: no instance ever fits in so few.
    """
    could = max((p.memory_slices for p in geometry.profiles if p.memory_slices <= free), default=0)
    return 1 - _largest(geometry, occupied) / could if could else 0.0


def _largest(geometry: MigGeometry, occupied: int) -> int:
    largest = geometry.largest(occupied)
    return largest.memory_slices if largest else 0
