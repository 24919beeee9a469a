"""NVIDIA's device nodes in the host's /dev, their links in /dev/char, PCIe roots.

With systemd's cgroup driver, runc names devices to systemd by number, and systemd looks the number
up in /dev/char. udev makes no link for NVIDIA's nodes, as they are no devices of the kernel's
model: at the next `systemctl daemon-reload` running containers lose their GPUs.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import structlog
from anyio import to_thread

from metagpu.core.model.driver_roots import DriverRoots, Folder
from metagpu.core.model.gpu import Gpu
from metagpu.core.runtime.rate_limit import LogOnce

_CAPABILITIES: Final = Path("proc/driver/nvidia-caps/mig-minors")
_LINE: Final = re.compile(r"(\S+) (\d+)")


class DeviceNodes(NamedTuple):
    """NVIDIA's device nodes.

    Attributes:
        present: paths as seen from the host's root, below /dev/nvidia-caps too.
        capabilities: the numbers of the nodes that open MIG instances, by the driver's names such
            as `gpu0/gi3/access`; none where the driver has no MIG.
        root: the folder with this /dev, for the container runtime; empty for the root.
    """

    present: frozenset[str] = frozenset()
    capabilities: Mapping[str, int] = {}
    root: str = ""


def device_nodes(dev_root: Folder) -> DeviceNodes:
    """List NVIDIA's device nodes below a folder. Blocks."""
    root = Path(dev_root.here)
    dev = root / "dev"
    found = [*dev.glob("nvidia*"), *dev.glob("nvidia-caps/nvidia-cap*")]

    return DeviceNodes(
        frozenset(f"/{node.relative_to(root)}" for node in found),
        _capabilities(root),
        dev_root.prefix,
    )


def _capabilities(root: Path) -> Mapping[str, int]:
    """Read the driver's list of MIG capabilities: the root's, or this process's."""
    for folder in dict.fromkeys((root, Path("/"))):
        try:
            lines = (folder / _CAPABILITIES).read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        return {
            match[1]: int(match[2]) for match in map(_LINE.fullmatch, lines.splitlines()) if match
        }
    return {}


_MAJOR: Final = re.compile(r"^\s*(\d+) nvidia", re.MULTILINE)
_SLICES: Final = ("kubepods.slice", "systemd/kubepods.slice")
"""The kubelet's cgroup with systemd's driver, of cgroup v2 and v1."""

log = structlog.get_logger()


def missing_links(
    roots: DriverRoots,
    nodes: Iterable[str],
    *,
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
) -> Mapping[Path, str]:
    """Return the missing links that systemd needs, with their targets. Blocks.

    Args:
        roots: the roots in use.
        nodes: the paths of NVIDIA's device nodes.
        proc: the kernel's /proc, with the numbers of the driver's devices.
        cgroups: the host's cgroups; without systemd's driver no link is needed.
    """
    if not any((cgroups / name).is_dir() for name in _SLICES):
        return {}
    majors = _majors(proc)
    folder = Path(roots.host.here) / "dev/char"
    found = {}
    for node in sorted(nodes):
        try:
            status = (Path(roots.dev.here) / node.lstrip("/")).stat()
        except OSError:
            continue
        major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
        link = folder / f"{major}:{minor}"
        if stat.S_ISCHR(status.st_mode) and major in majors and not os.path.lexists(link):
            found[link] = f"{roots.dev.prefix}{node}"
    return found


class CharLinks:
    """Creates missing links; a link that exists stays as it is.

    Args:
        find_roots: looks for the device nodes; blocks.
    """

    def __init__(self, find_roots: Callable[[], DriverRoots] = DriverRoots) -> None:
        self._find_roots = find_roots
        self._logged = LogOnce()

    async def run(self, period: float) -> None:
        """Create missing links every `period` seconds until cancelled."""
        while True:
            await to_thread.run_sync(self._look)
            await anyio.sleep(period)

    def _look(self) -> None:
        roots = self._find_roots()
        self.create(missing_links(roots, device_nodes(roots.dev).present))

    def create(self, links: Mapping[Path, str]) -> None:
        """Create links; log each new problem once. Blocks."""
        for link, target in links.items():
            try:
                link.symlink_to(target)
            except FileExistsError:
                continue
            except OSError as error:
                if self._logged.is_new("links", str(error)):
                    log.warning("links in /dev/char not created", error=str(error))
                return
            log.info("link in /dev/char created", link=str(link), target=target)


def _majors(proc: Path) -> frozenset[int]:
    try:
        text = (proc / "devices").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    return frozenset(map(int, _MAJOR.findall(text)))


_DEVICES: Final = Path("/sys/bus/pci/devices")


def read_machine(file: Path = Path("/sys/class/dmi/id/product_name")) -> str:
    """Return the name of the machine's model, empty where the firmware names none."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_pcie_root(gpu: Gpu, devices: Path = _DEVICES) -> str | None:
    """Return the PCIe root complex of a GPU, as `pci0000:00`, if the kernel shows it."""
    if not gpu.pci_bus_id:
        return None
    shown = (devices / gpu.pci_bus_id).resolve()
    return next((part for part in shown.parts if part.startswith("pci") and ":" in part), None)
