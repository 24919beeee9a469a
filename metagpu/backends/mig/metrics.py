"""Metrics of MIG: instances, free capacity, and fragmentation."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from metagpu.backends.mig.geometry import geometry_of
from metagpu.backends.mig.profiles import MigGeometry
from metagpu.core.model.backend_metrics import BackendMetric, MetricKind
from metagpu.core.model.mig import profile_of
from metagpu.core.model.shares import ProvisionedState
from metagpu.core.model.snapshot import GpuState

INSTANCES: Final = MetricKind(
    "mig_instances",
    "MIG instances of metagpu: held by a container, warm (idle, kept for the next container), "
    "released (not held, and not known to be idle yet), or faulty (out of service).",
    ("profile", "state"),
)
PLACEABLE: Final = MetricKind(
    "mig_placeable_instances",
    "More instances of a profile that could be created now, if pods asked for no other profile; "
    "where instances are created on demand.",
    ("profile",),
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
KINDS: Final = (INSTANCES, PLACEABLE, FREE, LARGEST, FRAGMENTATION)

_HELD: Final = "held"
_STATES: Final = (_HELD, "warm", "released", "faulty")


def instance_metrics(
    state: GpuState, names: Sequence[str], backend: str
) -> Iterator[BackendMetric]:
    """Count the instances of a GPU, by profile and state."""
    profiles = [profile.name for profile in state.gpu.mig_profiles if profile.name in names]
    counts = Counter(_instances(state, backend).values())

    for profile in dict.fromkeys([*profiles, *(profile for profile, _ in counts)]):
        for at in _STATES:
            if counts[profile, at] or at == _HELD:  # four of each profile would be many series
                yield BackendMetric(INSTANCES, state.gpu.id, counts[profile, at], (profile, at))


def _instances(state: GpuState, backend: str) -> dict[str, tuple[str, str]]:
    """Return the profile and state of each MIG device; one held replica holds it."""
    found: dict[str, tuple[str, str]] = {}

    for share, it in state.provisioned.get(backend, ProvisionedState()).devices.items():
        held = share in state.leases
        if held or it.device not in found:
            at = _HELD if held else "warm" if it.idle else "released"
            at = "faulty" if it.device in state.mig_faults else at
            found[it.device] = profile_of(share), at
    return found


def capacity_metrics(
    state: GpuState, names: frozenset[str], backend: str
) -> Iterator[BackendMetric]:
    """Return the free capacity of a GPU with instances on demand, as `capacity` does.

    A GPU that gives nothing now, for any reason, has no placeable instances.
    """
    geometry, whole = (geometry_of(state.gpu.mig_profiles, it) for it in (names, None))
    slots = set(state.provisioned.get(backend, ProvisionedState()).blocked)
    slots.update(slot for lease in state.leases.values() for slot in lease.share.footprint)
    gpu, occupied, free = state.gpu.id, geometry.mask(slots), whole.free_slices(whole.mask(slots))
    gives = state.open_to(backend)

    for profile, count in geometry.free_counts(occupied).items():
        yield BackendMetric(PLACEABLE, gpu, count if gives else 0, (profile,))
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
