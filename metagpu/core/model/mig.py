"""MIG profiles, placements and instances, and NVIDIA's names of profiles.

- **Profile**: a kind of MIG instance, as NVML describes it.
- **Placement**: the memory slices that an instance occupies.
- **Instance**: a GPU instance with its compute instances; containers see a compute instance.

Memory is in bytes.
"""

from collections.abc import Iterable, Iterator
from math import floor
from typing import Final

import msgspec

_GIB: Final = 2**30
_EIGHTHS: Final = 8
"""NVIDIA's names count a GPU's memory in eighths, also on boards of four memory slices."""


class Placement(msgspec.Struct, frozen=True, order=True):
    """The memory slices of an instance: `size` slices from `start` on."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The number after that of the last slice."""
        return self.start + self.size

    @property
    def slices(self) -> range:
        """The numbers of the slices."""
        return range(self.start, self.end)

    def __str__(self) -> str:
        """Return the placement as nvidia-smi writes it: `4:2`."""
        return f"{self.start}:{self.size}"


class MigEngines(msgspec.Struct, frozen=True):
    """The number of engines of each kind in an instance, by NVML's names."""

    copy: int = 0
    decoder: int = 0
    encoder: int = 0
    jpeg: int = 0
    ofa: int = 0


class MigProfile(msgspec.Struct, frozen=True):
    """One kind of GPU instance.

    Attributes:
        name: NVIDIA's name, such as `1g.5gb+me`.
        number: NVML's id of the profile on this GPU.
        slices: compute slices, the `g` of the name.
        memory: bytes of an instance.
        max_instances: the number of instances that fit on an empty GPU.
        placements: the possible placements, the lowest start first.
        multiprocessors: the number of multiprocessors of an instance.
    """

    name: str
    number: int
    slices: int
    memory: int
    max_instances: int
    placements: tuple[Placement, ...]
    multiprocessors: int = 0
    engines: MigEngines = MigEngines()


class MigModel(msgspec.Struct, frozen=True):
    """The MIG profiles of a GPU model; `device` is its PCI id, 0 for an unknown one."""

    device: int
    profiles: tuple[MigProfile, ...]


class ComputeInstance(msgspec.Struct, frozen=True):
    """A compute instance: the "MIG device" of CUDA and of containers.

    Attributes:
        number: NVML's id, unique in its GPU instance.
        uuid: `MIG-...`, a new one at each creation; empty while NVML reports none.
    """

    number: int
    uuid: str = ""


class MigInstance(msgspec.Struct, frozen=True):
    """One GPU instance.

    Attributes:
        number: NVML's id, unique on its GPU while the instance exists.
        profile: the number of its profile.
    """

    number: int
    profile: int
    placement: Placement
    compute_instances: tuple[ComputeInstance, ...] = ()


class MigMode(msgspec.Struct, frozen=True):
    """The MIG mode now and after the next reset; `reason` states why the two differ."""

    enabled: bool
    pending: bool
    reason: str = ""


def slot_of(share: str) -> str:
    """Return the slot in a share id: `2g.10gb@4`, also for `2g.10gb@4-t1`."""
    profile, at, rest = share.partition("::")[2].partition("@")
    return f"{profile}{at}{rest.partition('-')[0]}"


def profile_of(share: str) -> str:
    """Return the profile in the id of a share, as `2g.10gb`."""
    return slot_of(share).rpartition("@")[0]


def is_mig(share: str) -> bool:
    """Return whether the id of a share names a MIG instance, or a part of one."""
    return "@" in share


def placed_at(profiles: Iterable[MigProfile], share: str) -> Iterator[tuple[MigProfile, Placement]]:
    """Yield profile and placement of the instance in a share's id, if there is one."""
    slot = slot_of(share)
    for profile in profiles:
        for placement in profile.placements:
            if f"{profile.name}@{placement.start}" == slot:
                yield profile, placement


def share_suffix(share: str) -> str:
    """Return the end of the id of one of an instance's shares: `-t1`, or empty."""
    _, hyphen, rest = share.partition("@")[2].partition("-")
    return f"{hyphen}{rest}"


def is_mps_share(share: str) -> bool:
    """Return whether a share id names an MPS unit of an instance: `2g.10gb@4-p1`."""
    return share_suffix(share).startswith("-p")


def profile_name(slices: int, memory: int, total: int, suffix: str = "") -> str:
    """Return NVIDIA's name of a profile.

    The rule is that of NVIDIA's go-nvlib (`pkg/nvlib/device/mig_profile.go`): the memory counts in
    eighths of the GPU's, rounded up, and the GPU's in whole GiB, rounded up.

    Args:
        slices: compute slices.
        memory: bytes of an instance.
        total: bytes of the GPU.
        suffix: `+me` and the like, for a variant of a profile of the same size.
    """
    eighths = -(-memory * _EIGHTHS // total)
    # Half a GB is rounded up: Python's `round` would turn the H200's 70.5 GB into 70.
    size = floor(eighths * -(-total // _GIB) / _EIGHTHS + 0.5)

    return f"{slices}g.{size}gb{suffix}"
