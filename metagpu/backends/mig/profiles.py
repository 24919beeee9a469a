"""What a GPU can be cut into by MIG, what excludes what, and what is lost with each cut.

- **Profile**: a kind of instance.
- **Placement**: the memory slices that an instance occupies.
- **Spot**: a profile at one of its placements; a share stands for one.
- **Board**: the profiles of one kind of GPU, and all that follows from them.

Nothing here knows NVML: whoever asks it fills in the values.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import msgspec

from metagpu.core.mig import Placement

_SLICE: Final = "s"
"""Begins every slot of MIG: `s0` to `s7` are memory slices, `s+me` is an engine."""


class Profile(msgspec.Struct, frozen=True):
    """A kind of instance, as NVML tells of it.

    Attributes:
        name: NVIDIA's, such as `1g.5gb+me`.
        compute_slices: the `g` of the name.
        placements: where an instance may be; all of one size, the lowest start first.
        max_count: how many of them an empty GPU has room for.
        engines: what each instance takes of which the GPU has one, such as `me` for the media
            engines of `+me`. Profiles that compete name the same.
        slice_engines: kinds of engines of which each slice has its own, and an instance takes those
            of its slices. One that takes all of the GPU's names them in `engines`: `me0` to `me3`.
    """

    name: str
    compute_slices: int
    placements: tuple[Placement, ...]
    max_count: int
    engines: frozenset[str] = frozenset()
    slice_engines: frozenset[str] = frozenset()

    @property
    def memory_slices(self) -> int:
        """How many memory slices an instance occupies."""
        return self.placements[0].size

    @property
    def spots(self) -> list["Spot"]:
        """Where it may be, the lowest start first."""
        return [Spot(self, placement) for placement in self.placements]

    @property
    def tokens(self) -> frozenset[str]:
        """What every instance of it holds, wherever it is.

        One that there can be but one of, for whatever reason, excludes itself.
        """
        alone = self.max_count == 1 and len(self.placements) > 1 and not self.engines
        return frozenset((self.name,)) if alone else self.engines


class Spot(msgspec.Struct, frozen=True):
    """A profile at one of its placements."""

    profile: Profile
    placement: Placement

    @property
    def footprint(self) -> frozenset[str]:
        """The slots of a share of it: two instances exclude each other if they have one in common.

        They are the memory slices and the engines. Compute slices need no slots of their own: on
        every board known, instances with disjoint memory have enough of them, as
        `Board.overcommitted` can tell.
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
        """Name it as share ids do: `2g.10gb@4`."""
        return f"{self.profile.name}@{self.placement.start}"


@dataclass(frozen=True)
class Board:
    """What one kind of GPU can be cut into; only what the configuration allows, if it says so.

    It remembers what it has worked out: GPUs of a kind should have one in common.

    Slots are turned into bits of a number, `mask`: what is occupied, and what a spot would occupy.
    All that follows from what is occupied is asked for by that number.

    Attributes:
        compute_slices: how many the GPU has.
    """

    profiles: tuple[Profile, ...]
    compute_slices: int

    @cached_property
    def spots(self) -> tuple[Spot, ...]:
        """Every spot, in the order of the profiles."""
        return tuple(spot for profile in self.profiles for spot in profile.spots)

    @cached_property
    def masks(self) -> Mapping[Spot, int]:
        """What each spot occupies."""
        return {spot: self.mask(spot.footprint) for spot in self.spots}

    def mask(self, slots: Iterable[str]) -> int:
        """Turn slots into bits; one that no profile here uses is in nobody's way."""
        bits = self._bits
        found = 0
        for slot in slots:
            found |= bits.get(slot, 0)
        return found

    def free(self, occupied: int, profile: str | None = None) -> list[Spot]:
        """Find the spots, all or those of one profile, that could be taken now."""
        return [
            spot
            for spot, mask in self.masks.items()
            if not mask & occupied and profile in (None, spot.profile.name)
        ]

    def free_slices(self, occupied: int) -> int:
        """Count the memory slices that are not occupied."""
        return (self._memory & ~occupied).bit_count()

    def room(self, occupied: int) -> Mapping[str, int]:
        """Say of each profile how many more there could be, if no other were asked for."""
        return dict(zip(self._by_profile, self._room(occupied), strict=True))

    def worth(self, occupied: int) -> int:
        """Say what the rest of the GPU is still good for: the future that a placement leaves.

        It is the memory that each profile could still get, in slices, summed over the profiles;
        docs/decisions/0020 says why.
        """
        known = self._worths.get(occupied)
        if known is None:
            sizes = (profile.memory_slices for profile in self.profiles)
            rooms = self._room(occupied)
            known = sum(size * count for size, count in zip(sizes, rooms, strict=True))
            self._worths[occupied] = known
        return known

    def largest(self, occupied: int) -> Profile | None:
        """Find the largest profile that there is room for, by memory, then compute slices."""
        rooms = self._room(occupied)
        fitting = [profile for profile, n in zip(self.profiles, rooms, strict=True) if n]
        return max(fitting, default=None, key=lambda p: (p.memory_slices, p.compute_slices))

    def arrangements(self) -> Iterator[tuple[Spot, ...]]:
        """Give every set of spots, the empty one too, of which no two have a slot in common."""
        return self._arrangements(0, 0)

    def overcommitted(self) -> tuple[Spot, ...] | None:
        """Find spots with no slot in common that still cannot all be: slots do not say enough.

        `None` for every board known. Of another one, shares would be offered that NVML refuses.
        """
        for those in self.arrangements():
            counts = Counter(spot.profile for spot in those)
            compute = sum(profile.compute_slices * count for profile, count in counts.items())
            if compute > self.compute_slices or any(
                count > profile.max_count for profile, count in counts.items()
            ):
                return those
        return None

    @cached_property
    def _bits(self) -> Mapping[str, int]:
        slots = sorted({slot for spot in self.spots for slot in spot.footprint})
        return {slot: 1 << place for place, slot in enumerate(slots)}

    @cached_property
    def _memory(self) -> int:
        return self.mask(f"{_SLICE}{n}" for spot in self.spots for n in spot.placement.slices)

    @cached_property
    def _by_profile(self) -> Mapping[str, Sequence[int]]:
        return {
            profile.name: [self.masks[spot] for spot in profile.spots] for profile in self.profiles
        }

    @cached_property
    def _worths(self) -> dict[int, int]:
        return {}

    def _room(self, occupied: int) -> list[int]:
        return [_most(masks, occupied) for masks in self._by_profile.values()]

    def _arrangements(self, first: int, occupied: int) -> Iterator[tuple[Spot, ...]]:
        yield ()
        for place, spot in enumerate(self.spots[first:], first + 1):
            mask = self.masks[spot]
            if not mask & occupied:
                for others in self._arrangements(place, occupied | mask):
                    yield (spot, *others)


def disjoint(
    masks: Sequence[int], count: int, occupied: int = 0, first: int = 0
) -> Iterator[tuple[int, ...]]:
    """Give every way to take `count` of some masks that overlap neither each other nor `occupied`.

    A way is the places of the masks in the sequence, in its order.
    """
    if not count:
        yield ()
        return
    for place in range(first, len(masks) - count + 1):
        if not masks[place] & occupied:
            for others in disjoint(masks, count - 1, occupied | masks[place], place + 1):
                yield (place, *others)


def _most(masks: Sequence[int], occupied: int) -> int:
    """Count how many of some masks there is room for at once."""
    free = [mask for mask in masks if not mask & occupied]
    return next((n for n in range(len(free), 0, -1) if any(disjoint(free, n))), 0)
