"""MIG's words as frozen values, and NVIDIA's names for its profiles.

- **Profile**: a kind of instance that a GPU can be cut into, as NVML tells it.
- **Placement**: the memory slices that an instance occupies.
- **Instance**: a GPU instance, with the compute instances in it; containers see the latter.

Memory is in bytes.
"""

from math import floor
from typing import Final

import msgspec

_GIB: Final = 2**30
_PARTS: Final = 8
"""NVIDIA's names count a GPU's memory in eighths, also on boards of four memory slices."""


class Placement(msgspec.Struct, frozen=True, order=True):
    """Memory slices: `size` of them from `start` on."""

    start: int
    size: int

    @property
    def slices(self) -> range:
        """The numbers of the slices."""
        return range(self.start, self.start + self.size)

    def __str__(self) -> str:
        """Write it as nvidia-smi does: `4:2`."""
        return f"{self.start}:{self.size}"


class MigEngines(msgspec.Struct, frozen=True):
    """How many engines of each kind an instance has; NVML's words, which labels repeat."""

    copy: int = 0
    decoder: int = 0
    encoder: int = 0
    jpeg: int = 0
    ofa: int = 0


class MigProfile(msgspec.Struct, frozen=True):
    """A kind of GPU instance.

    Attributes:
        name: NVIDIA's, such as `1g.5gb+me`.
        number: what NVML calls it on this board.
        slices: compute slices, the `g` of the name.
        memory: what an instance has.
        most: how many an empty GPU has room for.
        placements: where it may be, the lowest start first.
        multiprocessors: what an instance has of them.
    """

    name: str
    number: int
    slices: int
    memory: int
    most: int
    placements: tuple[Placement, ...]
    multiprocessors: int = 0
    engines: MigEngines = MigEngines()


class ComputeInstance(msgspec.Struct, frozen=True):
    """A part of a GPU instance that programs run on: CUDA's and the container's "MIG device".

    Attributes:
        number: NVML's, unique in its GPU instance.
        uuid: `MIG-...`, another one each time it is made; empty while NVML does not name it.
    """

    number: int
    uuid: str = ""


class MigInstance(msgspec.Struct, frozen=True):
    """A GPU instance.

    Attributes:
        number: NVML's, unique on its GPU while the instance lasts.
        profile: the number of its profile.
    """

    number: int
    profile: int
    placement: Placement
    computes: tuple[ComputeInstance, ...] = ()


class MigMode(msgspec.Struct, frozen=True):
    """Whether MIG is on, and whether it will be after a reset; `hindrance` says why they differ."""

    enabled: bool
    pending: bool
    hindrance: str = ""


def slot_of(share: str) -> str:
    """Tell which instance an id is about: `2g.10gb@4`, also of a part of it, `2g.10gb@4-t1`."""
    profile, at, rest = share.partition("::")[2].partition("@")
    return f"{profile}{at}{rest.partition('-')[0]}"


def profile_of(share: str) -> str:
    """Tell which profile the id of a share is about."""
    return slot_of(share).rpartition("@")[0]


def by_mps(share: str) -> bool:
    """Tell whether the id of a share is about a unit of an instance under MPS: `2g.10gb@4-p1`."""
    return share.partition("@")[2].partition("-")[2].startswith("p")


def profile_name(slices: int, memory: int, total: int, suffix: str = "") -> str:
    """Name a profile as NVIDIA does, from what NVML tells of it.

    The rule is that of NVIDIA's go-nvlib (`pkg/nvlib/device/mig_profile.go`): the memory counts in
    eighths of the GPU's, rounded up, and the GPU's in whole GiB, rounded up.

    Args:
        slices: compute slices.
        memory: of an instance.
        total: of the GPU.
        suffix: what sets it apart from others of its size, such as `+me`.
    """
    parts = -(-memory * _PARTS // total)
    # Half a GB goes up: Python's `round` would make 70 GB of the H200's 70.5.
    size = floor(parts * -(-total // _GIB) / _PARTS + 0.5)

    return f"{slices}g.{size}gb{suffix}"
