"""Links in /dev/char: which are missing, and that nothing else is touched."""

import os
import stat
from functools import partial
from pathlib import Path

import anyio
import pytest

from metagpu.core.model.driver_roots import DriverRoots, Folder
from metagpu.host import char_links
from metagpu.host.char_links import CharLinks, missing_links
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import until

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
    monkeypatch.setattr(char_links, "missing_links", wired)
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

    with capture_module_logs(char_links) as log:
        own.create(links)
        own.create(links)
    assert [line["event"] for line in log] == ["links in /dev/char not created"]
