"""Links in /dev/char, by which systemd finds the devices of its device rules.

With systemd's cgroup driver, runc names devices to systemd by number, and systemd looks the number
up in /dev/char. udev makes no link for NVIDIA's nodes, as they are no devices of the kernel's
model: at the next `systemctl daemon-reload` running containers lose their GPUs.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio import to_thread

from metagpu.core.model.driver_roots import DriverRoots
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.host.device_nodes import device_nodes

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
