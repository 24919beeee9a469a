"""NVIDIA's device nodes, their links in /dev/char, and PCIe roots."""

import os
import stat
from functools import partial
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from metagpu.core.model.driver_roots import DriverRoots, Folder
from metagpu.host import device_nodes as nodes_module
from metagpu.host.device_nodes import (
    CharLinks,
    DeviceNodes,
    device_nodes,
    missing_links,
    read_pcie_root,
)
from tests.rigs.build import gpu
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import until

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


DEVICES = "Character devices:\n  1 mem\n195 nvidia\n508 nvidia-uvm\n\nBlock devices:\n  8 sd\n"
NODES = ("/dev/nvidia0", "/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidia-caps", "/dev/nvidia9")


@pytest.fixture
def roots(tmp_path: Path) -> DriverRoots:
    """Create a node with a driver container, systemd's cgroups and four device nodes."""
    if os.geteuid() != 0:
        pytest.skip("only root may create device nodes")
    for folder in ("proc", "cgroup/kubepods.slice", "host/dev/char", "driver/dev/nvidia-caps"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/devices").write_text(DEVICES)
    for name, major, minor in (("nvidia0", 195, 0), ("nvidia1", 195, 1), ("nvidia-uvm", 508, 0)):
        os.mknod(tmp_path / "driver/dev" / name, stat.S_IFCHR, os.makedev(major, minor))
    os.mknod(tmp_path / "driver/dev/nvidia9", stat.S_IFCHR, os.makedev(1, 3))  # not the driver's
    dev = Folder("/run/nvidia/driver", str(tmp_path / "driver"))
    return DriverRoots(dev, dev, Folder("/", str(tmp_path / "host")))


def missing(roots: DriverRoots, tmp_path: Path) -> dict[str, str]:
    """Return the missing links by their names."""
    found = missing_links(roots, NODES, proc=tmp_path / "proc", cgroups=tmp_path / "cgroup")
    assert {link.parent for link in found} <= {tmp_path / "host/dev/char"}
    return {link.name: target for link, target in found.items()}


def test_links_are_created_once(roots: DriverRoots, tmp_path: Path) -> None:
    """Each node of the driver gets a link to the host's path; one that exists stays."""
    own = tmp_path / "host/dev/char/195:1"
    own.symlink_to("/elsewhere")

    assert missing(roots, tmp_path) == {
        "195:0": "/run/nvidia/driver/dev/nvidia0",
        "508:0": "/run/nvidia/driver/dev/nvidia-uvm",
    }
    links = missing_links(roots, NODES, proc=tmp_path / "proc", cgroups=tmp_path / "cgroup")
    CharLinks().create(links)
    CharLinks().create(links)
    assert missing(roots, tmp_path) == {}
    assert own.readlink() == Path("/elsewhere")


async def test_nodes_that_come_later_are_linked(
    roots: DriverRoots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon links the nodes at its start, and those that the driver creates later."""
    wired = partial(missing_links, proc=tmp_path / "proc", cgroups=tmp_path / "cgroup")
    monkeypatch.setattr(nodes_module, "missing_links", wired)
    folder = anyio.Path(tmp_path / "host/dev/char")

    async def linked(*names: str) -> None:
        async def is_so() -> bool:
            return {link.name async for link in folder.iterdir()} == {*names}

        await until(is_so, 30)

    async with anyio.create_task_group() as group:
        group.start_soon(CharLinks(lambda: roots).run, 0.01)
        await linked("195:0", "195:1", "508:0")
        os.mknod(tmp_path / "driver/dev/nvidia2", stat.S_IFCHR, os.makedev(195, 2))
        await linked("195:0", "195:1", "195:2", "508:0")
        group.cancel_scope.cancel()


def test_no_link_is_missing_without_systemds_driver(roots: DriverRoots, tmp_path: Path) -> None:
    """The kubelet's cgroups show the driver: of v2, of v1, or another one than systemd's."""
    systemd = tmp_path / "cgroup/kubepods.slice"
    systemd.rename(tmp_path / "cgroup/kubepods")
    assert missing(roots, tmp_path) == {}

    (tmp_path / "cgroup/systemd/kubepods.slice").mkdir(parents=True)
    assert len(missing(roots, tmp_path)) == 3
    (tmp_path / "proc/devices").unlink()
    assert missing(roots, tmp_path) == {}


def test_a_folder_that_cannot_be_written_is_logged_once(tmp_path: Path) -> None:
    """Without a writable /dev/char the daemon goes on, with one line in its log."""
    links = {tmp_path / "no-such-folder" / name: "/dev/x" for name in ("195:0", "195:1")}
    own = CharLinks()

    with capture_module_logs(nodes_module) as log:
        own.create(links)
        own.create(links)
    assert [line["event"] for line in log] == ["links in /dev/char not created"]


def test_the_machine_is_named_where_its_firmware_does(tmp_path: Path) -> None:
    """The name has no end of line; a machine without one has none."""
    file = tmp_path / "product_name"
    assert nodes_module.read_machine(file) == ""
    file.write_bytes(b"DGX Station A100\n")
    assert nodes_module.read_machine(file) == "DGX Station A100"


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
