"""Device nodes in the machine's file system."""

from pathlib import Path

from metagpu.core.model.driver_roots import Folder
from metagpu.host.device_nodes import DeviceNodes, device_nodes

MINORS = """\
config 1
monitor 2
gpu0/gi0/access 3
gpu0/gi0/ci0/access 4
"""


def test_device_nodes_are_found_with_those_of_mig(tmp_path: Path) -> None:
    """NVIDIA's nodes are listed, with those below nvidia-caps and the MIG instances they open."""
    for name in ("nvidia0", "nvidiactl", "nvidia-caps/nvidia-cap3", "null"):
        node = tmp_path / "dev" / name
        node.parent.mkdir(parents=True, exist_ok=True)
        node.touch()
    minors = tmp_path / "proc/driver/nvidia-caps/mig-minors"
    minors.parent.mkdir(parents=True)
    minors.write_text(f"{MINORS}nonsense\n")

    found = device_nodes(Folder("/run/nvidia/driver", str(tmp_path)))
    assert found.root == "/run/nvidia/driver"
    assert found.present == {
        *("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-caps", "/dev/nvidia-caps/nvidia-cap3")
    }
    assert found.capabilities == {
        "config": 1,
        "monitor": 2,
        "gpu0/gi0/access": 3,
        "gpu0/gi0/ci0/access": 4,
    }


def test_a_node_without_mig_has_no_capabilities(tmp_path: Path) -> None:
    """Without the driver's list there are no capabilities, and no error."""
    assert device_nodes(Folder("/", str(tmp_path))) == DeviceNodes()
