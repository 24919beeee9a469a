"""PCIe root complexes, from links as those of /sys/bus/pci/devices."""

from pathlib import Path

from msgspec.structs import replace

from metagpu.host.pcie import read_pcie_root
from tests.rigs.build import gpu


def test_the_root_is_in_the_path_of_the_device(tmp_path: Path) -> None:
    """The link leads below the root complex; without a link, or an address, nothing is known."""
    devices = tmp_path / "bus"
    device = tmp_path / "sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0"
    device.mkdir(parents=True)
    devices.mkdir()
    (devices / "0000:81:00.0").symlink_to(device)
    bare = replace(gpu(0), pci_bus_id="0000:81:00.0")

    assert read_pcie_root(bare, devices) == "pci0000:80"
    assert read_pcie_root(gpu(1), devices) is None
    assert read_pcie_root(replace(bare, pci_bus_id=""), devices) is None
