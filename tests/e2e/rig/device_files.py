"""Device files of simulated GPUs, where a driver has its own."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

CONTROL_DEVICES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
NULL_DEVICE = os.makedev(1, 3)
"""The device number of every simulated device file: opening it has no effect."""
GPU_INSTANCES = 15
"""Numbers of GPU instances that a driver gives, from 0."""


def make_device_files(root: Path, count: int) -> None:
    """Create the device files of COUNT GPUs below a root of /dev."""
    folder = root / "dev"
    folder.mkdir(parents=True)
    for name in (*(f"nvidia{index}" for index in range(count)), *CONTROL_DEVICES):
        _make(folder / name)


def make_mig_device_files(root: Path, gpus: Iterable[int]) -> None:
    """Create the device files of all MIG instances of GPUs, and the driver's list of them."""
    instances = [f"gpu{gpu}/gi{number}" for gpu in gpus for number in range(GPU_INSTANCES)]
    names = [f"{instance}{part}/access" for instance in instances for part in ("", "/ci0")]
    listed = root / "proc" / "driver" / "nvidia-caps" / "mig-minors"
    listed.parent.mkdir(parents=True)
    listed.write_text("".join(f"{name} {minor}\n" for minor, name in enumerate(names, start=3)))
    folder = root / "dev" / "nvidia-caps"
    folder.mkdir()
    for minor, _ in enumerate(names, start=3):
        _make(folder / f"nvidia-cap{minor}")


def _make(device: Path) -> None:
    os.mknod(device, stat.S_IFCHR, NULL_DEVICE)
    device.chmod(0o666)  # mknod's own mode is reduced by the umask
