"""MIG geometries of GPU models, for tests of the planner.

Placements and counts: NVIDIA's MIG user guide, "Supported MIG Profiles" and the outputs of
`nvidia-smi mig -lgip` and `-lgipp` there. Names follow from the memory of the models.
"""

from collections.abc import Sequence
from typing import Final

from metagpu.backends.mig.profiles import MigGeometry, PlacedProfile, ProfileGeometry
from metagpu.core.model.mig import Placement

_ME: Final = frozenset(("me",))


def profile(
    name: str,
    starts: Sequence[int],
    size: int,
    most: int,
    *,
    engines: frozenset[str] = frozenset(),
    slice_engines: frozenset[str] = frozenset(),
) -> ProfileGeometry:
    """Create a profile; its compute slices stand in its name."""
    placements = tuple(Placement(start, size) for start in starts)
    return ProfileGeometry(name, int(name[0]), placements, most, engines, slice_engines)


def _eight(*sizes: str) -> MigGeometry:
    """Create a geometry of eight memory slices and seven compute slices.

    `sizes` are the memory of 1g, of the 1g with twice the memory, of 2g, 3g, 4g and 7g.
    """
    one, double, two, three, four, seven = sizes
    return MigGeometry(
        (
            profile(f"1g.{one}", range(7), 1, 7),
            profile(f"1g.{one}+me", range(7), 1, 1, engines=_ME),
            profile(f"1g.{double}", (0, 2, 4, 6), 2, 4),
            profile(f"2g.{two}", (0, 2, 4), 2, 3),
            profile(f"3g.{three}", (0, 4), 4, 2),
            profile(f"4g.{four}", (0,), 4, 1),
            profile(f"7g.{seven}", (0,), 8, 1),
        ),
        compute_slices=7,
    )


def _rtx() -> MigGeometry:
    """Create a geometry of four slices whose profiles have media engines.

    Who excludes whom follows from the profiles' names; no such GPU was at hand.
    """
    every = frozenset(f"media{number}" for number in range(4))
    own = frozenset(("media",))
    one, two = range(4), (0, 2)

    return MigGeometry(
        (
            profile("1g.24gb", one, 1, 4, slice_engines=own),
            profile("1g.24gb+me", one, 1, 1, engines=_ME, slice_engines=own),
            profile("1g.24gb+gfx", one, 1, 4, slice_engines=own),
            profile("1g.24gb+me.all", one, 1, 1, engines=_ME | every),
            profile("1g.24gb-me", one, 1, 4),
            profile("2g.48gb", two, 2, 2, slice_engines=own),
            profile("2g.48gb+gfx", two, 2, 2, slice_engines=own),
            profile("2g.48gb+me.all", two, 2, 1, engines=_ME | every),
            profile("2g.48gb-me", two, 2, 2),
            profile("4g.96gb", (0,), 4, 1, slice_engines=own),
            profile("4g.96gb+gfx", (0,), 4, 1, slice_engines=own),
        ),
        compute_slices=4,
    )


A100_40: Final = _eight("5gb", "10gb", "10gb", "20gb", "20gb", "40gb")
GEOMETRIES: Final = {
    "A100-40": A100_40,
    "A100-80": _eight("10gb", "20gb", "20gb", "40gb", "40gb", "80gb"),
    "H100-80": _eight("10gb", "20gb", "20gb", "40gb", "40gb", "80gb"),
    "H100-NVL": _eight("12gb", "24gb", "24gb", "47gb", "47gb", "94gb"),
    "GH200-96": _eight("12gb", "24gb", "24gb", "48gb", "48gb", "96gb"),
    "H200": _eight("18gb", "35gb", "35gb", "71gb", "71gb", "141gb"),
    "B200": _eight("23gb", "45gb", "45gb", "90gb", "90gb", "180gb"),
    "GB200": _eight("23gb", "47gb", "47gb", "93gb", "93gb", "186gb"),
    "A30": MigGeometry(
        (
            profile("1g.6gb", range(4), 1, 4),
            profile("1g.6gb+me", range(4), 1, 1, engines=_ME),
            profile("2g.12gb", (0, 2), 2, 2),
            profile("2g.12gb+me", (0, 2), 2, 1, engines=_ME),
            profile("4g.24gb", (0,), 4, 1),
        ),
        compute_slices=4,
    ),
    "RTX PRO 6000": _rtx(),
}
"""By the name of the GPU model."""


def only(geometry: MigGeometry, *names: str) -> MigGeometry:
    """Return a geometry with these profiles alone, as a configuration may."""
    return MigGeometry(
        tuple(p for p in geometry.profiles if p.name in names), geometry.compute_slices
    )


PLAIN: Final = only(A100_40, "1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")


def spots(names: str, geometry: MigGeometry = A100_40) -> tuple[PlacedProfile, ...]:
    """Return placements by their names, such as `2g.10gb@4 1g.5gb@6`."""
    known = {str(spot): spot for spot in geometry.placed_profiles}
    return tuple(known[name] for name in names.split())


def slots(names: str) -> frozenset[str]:
    """Return the slots of some placements of an A100."""
    return frozenset(slot for spot in spots(names) for slot in spot.footprint)
