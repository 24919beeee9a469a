"""The GPU models of the simulator, with the numbers of the real ones.

Totals and names are what nvidia-smi prints. Sources: published `nvidia-smi -q` outputs, for totals
and the memory that the driver reserves (it differs by driver: one published value each);
pci.ids and the list of NVIDIA's open driver, for device ids; NVIDIA's CUDA GPU list, for compute
capabilities. The list of totals at github.com/modal-labs/modal-client/pull/2797 agrees with the
older models. NVLinks: NVIDIA's datasheets, and `nvidia-smi topo -m` of machines with eight GPUs.
"""

from enum import Enum
from typing import Final

import msgspec
import pynvml

from metagpu.core.model.gpu import MIB
from metagpu.core.model.mig import profile_name
from metagpu.sim.machine.mig_profiles import MIG_PROFILES, SimProfile

_NVIDIA: Final = 0x10DE


class NvlinkFabric(Enum):
    """The NVLink fabric of eight GPUs.

    - none: no NVLinks; the GPUs have the PCI bus alone.
    - cube mesh: each GPU is linked to four others, as in a DGX-1.
    - NVSwitch: each GPU reaches all others over all of its links, as in a DGX A100.
    """

    NONE = "none"
    CUBE_MESH = "cube mesh"
    NVSWITCH = "NVSwitch"


CUBE_MESH: Final = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)
"""NVLinks between the eight GPUs of a DGX-1 with V100, as `nvidia-smi topo -m` draws them."""


class GpuModel(msgspec.Struct, frozen=True):
    """One GPU model.

    Attributes:
        key: its name in metagpu, such as `a100-40gb`.
        product: its name as NVML prints it.
        memory: total memory in MiB, of which the driver reserves `reserved`; 0 for an integrated
            GPU, which has the system's memory, and of which NVML knows none.
        device: its PCI device id at NVIDIA.
        architecture: NVML's number of its architecture.
        nvlinks: number of its NVLinks; `fabric` names their topology.
        subsystem: PCI id of NVIDIA's board, of `nvidia-smi -q`; 0 where none was found published.
    """

    key: str
    product: str
    memory: int
    reserved: int
    compute_capability: tuple[int, int]
    architecture: int
    device: int
    nvlinks: int = 0
    subsystem: int = 0

    @property
    def is_display(self) -> bool:
        """Return whether the card drives a screen."""
        return self.product.endswith("Display")

    @property
    def has_ecc(self) -> bool:
        """Return whether its own memory has error correction."""
        return bool(self.memory) and not self.is_display

    @property
    def has_mig(self) -> bool:
        """Return whether the model supports MIG."""
        return bool(self.mig_profiles)

    @property
    def mig_profiles(self) -> tuple[SimProfile, ...]:
        """Return the model's MIG profiles."""
        return MIG_PROFILES.get(self.key, ())

    def profile_name(self, profile: SimProfile) -> str:
        """Return NVIDIA's name of a profile, such as `1g.5gb+me`."""
        memory, total = profile.memory * MIB, self.memory * MIB
        return profile_name(profile.compute_slices, memory, total, profile.suffix)

    @property
    def brand(self) -> int:
        """Return NVML's number of the brand, which the product's name begins with."""
        brands = (
            ("Tesla", pynvml.NVML_BRAND_TESLA),
            ("NVIDIA RTX", pynvml.NVML_BRAND_NVIDIA_RTX),
            ("NVIDIA", pynvml.NVML_BRAND_NVIDIA),
        )
        return next(int(number) for name, number in brands if self.product.startswith(name))

    @property
    def changes_mig_at_once(self) -> bool:
        """Return whether MIG mode changes without a reset, as from Hopper on."""
        return self.architecture >= int(pynvml.NVML_DEVICE_ARCH_HOPPER)

    @property
    def fabric(self) -> NvlinkFabric:
        """Return the NVLink fabric of this model in machines of eight GPUs."""
        if not self.nvlinks:
            return NvlinkFabric.NONE
        volta = self.architecture == int(pynvml.NVML_DEVICE_ARCH_VOLTA)
        return NvlinkFabric.CUBE_MESH if volta else NvlinkFabric.NVSWITCH

    @property
    def remaps_rows(self) -> bool:
        """Return whether the model remaps memory rows, as from Ampere on.

        Older models retire pages instead.
        """
        return self.architecture >= int(pynvml.NVML_DEVICE_ARCH_AMPERE) and self.memory > 0

    @property
    def pci_device_id(self) -> int:
        """Return the PCI device id with NVIDIA's vendor id below it, as NVML does."""
        return self.device << 16 | _NVIDIA

    @property
    def pci_subsystem_id(self) -> int:
        """Return the same of NVIDIA's board."""
        return self.subsystem and self.subsystem << 16 | _NVIDIA

    @property
    def event_types(self) -> int:
        """Return the events that every data centre GPU supports.

        Newer drivers add more.
        """
        return int(
            pynvml.nvmlEventTypeSingleBitEccError
            | pynvml.nvmlEventTypeDoubleBitEccError
            | pynvml.nvmlEventTypePState
            | pynvml.nvmlEventTypeXidCriticalError
            | pynvml.nvmlEventTypeClock
        )


_VOLTA, _TURING, _AMPERE = (
    pynvml.NVML_DEVICE_ARCH_VOLTA,
    pynvml.NVML_DEVICE_ARCH_TURING,
    pynvml.NVML_DEVICE_ARCH_AMPERE,
)
_ADA, _HOPPER, _BLACKWELL = (
    pynvml.NVML_DEVICE_ARCH_ADA,
    pynvml.NVML_DEVICE_ARCH_HOPPER,
    pynvml.NVML_DEVICE_ARCH_BLACKWELL,
)

_ROWS: Final = (
    # nvidia-smi -q: total 16384, reserved 240.
    GpuModel("v100-16gb", "Tesla V100-SXM2-16GB", 16384, 240, (7, 0), _VOLTA, 0x1DB1, nvlinks=6),
    # nvidia-smi: total 32768; reserved assumed to be its smaller sister's.
    GpuModel("v100-32gb", "Tesla V100-SXM2-32GB", 32768, 240, (7, 0), _VOLTA, 0x1DB5, nvlinks=6),
    # nvidia-smi -q, error correction on: total 15360, reserved 393.
    GpuModel("t4", "Tesla T4", 15360, 393, (7, 5), _TURING, 0x1EB8),
    # nvidia-smi: total 46068; reserved 471 on a board of this size.
    GpuModel("l40s", "NVIDIA L40S", 46068, 471, (8, 9), _ADA, 0x26B9),
    # nvidia-smi: total 24576; reserved assumed: no published value found.
    GpuModel("a30", "NVIDIA A30", 24576, 512, (8, 0), _AMPERE, 0x20B7),
    # nvidia-smi -q of a DGX A100: total 40960, reserved 620.
    GpuModel(
        "a100-40gb",
        "NVIDIA A100-SXM4-40GB",
        40960,
        620,
        (8, 0),
        _AMPERE,
        0x20B0,
        nvlinks=12,
        subsystem=0x134F,
    ),
    # The same with a PCI slot; linked in pairs where somebody bought the bridges.
    GpuModel("a100-pcie-40gb", "NVIDIA A100-PCIE-40GB", 40960, 620, (8, 0), _AMPERE, 0x20F1),
    # nvidia-smi -q: total 81920, reserved 763.
    GpuModel(
        "a100-80gb",
        "NVIDIA A100-SXM4-80GB",
        81920,
        763,
        (8, 0),
        _AMPERE,
        0x20B2,
        nvlinks=12,
        subsystem=0x1463,
    ),
    # nvidia-smi -q: total 81559, reserved 328.
    GpuModel(
        "h100-80gb",
        "NVIDIA H100 80GB HBM3",
        81559,
        328,
        (9, 0),
        _HOPPER,
        0x2330,
        nvlinks=18,
        subsystem=0x16C1,
    ),
    # nvidia-smi -q: total 143771, reserved 700.
    GpuModel("h200", "NVIDIA H200", 143771, 700, (9, 0), _HOPPER, 0x2335, nvlinks=18),
    # nvidia-smi: total 143771; reserved assumed to be its sister's. Bridges link two or four.
    GpuModel("h200-nvl", "NVIDIA H200 NVL", 143771, 700, (9, 0), _HOPPER, 0x233B),
    # nvidia-smi -q: total 97871, reserved 1103. One to a machine, without NVLinks to others.
    GpuModel("gh200", "NVIDIA GH200 480GB", 97871, 1103, (9, 0), _HOPPER, 0x2342),
    # nvidia-smi: total 183359; reserved: less the 178.35 GiB that CUDA sees (pytorch/ao#4002).
    GpuModel("b200", "NVIDIA B200", 183359, 729, (10, 0), _BLACKWELL, 0x2901, nvlinks=18),
    # nvidia-smi: totals; reserved assumed: no published values found.
    GpuModel("gb200", "NVIDIA GB200", 189471, 729, (10, 0), _BLACKWELL, 0x2941, nvlinks=18),
    GpuModel("b300", "NVIDIA B300 SXM6 AC", 275040, 729, (10, 3), _BLACKWELL, 0x3182, nvlinks=18),
    GpuModel("gb300", "NVIDIA GB300", 284208, 729, (10, 3), _BLACKWELL, 0x31C2, nvlinks=18),
    # nvidia-smi: total 32623; reserved assumed: no published value found.
    GpuModel(
        "rtx-pro-4500", "NVIDIA RTX PRO 4500 Blackwell", 32623, 512, (12, 0), _BLACKWELL, 0x2C31
    ),
    # nvidia-smi of a Jetson AGX Thor: memory and error correction are not supported. Its MIG
    # profiles (1g.0gb to 3g.0gb, driver of Jetson Linux 39) are left out: not all of their numbers
    # and none of their placements are published.
    GpuModel("thor", "NVIDIA Thor", 0, 0, (11, 0), _BLACKWELL, 0x2B00),
    # nvidia-smi: total 97887; reserved assumed: no published value found.
    GpuModel(
        "rtx-pro-6000",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        97887,
        641,
        (12, 0),
        _BLACKWELL,
        0x2BB5,
    ),
    # nvidia-smi of a DGX Station A100: total 4096; reserved: less the 3911 of older drivers.
    GpuModel("dgx-display", "NVIDIA DGX Display", 4096, 185, (7, 5), _TURING, 0x1FB0),
)

GPU_MODELS: Final = {board.key: board for board in _ROWS}
"""By the name that people write."""
