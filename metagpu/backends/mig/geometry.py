"""Geometry from NVML's list of profiles; names of slots, shares and resources."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from metagpu.backends.mig.profiles import MigGeometry, ProfileGeometry
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.mig import MigInstance, MigProfile
from metagpu.core.model.shares import ResourceName, ShareId

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
