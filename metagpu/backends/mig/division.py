"""How an instance of a layout is given to containers: to one, to several in turns, or through MPS.

Pure. What a share has beside its instance is the **ending** of its id, and of its slots: none,
`-t1` (a turn), or `-p1` (a unit under MPS).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from metagpu.backends.mps_daemon import parts
from metagpu.backends.placement import Placement
from metagpu.core.gpu import MIB, Gpu
from metagpu.core.mig import MigProfile
from metagpu.core.model import ShareId
from metagpu.core.units import Bytes

WHOLE: Final = ("",)
"""The endings of an instance that is one container's."""
_TURN: Final = "-t"
_UNIT: Final = "-p"

Amount = int | dict[str, int]
"""A number for every profile of a layout, or one by profile."""


class MpsTerms(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """What a pool may say of instances that are shared through MPS.

    Attributes:
        units_per_instance: how many units an instance has, 100 unless something else is said; a
            container may take several, of one instance. By profile, or of all.
        replicas: how many equal parts it has instead, no more than it serves clients.
        placement: which instance to take when several would do.
        max_clients: how many containers a whole GPU would serve at once, of which an instance
            serves its part; as the architecture allows when not given.
        server_memory: what the MPS server of an instance keeps for itself.
    """

    units_per_instance: Amount | None = None
    replicas: Amount | None = None
    placement: Placement = Placement.BINPACK
    max_clients: int | None = None
    server_memory: Bytes = parts.SERVER_MEMORY

    def __post_init__(self) -> None:
        units, replicas = self.units_per_instance, self.replicas
        if units is not None and replicas is not None and not _apart(units, replicas):
            raise ValueError(
                "unitsPerInstance and replicas contradict each other; give one of them, or each "
                "for other profiles"
            )
        for value in _values(units):
            parts.check_number("unitsPerInstance", value, parts.MOST_UNITS)
        for value in _values(replicas):
            parts.check_number("replicas", value, parts.MOST_CLIENTS)
        parts.check_number("maxClients", self.max_clients, parts.MOST_CLIENTS)

    @property
    def named(self) -> Mapping[str, Iterable[str]]:
        """The profiles that it names, by the key that names them."""
        keys = {"unitsPerInstance": self.units_per_instance, "replicas": self.replicas}
        return {f"mps.{key}": it for key, it in keys.items() if isinstance(it, dict)}

    def has(self, profile: str) -> bool:
        """Tell whether instances of a profile are shared through MPS."""
        return self._units(profile) is not None or self._replicas(profile) is not None

    def count(self, profile: MigProfile, gpu: Gpu) -> int:
        """Say into how many units an instance is cut, one that is shared so."""
        if (units := self._units(profile.name)) is not None:
            return units
        return min(self._replicas(profile.name) or 1, self.clients(profile, gpu))

    def clients(self, profile: MigProfile, gpu: Gpu) -> int:
        """Say how many containers an instance serves at once.

        Its part of what the GPU serves, by compute slices: NVIDIA's MIG user guide says that the
        48 of a GPU are lowered in proportion to the size of the compute instance.
        """
        whole = max(it.slices for it in gpu.mig_profiles)
        return max(1, parts.clients_of(gpu, self.max_clients) * profile.slices // whole)

    def too_many(self, profile: MigProfile, gpu: Gpu) -> bool:
        """Tell whether more replicas are wanted of an instance than it serves clients."""
        return (self._replicas(profile.name) or 1) > self.clients(profile, gpu)

    def _units(self, profile: str) -> int | None:
        if self.units_per_instance is None and self.replicas is None:
            return parts.UNITS
        return _of(self.units_per_instance, profile)

    def _replicas(self, profile: str) -> int | None:
        return _of(self.replicas, profile)


class Division(msgspec.Struct, frozen=True):
    """The shares of an instance: their endings, and bytes of its memory for each."""

    endings: tuple[str, ...]
    memory: int


def turns(count: int, memory: int) -> Division:
    """Divide an instance among containers that take turns; one has it for itself."""
    endings = WHOLE if count == 1 else tuple(f"{_TURN}{number}" for number in range(count))
    return Division(endings, memory // count)


def units(terms: MpsTerms, profile: MigProfile, gpu: Gpu) -> Division:
    """Divide an instance among clients of its MPS control daemon."""
    count = terms.count(profile, gpu)
    memory = parts.usable(profile.memory, terms.server_memory) // count
    if memory < MIB:
        return Division((), 0)
    return Division(tuple(f"{_UNIT}{number}" for number in range(count)), memory)


def through_mps(share: ShareId) -> bool:
    """Tell whether an id is of a unit under MPS."""
    return ending_of(share).startswith(_UNIT)


def ending_of(share: ShareId) -> str:
    """Give the ending of an id, empty for a whole instance."""
    _, at, rest = share.partition("@")
    _, dash, number = rest.partition("-")
    return f"{dash}{number}" if at else ""


def with_ending(footprint: Iterable[str], ending: str) -> frozenset[str]:
    """Give the slots of a share: those of no other ending, for what divides one goes together."""
    return frozenset(f"{slot}{ending}" for slot in footprint)


def _of(amount: Amount | None, profile: str) -> int | None:
    return amount.get(profile) if isinstance(amount, dict) else amount


def _apart(one: Amount, other: Amount) -> bool:
    """Tell whether two amounts are about different profiles."""
    return isinstance(one, dict) and isinstance(other, dict) and not one.keys() & other.keys()


def _values(amount: Amount | None) -> Sequence[int | None]:
    return list(amount.values()) if isinstance(amount, dict) else [amount]
