"""Sharing of an instance of a layout: one container, time-slicing, or MPS. Pure.

The id of a share, and each slot of its footprint, ends in a **suffix**: none for a whole instance,
`-t1` for a replica under time-slicing, `-p1` for a unit under MPS.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from metagpu.backends.common.mps_daemon.client_limits import (
    DEFAULT_UNITS,
    MAX_CLIENTS,
    MAX_UNITS,
    SERVER_MEMORY,
    SHARED_MEMORY,
    check_number,
    check_shared_memory,
    max_clients_of,
    usable_memory,
)
from metagpu.backends.common.packing import PlacementPolicy
from metagpu.core.config.units import Bytes
from metagpu.core.model.gpu import MIB, Gpu
from metagpu.core.model.mig import MigProfile

UNSHARED: Final = ("",)
"""The suffixes of an instance that one container has."""
_REPLICA: Final = "-t"
_UNIT: Final = "-p"

CountByProfile = int | dict[str, int]
"""A number for all profiles of a layout, or one for each profile."""


class MigMpsOptions(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """The options of instances that are shared through MPS: the key `mps` of a layout.

    Attributes:
        units_per_instance: the units of an instance, 100 by default; a container may take several
            units of one instance. By profile, or for all.
        replicas: instead, the equal parts of an instance, at most as many as it serves clients.
        placement: the policy for choosing among several instances.
        max_clients: how many containers a whole GPU serves at once, of which an instance serves
            its part; by default as many as the architecture allows.
        server_memory: the memory that the MPS server of an instance needs.
        shared_memory: the size of /dev/shm, which all containers of an instance share.
    """

    units_per_instance: CountByProfile | None = None
    replicas: CountByProfile | None = None
    placement: PlacementPolicy = PlacementPolicy.BINPACK
    max_clients: int | None = None
    server_memory: Bytes = SERVER_MEMORY
    shared_memory: Bytes = SHARED_MEMORY

    def __post_init__(self) -> None:
        units, replicas = self.units_per_instance, self.replicas
        if units is not None and replicas is not None and not _disjoint(units, replicas):
            raise ValueError(
                "unitsPerInstance and replicas contradict each other; give one of them, or each "
                "for other profiles"
            )
        for value in _values(units):
            check_number("unitsPerInstance", value, MAX_UNITS)
        for value in _values(replicas):
            check_number("replicas", value, MAX_CLIENTS)
        check_number("maxClients", self.max_clients, MAX_CLIENTS)
        check_shared_memory(self.shared_memory)

    @property
    def profiles_by_key(self) -> Mapping[str, Iterable[str]]:
        """The profiles that the options name, by the key that names them."""
        keys = {"unitsPerInstance": self.units_per_instance, "replicas": self.replicas}
        return {f"mps.{key}": it for key, it in keys.items() if isinstance(it, dict)}

    def includes(self, profile: str) -> bool:
        """Return whether instances of a profile are shared through MPS."""
        return self._units(profile) is not None or self._replicas(profile) is not None

    def units_of(self, profile: MigProfile, gpu: Gpu) -> int:
        """Return the number of units, or of replicas, of an instance under MPS."""
        if (units := self._units(profile.name)) is not None:
            return units
        return min(self._replicas(profile.name) or 1, self.clients_of(profile, gpu))

    def clients_of(self, profile: MigProfile, gpu: Gpu) -> int:
        """Return how many containers an instance serves at once.

        An instance serves its part of the GPU's clients, by compute slices: NVIDIA's MIG user guide
        says that the 48 of a GPU are lowered in proportion to the size of the compute instance.
        """
        slices = max(it.slices for it in gpu.mig_profiles)
        return max(1, max_clients_of(gpu, self.max_clients) * profile.slices // slices)

    def exceeds_clients(self, profile: MigProfile, gpu: Gpu) -> bool:
        """Return whether the pool has more replicas of an instance than it serves clients."""
        return (self._replicas(profile.name) or 1) > self.clients_of(profile, gpu)

    def _units(self, profile: str) -> int | None:
        if self.units_per_instance is None and self.replicas is None:
            return DEFAULT_UNITS
        return _count_of(self.units_per_instance, profile)

    def _replicas(self, profile: str) -> int | None:
        return _count_of(self.replicas, profile)


class InstanceSharing(msgspec.Struct, frozen=True):
    """The shares of an instance: the suffixes of their ids, and the bytes of each.

    `replicas` is set where the containers take turns: see `Share.replica`.
    """

    suffixes: tuple[str, ...]
    memory: int
    replicas: bool = False


def share_by_time_slicing(count: int, memory: int) -> InstanceSharing:
    """Share an instance among `count` containers by time-slicing; one has it whole."""
    suffixes = UNSHARED if count == 1 else tuple(f"{_REPLICA}{number}" for number in range(count))
    return InstanceSharing(suffixes, memory // count, replicas=count > 1)


def share_by_mps(options: MigMpsOptions, profile: MigProfile, gpu: Gpu) -> InstanceSharing:
    """Share an instance among clients of its MPS control daemon."""
    count = options.units_of(profile, gpu)
    memory = usable_memory(profile.memory, options.server_memory) // count
    if memory < MIB:
        return InstanceSharing((), 0)
    return InstanceSharing(tuple(f"{_UNIT}{number}" for number in range(count)), memory)


def with_suffix(footprint: Iterable[str], suffix: str) -> frozenset[str]:
    """Return the footprint of one of an instance's shares: its own suffix alone."""
    return frozenset(f"{slot}{suffix}" for slot in footprint)


def _count_of(counts: CountByProfile | None, profile: str) -> int | None:
    return counts.get(profile) if isinstance(counts, dict) else counts


def _disjoint(one: CountByProfile, other: CountByProfile) -> bool:
    """Return whether two counts name different profiles."""
    return isinstance(one, dict) and isinstance(other, dict) and not one.keys() & other.keys()


def _values(counts: CountByProfile | None) -> Sequence[int | None]:
    return list(counts.values()) if isinstance(counts, dict) else [counts]
