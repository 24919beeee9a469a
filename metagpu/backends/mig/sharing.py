"""Sharing of an instance of a layout: one container, time-slicing, or MPS. Pure.

The id of a share, and each slot of its footprint, ends in a **suffix**: none for a whole instance,
`-t1` for a replica under time-slicing, `-p1` for a unit under MPS. Units are chosen and granted
here too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from metagpu.backends.common.mps_daemon.control import (
    DEFAULT_UNITS,
    MAX_CLIENTS,
    MAX_UNITS,
    SERVER_MEMORY,
    SHARED_MEMORY,
    MpsDirectories,
    check_number,
    check_shared_memory,
    grant_to_client,
    max_clients_of,
    usable_memory,
)
from metagpu.backends.common.packing import GpuCandidate, PlacementPolicy, choose_shares_or_fallback
from metagpu.core.availability.reasons import availability_of, open_to
from metagpu.core.config.units import Bytes
from metagpu.core.grants.grant import Grant
from metagpu.core.model.gpu import MIB, Gpu, GpuId
from metagpu.core.model.mig import MigProfile, slot_of
from metagpu.core.model.request_errors import MultipleDevices, TooManyClients
from metagpu.core.model.shares import Lease, Share, by_gpu, count_containers
from metagpu.core.model.snapshot import GpuState, Snapshot

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
        return {f"mps.{key}": value for key, value in keys.items() if isinstance(value, dict)}

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
        slices = max(mig_profile.slices for mig_profile in gpu.mig_profiles)
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


InstanceKey = tuple[GpuId, str]
"""A GPU, and the slot of an instance on it."""


def choose_units(
    size: int,
    available: Sequence[Share],
    required: Sequence[Share],
    snapshot: Snapshot,
    options: MigMpsOptions,
) -> list[Share]:
    """Choose units of one instance that takes another client; others come last."""
    required_units = _by_instance(required)
    candidates, open_candidates = list[GpuCandidate](), list[GpuCandidate]()

    for gpu, shares in by_gpu([*available, *required]).items():
        state = snapshot.gpus[gpu]
        offered = snapshot.offers[shares[0].resource].by_gpu[gpu]
        units = Counter(slot_of(share.id) for share in offered)
        is_open = open_to(state, shares[0].backend)
        for instance, free in sorted(_by_instance(shares).items()):
            must = frozenset(required_units.get(instance, ()))
            candidate = GpuCandidate(state.gpu, units[instance[1]], free, must)
            candidates.append(candidate)
            gives = is_open and not any(
                share.id in availability_of(state).unlisted for share in free
            )
            if candidate.required or (gives and _takes_more(instance, state, options)):
                open_candidates.append(candidate)
    return choose_shares_or_fallback(
        size, open_candidates, candidates, options.placement, largest=size
    )


def check_units(shares: Sequence[Share], snapshot: Snapshot, options: MigMpsOptions) -> None:
    """Refuse units of several instances, and a container too many for an instance.

    Raises:
        MultipleDevices: with the free units of each instance.
        TooManyClients: with the number of clients that the instance serves.
    """
    by_instance = _by_instance(shares)
    if len(by_instance) > 1:
        chosen = {instance: len(units) for instance, units in by_instance.items()}
        raise MultipleDevices(
            shares[0].resource,
            len(shares),
            _format_counts(chosen, snapshot),
            _format_counts(_free_units(shares[0], snapshot), snapshot),
            kind="MIG instance",
            larger="larger instances",
            most=max(
                len(units)
                for offered in snapshot.offers[shares[0].resource].by_gpu.values()
                for units in _by_instance(offered).values()
            ),
        )

    for instance, units in by_instance.items():
        state = snapshot.gpus[instance[0]]
        # The units of an init container go to the next container: no client is added.
        ids = {share.id for share in units}
        others = [lease for lease in _leases(instance, state) if lease.share.id not in ids]
        limit = _max_clients(instance, state, options)
        if count_containers(others) >= limit:
            name = f"instance {instance[1]} of GPU {state.gpu}"
            raise TooManyClients(units[0].resource, name, limit)


def grant_units(grant: Grant, shares: Sequence[Share], snapshot: Snapshot, run_dir: str) -> Grant:
    """Make the container a client of its instance's control daemon."""
    [(instance, held)] = _by_instance(shares).items()
    # Another pool may have divided the instance, under the same resource name.
    offered = snapshot.offers[held[0].resource].by_gpu[instance[0]]
    units = sum(slot_of(share.id) == instance[1] for share in offered)
    device = snapshot.gpus[held[0].gpu].provisioned[held[0].backend].devices[held[0].id]
    directories = MpsDirectories.for_device(run_dir, device.device)
    return grant_to_client(grant, directories, held, units)


def _by_instance(shares: Sequence[Share]) -> dict[InstanceKey, list[Share]]:
    found: dict[InstanceKey, list[Share]] = {}
    for share in dict.fromkeys(shares):
        found.setdefault((share.gpu, slot_of(share.id)), []).append(share)
    return found


def _leases(instance: InstanceKey, state: GpuState) -> list[Lease]:
    return [lease for i, lease in state.leases.items() if slot_of(i) == instance[1]]


def _takes_more(instance: InstanceKey, state: GpuState, options: MigMpsOptions) -> bool:
    clients = count_containers(_leases(instance, state))
    return clients < _max_clients(instance, state, options)


def _max_clients(instance: InstanceKey, state: GpuState, options: MigMpsOptions) -> int:
    name = instance[1].rpartition("@")[0]
    profile = next(
        mig_profile for mig_profile in state.gpu.mig_profiles if mig_profile.name == name
    )
    return options.clients_of(profile, state.gpu)


def _free_units(like: Share, snapshot: Snapshot) -> Mapping[InstanceKey, int]:
    """Count the units of each instance that could be granted under a resource's name."""
    found: dict[InstanceKey, int] = {}
    for gpu, shares in snapshot.offers[like.resource].by_gpu.items():
        state = snapshot.gpus[gpu]
        taken = availability_of(state).unlisted | state.leases.keys()
        for instance, units in _by_instance(shares).items():
            free = sum(share.id not in taken for share in units)
            found[instance] = free if state.verdict.healthy else 0
    return found


def _format_counts(counts: Mapping[InstanceKey, int], snapshot: Snapshot) -> str:
    by_index = {
        (snapshot.gpus[gpu].gpu.index, slot): count for (gpu, slot), count in counts.items()
    }
    return ", ".join(
        f"GPU {index} {slot}: {count}" for (index, slot), count in sorted(by_index.items())
    )
