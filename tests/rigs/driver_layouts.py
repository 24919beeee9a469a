"""Nodes with a driver, the toolkit and device nodes, as packages or containers install them."""

import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from shutil import copy2
from typing import Final

from tests.rigs.nvml_library import built

VERSION: Final = "550.163.01"
"""The version that the C library of `nvml_library` reports."""
LIBRARIES: Final = "usr/lib/x86_64-linux-gnu"
DRIVER_CONTAINER: Final = "run/nvidia/driver"
HOST_FOLDERS: Final = ("usr", "lib", "dev", "run/nvidia")
"""Folders of the host that the chart's pod has below /host."""
TOOLKIT_CONTAINER: Final = "usr/local/nvidia/toolkit"
_NULL: Final = os.makedev(1, 3)
_STAND_IN: Final = """
import json, sys
said = dict(it.removeprefix("--").split("=", 1) for it in sys.argv[3:])
root, hook = said.get("driver-root", ""), said.get("nvidia-ctk-path", "")
library = "/usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01"
print(json.dumps({
    "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [],
    "containerEdits": {
        "hooks": [{"hookName": "createContainer", "path": hook, "args": ["nvidia-cdi-hook"]}],
        "mounts": [{"hostPath": root + library, "containerPath": library, "options": ["ro"]}],
    },
}))
"""


@dataclass
class NodeLayout:
    """The files of a node, below a folder.

    Attributes:
        root: the folder.
        driver: the driver's root below it, as a path of the node.
        toolkit: a folder with NVIDIA's own programs; a stand-in prints a specification without.
        in_container: whether the toolkit's container installed it.
        dev: the folder below the root that has /dev with the device nodes.
    """

    root: Path
    driver: str = ""
    toolkit: Path | None = None
    in_container: bool = False
    dev: str = ""

    def build(self) -> None:
        """Write the files."""
        self._write_driver(self.root / self.driver)
        self._write_toolkit()
        self._write_nodes(self.root / self.dev / "dev")

    def has(self, path: str) -> bool:
        """Return whether the node has a file, as its container runtime would open it."""
        return (self.root / path.lstrip("/")).exists()

    def _write_driver(self, root: Path) -> None:
        libraries, programs = root / LIBRARIES, root / "usr/bin"
        for folder in (libraries, programs):
            folder.mkdir(parents=True)
        for name in ("libnvidia-ml.so", "libcuda.so"):
            copy2(built(), libraries / f"{name}.{VERSION}")
            (libraries / f"{name}.1").symlink_to(f"{name}.{VERSION}")
        _write_program(programs / "nvidia-smi", "")

    def _write_toolkit(self) -> None:
        folder = self.root / (TOOLKIT_CONTAINER if self.in_container else "usr/bin")
        folder.mkdir(parents=True, exist_ok=True)
        itself = folder / ("nvidia-ctk.real" if self.in_container else "nvidia-ctk")
        if self.in_container:
            _write_program(folder / "nvidia-ctk", "sys.exit('the script has paths of the host')")
        if self.toolkit is None:
            _write_program(itself, _STAND_IN)
            _write_program(folder / "nvidia-cdi-hook", "")
        else:
            copy2(self.toolkit / "nvidia-ctk", itself)
            copy2(self.toolkit / "nvidia-cdi-hook", folder / "nvidia-cdi-hook")

    def _write_nodes(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name in ("null", "zero", "random", "urandom"):
            os.mknod(folder / name, stat.S_IFCHR | 0o666, Path("/dev", name).stat().st_rdev)
        for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
            os.mknod(folder / name, stat.S_IFCHR | 0o666, _NULL)


def _write_program(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable} -S\nimport sys\n{text}\n")
    path.chmod(0o755)
