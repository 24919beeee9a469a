"""A GPU as NVML describes it, and the connections between GPUs."""

import re
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Final, NewType

import msgspec

from metagpu.core.model.mig import MigModel, MigProfile

GpuId = NewType("GpuId", str)
"""NVML's uuid: `GPU-` and 36 characters."""
MIB = 1024 * 1024


class Gpu(msgspec.Struct, frozen=True):
    """The fixed properties of a GPU; `None` where NVML reports nothing.

    Attributes:
        index: NVML's number of the GPU, by PCI order; people name GPUs by it.
        minor: N of its device node `/dev/nvidiaN`.
        memory: total memory in bytes, `None` for a GPU on the machine's memory, such as GB10;
            `reserved` of it belongs to the driver and firmware.
        pci_device: the PCI ids: the device's in the upper 16 bits, the vendor's below.
        pci_subsystem: the same of the board that carries it.
        compute_capability: major and minor, as `(8, 0)`; `architecture` is in lower case.
        brand: the product line in NVIDIA's spelling, such as `Nvidia` or `GeForce`.
        ecc: whether error correction is on; only a reset changes this.
        pci_class: base class and subclass, such as 0x0302, a 3D controller.
        clique: the NVLink domain that it shares with GPUs of other nodes, as `CLUSTER.NUMBER`.
        virtual: whether it is a vGPU of a virtual machine.
        mig_profiles: the profiles of its MIG instances, whether MIG mode is on or not; empty for a
            GPU without MIG.
    """

    id: GpuId
    index: int
    name: str
    memory: int | None
    reserved: int | None = None
    minor: int | None = None
    pci_bus_id: str = ""
    pci_device: int | None = None
    pci_subsystem: int | None = None
    numa_node: int | None = None
    compute_capability: tuple[int, int] | None = None
    architecture: str | None = None
    brand: str | None = None
    mig_enabled: bool | None = None
    ecc: bool | None = None
    pci_class: int | None = None
    clique: str | None = None
    virtual: bool | None = None
    mig_profiles: tuple[MigProfile, ...] = ()

    @property
    def is_display_card(self) -> bool:
        """A card for the screen of a DGX Station alone, by NVIDIA's names of it."""
        return self.name in {"DGX Display", "NVIDIA DGX Display"}

    def __str__(self) -> str:
        """Return the GPU's name in messages: the index, then the uuid."""
        return f"{self.index} ({self.id})"


def mig_models(gpus: Iterable[Gpu]) -> tuple[MigModel, ...]:
    """Return the models of GPUs that support MIG, each once, ordered by PCI id."""
    found = {gpu.pci_device or 0: gpu.mig_profiles for gpu in gpus if gpu.mig_profiles}
    return tuple(MigModel(device, found[device]) for device in sorted(found))


class PciPath(IntEnum):
    """The nearest common ancestor of two GPUs on the PCI bus, by NVML's numbers."""

    BOARD = 0
    SWITCH = 10
    SWITCHES = 20
    HOST_BRIDGE = 30
    NUMA_NODE = 40
    SYSTEM = 50

    def __str__(self) -> str:
        """Return the name of `nvidia-smi topo -m`."""
        return _PCI_LABELS[self]


_PCI_LABELS: Final = dict(zip(PciPath, ("PSB", "PIX", "PXB", "PHB", "NODE", "SYS"), strict=True))


class Connection(msgspec.Struct, frozen=True):
    """The connection of two GPUs; `None` where the driver reports nothing.

    Attributes:
        nvlinks: the number of NVLinks between the GPUs, or from each GPU to NVSwitches.
        switched: whether NVSwitches connect the GPUs.
    """

    pci: PciPath | None = None
    nvlinks: int | None = None
    switched: bool = False

    def __str__(self) -> str:
        """Return the name of `nvidia-smi topo -m`; `?` where nothing is known."""
        if self.nvlinks:
            return f"NV{self.nvlinks}"
        return "?" if self.pci is None else str(self.pci)


_UNKNOWN: Final = Connection()
_BUS_ID: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)


class Topology(msgspec.Struct, frozen=True):
    """The connections of the GPUs: each known pair once."""

    connections: Mapping[frozenset[GpuId], Connection] = msgspec.field(default_factory=dict)

    def between(self, a: GpuId, b: GpuId) -> Connection:
        """Return the connection of two GPUs, in any order."""
        return self.connections.get(frozenset((a, b)), _UNKNOWN)


def normalize_bus_id(text: str) -> str:
    """Return a PCI address in the kernel's form: short domain, lower case.

    NVML's `00000000:07:00.0` is `0000:07:00.0` in sysfs.
    """
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def parse_bus_id(text: str) -> str:
    """Return a PCI bus id that a person wrote, in the kernel's form.

    Raises:
        ValueError: the text is no PCI bus id.
    """
    if not _BUS_ID.fullmatch(text):
        raise ValueError(f"{text!r} is not a PCI bus id; write one like 0000:07:00.0")
    return normalize_bus_id(text)
