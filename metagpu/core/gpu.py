"""The hardware: a GPU as NVML tells it, and how GPUs are connected."""

import re
from collections.abc import Mapping
from enum import IntEnum
from typing import Final, NewType

import msgspec

from metagpu.core.mig import MigProfile

GpuId = NewType("GpuId", str)
"""NVML's uuid: `GPU-` and 36 characters."""
MIB = 1024 * 1024


class Gpu(msgspec.Struct, frozen=True):
    """What never changes about a GPU while the driver is loaded; `None` where it does not say.

    Attributes:
        index: NVML's number for it, by PCI order; people name GPUs by it.
        minor: N of its device node `/dev/nvidiaN`.
        memory: total memory; `reserved` of it belongs to the driver and firmware.
        pci_device: its kind by PCI ids: the device's in the upper 16 bits, the vendor's below.
        compute_capability: such as `(8, 0)`; `architecture` its family in lower case.
        ecc: whether error correction is on; it changes at a reset alone.
        mig_profiles: the instances it can be cut into, whether MIG mode is on or not; none where
            there is no MIG.
        listens: whether NVML delivers this GPU's XID events.
    """

    id: GpuId
    index: int
    name: str
    memory: int
    reserved: int | None = None
    minor: int | None = None
    pci_bus_id: str = ""
    pci_device: int | None = None
    numa_node: int | None = None
    compute_capability: tuple[int, int] | None = None
    architecture: str | None = None
    mig_enabled: bool | None = None
    ecc: bool | None = None
    mig_profiles: tuple[MigProfile, ...] = ()
    listens: bool = True

    def __str__(self) -> str:
        """Name it as messages do: index first, as people count, then the uuid."""
        return f"{self.index} ({self.id})"


class PciPath(IntEnum):
    """Where two GPUs meet on the PCI bus, the nearest first (NVML's levels, in NVML's numbers)."""

    BOARD = 0
    SWITCH = 10
    SWITCHES = 20
    HOST_BRIDGE = 30
    NUMA_NODE = 40
    SYSTEM = 50

    def __str__(self) -> str:
        """Name it as `nvidia-smi topo -m` does."""
        return _PCI_LABELS[self]


_PCI_LABELS: Final = dict(zip(PciPath, ("PSB", "PIX", "PXB", "PHB", "NODE", "SYS"), strict=True))


class Connection(msgspec.Struct, frozen=True):
    """How two GPUs reach each other; `None` where the driver does not say.

    Attributes:
        nvlinks: how many NVLinks there are between them, or from each of them to NVSwitches.
        switched: whether NVSwitches connect them.
    """

    pci: PciPath | None = None
    nvlinks: int | None = None
    switched: bool = False

    def __str__(self) -> str:
        """Name it as `nvidia-smi topo -m` does; `?` when nothing is known."""
        if self.nvlinks:
            return f"NV{self.nvlinks}"
        return "?" if self.pci is None else str(self.pci)


_UNKNOWN: Final = Connection()


class Topology(msgspec.Struct, frozen=True):
    """How the GPUs are connected: each pair once, those that are not known left out."""

    connections: Mapping[frozenset[GpuId], Connection] = msgspec.field(default_factory=dict)

    def between(self, a: GpuId, b: GpuId) -> Connection:
        """Say how two GPUs are connected: the same both ways."""
        return self.connections.get(frozenset((a, b)), _UNKNOWN)


def bus_id(text: str) -> str:
    """Write a PCI address as the kernel does, four digits of domain, in lower case.

    Raises:
        ValueError: if it is none.
    """
    found = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", text.lower())
    if found is None:
        raise ValueError(f"{text!r} is no PCI bus id; write one like 0000:07:00.0")
    return f"{int(found[1], 16):04x}:{found[2]}"
