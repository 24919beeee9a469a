"""MIG profiles: names of resources and shares, exclusion, future capacity. Pure.

- **Profile**: a kind of instance.
- **Placement**: the memory slices that an instance occupies.
- **Placed profile**: a profile at one of its placements; a share stands for one.
- **Geometry**: the profiles of one GPU model, and what follows from them; `geometry_of` makes it
  of NVML's list.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import sqrt
from typing import Final

import msgspec

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.mig import MigInstance, MigProfile, Placement
from metagpu.core.model.shares import ResourceName, ShareId

_LATER: Final = 0.5
"""How much a request counts, relative to the request before it."""
_DIGITS: Final = 9
"""Decimal digits of a value: equal futures are equal, however they were added up."""
_SLICE: Final = "s"
"""The first letter of every slot of MIG: `s0` to `s7` are memory slices, `s+me` is an engine."""


class ProfileGeometry(msgspec.Struct, frozen=True):
    """A profile, as NVML describes it.

    Attributes:
        name: NVIDIA's, such as `1g.5gb+me`.
        compute_slices: the `g` of the name.
        placements: the possible placements; all of one size, the lowest start first.
        max_count: the number of such instances on an empty GPU.
        engines: the engines that each instance takes and of which the GPU has one set, such as `me`
            for the media engines of `+me`. Competing profiles have a name in common.
        slice_engines: the kinds of engines that each slice has of its own; an instance takes those
            of its slices. A profile with all of the GPU's names them in `engines`: `me0` to `me3`.
    """

    name: str
    compute_slices: int
    placements: tuple[Placement, ...]
    max_count: int
    engines: frozenset[str] = frozenset()
    slice_engines: frozenset[str] = frozenset()

    @property
    def memory_slices(self) -> int:
        """The number of memory slices of an instance."""
        return self.placements[0].size

    @property
    def size(self) -> tuple[int, int]:
        """The memory and compute slices, by which profiles are ordered."""
        return self.memory_slices, self.compute_slices

    @property
    def placed_profiles(self) -> list["PlacedProfile"]:
        """The profile at each of its placements, the lowest start first."""
        return [PlacedProfile(self, placement) for placement in self.placements]

    @property
    def tokens(self) -> frozenset[str]:
        """The slots of every instance besides its slices, at any placement.

        A profile of which the GPU allows one instance, for whatever reason, excludes itself.
        """
        alone = self.max_count == 1 and len(self.placements) > 1 and not self.engines
        return frozenset((self.name,)) if alone else self.engines


class PlacedProfile(msgspec.Struct, frozen=True):
    """A profile at one of its placements."""

    profile: ProfileGeometry
    placement: Placement

    @property
    def footprint(self) -> frozenset[str]:
        """The slots of its share: two instances with a slot in common exclude each other.

        The slots are the memory slices and the engines. Compute slices need no slots of their own:
        on every known GPU, instances with disjoint memory have enough of them
        (`MigGeometry.overcommitted`).
        """
        slices = self.placement.slices
        own = {f"{kind}{number}" for kind in self.profile.slice_engines for number in slices}

        return frozenset(
            [
                *(f"{_SLICE}{number}" for number in slices),
                *(f"{_SLICE}+{token}" for token in self.profile.tokens | own),
            ]
        )

    def __str__(self) -> str:
        """Return the name of share ids: `2g.10gb@4`."""
        return f"{self.profile.name}@{self.placement.start}"


@dataclass(frozen=True)
class MigGeometry:
    """The possible instances of one GPU model, of all profiles or of the allowed ones.

    The geometry caches what it computes: GPUs of one model should have one geometry in common.

    `mask` turns slots into bits of a number: the occupied slots, and those that a placed profile
    would occupy. The other methods take the occupied slots as such a number.

    Attributes:
        compute_slices: the number of compute slices of the GPU.
    """

    profiles: tuple[ProfileGeometry, ...]
    compute_slices: int

    @cached_property
    def placed_profiles(self) -> tuple[PlacedProfile, ...]:
        """Every placed profile, in the order of the profiles."""
        return tuple(placed for profile in self.profiles for placed in profile.placed_profiles)

    @cached_property
    def masks(self) -> Mapping[PlacedProfile, int]:
        """The mask of each placed profile."""
        return {placed: self.mask(placed.footprint) for placed in self.placed_profiles}

    def mask(self, slots: Iterable[str]) -> int:
        """Return slots as bits; a slot that no profile here uses has no bit."""
        bits = self._bits
        found = 0
        for slot in slots:
            found |= bits.get(slot, 0)
        return found

    def taken(self, placed: Iterable[PlacedProfile]) -> int:
        """Return the mask of placed profiles, which may be of another geometry."""
        return self.mask(slot for each in placed for slot in each.footprint)

    def free_placements(self, occupied: int, profile: str | None = None) -> list[PlacedProfile]:
        """List the placed profiles, of one profile or of all, that fit now."""
        return [
            placed
            for placed, mask in self.masks.items()
            if not mask & occupied and profile in (None, placed.profile.name)
        ]

    def free_slices(self, occupied: int) -> int:
        """Count the memory slices that are not occupied."""
        return (self._memory & ~occupied).bit_count()

    def free_counts(self, occupied: int) -> Mapping[str, int]:
        """Return how many more instances of each profile fit, without any other profile."""
        return dict(zip(self._by_profile, self._free_counts(occupied), strict=True))

    def future_capacity(self, occupied: int) -> int:
        """Return the value of the rest of a GPU beside other GPUs: its room.

        The value is the memory that each profile could still get, in slices, summed over the
        profiles; docs/decisions/0020 gives the reasons.
        """
        known = self._future_capacities.get(occupied)
        if known is None:
            sizes = (profile.memory_slices for profile in self.profiles)
            counts = self._free_counts(occupied)
            known = sum(size * count for size, count in zip(sizes, counts, strict=True))
            self._future_capacities[occupied] = known
        return known

    def future_requests(self, occupied: int) -> float:
        """Return the value of the rest of a GPU: what the next requests can get.

        Each next request is for any of the profiles, small ones more often. One that fits counts
        the root of its memory slices and goes where most is left; after each request the future
        counts by half. docs/decisions/0051 has the reasons, and what other values do.
        """
        known = self._known_requests.get(occupied)
        if known is None:
            granted = refused = 0.0
            for chance, gain, masks in self._requests:
                rests = [
                    self.future_requests(occupied | mask) for mask in masks if not mask & occupied
                ]
                if rests:
                    granted += chance * (gain + _LATER * max(rests))
                else:
                    refused += chance
            # After a refusal the GPU is as before: the value is on both sides of its equation.
            known = round(granted / (1 - _LATER * refused), _DIGITS)
            self._known_requests[occupied] = known
        return known

    def largest(self, occupied: int) -> ProfileGeometry | None:
        """Return the largest profile that fits, by memory, then compute slices."""
        counts = self.free_counts(occupied)
        fitting = [profile for profile in self.profiles if counts[profile.name]]
        return max(fitting, default=None, key=lambda p: (p.memory_slices, p.compute_slices))

    def arrangements(self) -> Iterator[tuple[PlacedProfile, ...]]:
        """Yield every set of placed profiles without a common slot, the empty set too."""
        return self._arrangements(0, 0)

    def overcommitted(self) -> tuple[PlacedProfile, ...] | None:
        """Find placed profiles without a common slot that cannot exist together.

        `None` for every known GPU model: there, slots are enough. Of another model, metagpu would
        offer shares that NVML refuses.
        """
        for arrangement in self.arrangements():
            counts = Counter(placed.profile for placed in arrangement)
            compute = sum(profile.compute_slices * count for profile, count in counts.items())
            if compute > self.compute_slices or any(
                count > profile.max_count for profile, count in counts.items()
            ):
                return arrangement
        return None

    @cached_property
    def _bits(self) -> Mapping[str, int]:
        slots = sorted({slot for placed in self.placed_profiles for slot in placed.footprint})
        return {slot: 1 << position for position, slot in enumerate(slots)}

    @cached_property
    def _memory(self) -> int:
        placements = (placed.placement for placed in self.placed_profiles)
        return self.mask(f"{_SLICE}{n}" for placement in placements for n in placement.slices)

    @cached_property
    def _by_profile(self) -> Mapping[str, Sequence[int]]:
        return {
            profile.name: [self.masks[placed] for placed in profile.placed_profiles]
            for profile in self.profiles
        }

    @cached_property
    def _future_capacities(self) -> dict[int, int]:
        return {}

    @cached_property
    def _known_requests(self) -> dict[int, float]:
        return {}

    @cached_property
    def _requests(self) -> Sequence[tuple[float, float, Sequence[int]]]:
        """The chance of each kind of request, what it counts, and its masks.

        Profiles with the same masks are one kind.
        """
        sizes = {
            tuple(self._by_profile[profile.name]): profile.memory_slices
            for profile in self.profiles
        }
        total = sum(1 / size for size in sizes.values())
        return [(1 / size / total, sqrt(size), masks) for masks, size in sizes.items()]

    def _free_counts(self, occupied: int) -> list[int]:
        return [_max_disjoint(masks, occupied) for masks in self._by_profile.values()]

    def _arrangements(self, first: int, occupied: int) -> Iterator[tuple[PlacedProfile, ...]]:
        yield ()
        for position, placed in enumerate(self.placed_profiles[first:], first + 1):
            mask = self.masks[placed]
            if not mask & occupied:
                for others in self._arrangements(position, occupied | mask):
                    yield (placed, *others)


def disjoint(
    masks: Sequence[int], count: int, occupied: int = 0, first: int = 0
) -> Iterator[tuple[int, ...]]:
    """Yield all choices of `count` masks without overlap, nor with `occupied`.

    A choice is the indices of the masks in the sequence, in its order.
    """
    if not count:
        yield ()
        return
    for index in range(first, len(masks) - count + 1):
        if not masks[index] & occupied:
            for others in disjoint(masks, count - 1, occupied | masks[index], index + 1):
                yield (index, *others)


def _max_disjoint(masks: Sequence[int], occupied: int) -> int:
    """Return how many of the masks fit at once."""
    free = [mask for mask in masks if not mask & occupied]
    return next((n for n in range(len(free), 0, -1) if any(disjoint(free, n))), 0)


_MEDIA: Final = "me"
_ALL: Final = "+me.all"
_NONE: Final = "-me"


def profile_resource(profile: str) -> ResourceName:
    """Return the resource name of a profile, `nvidia.com/mig-1g.5gb.me`.

    NVIDIA's device plugin uses the same names.
    """
    return ResourceName(f"nvidia.com/mig-{profile.replace('+', '.')}")


def share_id(gpu: GpuId, slot: str) -> ShareId:
    """Return the id of a share: `GPU-<uuid>::2g.10gb@4`."""
    return ShareId(f"{gpu}::{slot}")


def slot_of_instance(profiles: Iterable[MigProfile], instance: MigInstance) -> str:
    """Return the slot of an instance; an unknown profile appears by its number."""
    names = {profile.number: profile.name for profile in profiles}
    name = names.get(instance.profile, f"profile {instance.profile}")
    return f"{name}@{instance.placement.start}"


def geometry_of(
    profiles: tuple[MigProfile, ...], allowed: frozenset[str] | None = None
) -> MigGeometry:
    """Return the geometry of the profiles, or of the allowed ones.

    GPUs of one model have one geometry in common: it caches what it computes.
    """
    names = frozenset(profile.name for profile in profiles)
    return _geometry(profiles, names if allowed is None else names & allowed)


@lru_cache(maxsize=64)
def _geometry(profiles: tuple[MigProfile, ...], allowed: frozenset[str]) -> MigGeometry:
    # Where one profile takes all media engines, the names of the others tell whether they need any.
    engines_by_slice = any(profile.name.endswith(_ALL) for profile in profiles)
    slices = max((profile.slices for profile in profiles), default=0)

    geometry = MigGeometry(
        tuple(
            _profile(profile, engines_by_slice=engines_by_slice)
            for profile in profiles
            if profile.name in allowed
        ),
        slices,
    )
    # Every state of a GPU at once, 2 ms for an A100: the layout that comes first is made in a
    # thread, and a request of the kubelet finds the values there.
    geometry.future_requests(0)
    return geometry


def _profile(profile: MigProfile, *, engines_by_slice: bool) -> ProfileGeometry:
    engines: set[str] = set()
    if profile.name.endswith((_ALL, f"+{_MEDIA}")):
        engines.add(_MEDIA)
    if profile.name.endswith(_ALL):
        engines |= {f"{_MEDIA}{number}" for number in range(_MAX_SLICES)}

    by_slice = engines_by_slice and not profile.name.endswith((_ALL, _NONE))
    return ProfileGeometry(
        profile.name,
        profile.slices,
        profile.placements,
        profile.max_instances,
        frozenset(engines),
        frozenset((_MEDIA,)) if by_slice else frozenset(),
    )


_MAX_SLICES: Final = 8
"""Memory slices of any GPU of NVIDIA."""
