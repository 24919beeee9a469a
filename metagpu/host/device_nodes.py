"""NVIDIA's device nodes in the host's /dev."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from metagpu.core.model.driver_roots import Folder

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
