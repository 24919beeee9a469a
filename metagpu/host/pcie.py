"""PCIe root complexes of devices, as the kernel shows them."""

from pathlib import Path
from typing import Final

from metagpu.core.model.gpu import Gpu

_DEVICES: Final = Path("/sys/bus/pci/devices")


def read_pcie_root(gpu: Gpu, devices: Path = _DEVICES) -> str | None:
    """Return the PCIe root complex of a GPU, as `pci0000:00`, if the kernel shows it."""
    if not gpu.pci_bus_id:
        return None
    shown = (devices / gpu.pci_bus_id).resolve()
    return next((part for part in shown.parts if part.startswith("pci") and ":" in part), None)
