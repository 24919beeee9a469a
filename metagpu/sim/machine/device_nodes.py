"""NVIDIA's device nodes of a simulated host, as plain files: nothing opens them."""

from pathlib import Path
from typing import Final

_INSTANCES: Final = 15
"""The GPU instances that a driver numbers on one GPU."""
_COMPUTE_INSTANCES: Final = 8


def make_device_nodes(root: Path, gpus: int) -> None:
    """Make the nodes of GPUs below a folder, and the list of MIG minors. Blocks.

    Raises:
        OSError: a file cannot be made.
    """
    caps, listed = root / "dev" / "nvidia-caps", root / "proc/driver/nvidia-caps/mig-minors"
    caps.mkdir(parents=True, exist_ok=True)
    listed.parent.mkdir(parents=True, exist_ok=True)
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(gpus))):
        (root / "dev" / name).touch()
    lines = ["config 1", "monitor 2"]
    for gpu in range(gpus):
        for instance in range(_INSTANCES):
            for part in ("access", *(f"ci{n}/access" for n in range(_COMPUTE_INSTANCES))):
                minor = len(lines) + 1
                lines.append(f"gpu{gpu}/gi{instance}/{part} {minor}")
                (caps / f"nvidia-cap{minor}").touch()
    listed.write_text("\n".join(lines) + "\n", encoding="ascii")
