"""What NVML tells of a GPU's MIG profiles, as the planner's boards; and the names of shares."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from metagpu.backends.mig.profiles import Board, Profile
from metagpu.core.gpu import GpuId
from metagpu.core.mig import MigInstance, MigProfile
from metagpu.core.model import ResourceName, ShareId

_MEDIA: Final = "me"
_ALL: Final = "+me.all"
_NONE: Final = "-me"


def resource_of(profile: str) -> ResourceName:
    """Name the resource of a profile as NVIDIA's device plugin does: `nvidia.com/mig-1g.5gb.me`."""
    return ResourceName(f"nvidia.com/mig-{profile.replace('+', '.')}")


def share_id(gpu: GpuId, slot: str) -> ShareId:
    """Name a share: `GPU-<uuid>::2g.10gb@4`."""
    return ShareId(f"{gpu}::{slot}")


def slot_in(profiles: Iterable[MigProfile], instance: MigInstance) -> str:
    """Say which instance this is, as ids do; one of a profile not known here has its number."""
    names = {profile.number: profile.name for profile in profiles}
    name = names.get(instance.profile, f"profile {instance.profile}")
    return f"{name}@{instance.placement.start}"


@lru_cache(maxsize=64)
def board_of(profiles: tuple[MigProfile, ...], allowed: frozenset[str] | None = None) -> Board:
    """Give the board of these profiles, or of those allowed; GPUs of a kind have one in common."""
    # Where one profile takes all media engines, every other says by its name whether it needs any.
    counted = any(profile.name.endswith(_ALL) for profile in profiles)
    slices = max((profile.slices for profile in profiles), default=0)

    return Board(
        tuple(
            _profile(profile, counted=counted)
            for profile in profiles
            if allowed is None or profile.name in allowed
        ),
        slices,
    )


def _profile(profile: MigProfile, *, counted: bool) -> Profile:
    engines: set[str] = set()
    if profile.name.endswith((_ALL, f"+{_MEDIA}")):
        engines.add(_MEDIA)
    if profile.name.endswith(_ALL):
        engines |= {f"{_MEDIA}{number}" for number in range(_MOST_SLICES)}

    by_slice = counted and not profile.name.endswith((_ALL, _NONE))
    return Profile(
        profile.name,
        profile.slices,
        profile.placements,
        profile.most,
        frozenset(engines),
        frozenset((_MEDIA,)) if by_slice else frozenset(),
    )


_MOST_SLICES: Final = 8
"""Memory slices of any board that NVIDIA has."""
