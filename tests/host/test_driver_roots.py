"""Links of the host: an absolute one leads below the host's root, wherever that is mounted."""

from pathlib import Path

import pytest

from metagpu.core.model.driver_roots import NVML_LIBRARY, Folder, RootOptions
from metagpu.host import driver_roots
from metagpu.host.driver_roots import find_hook, find_roots, follow_links


def link(path: Path, target: str) -> None:
    """Make a link in a new folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def write(path: Path) -> None:
    """Write a program in a new folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


@pytest.mark.parametrize("target", ["/opt/nv/nvidia-cdi-hook", "../../opt/nv/nvidia-cdi-hook"])
def test_the_program_of_hooks_may_be_a_link(tmp_path: Path, target: str) -> None:
    """The host's own path is named, and the host resolves the link as it did here."""
    link(tmp_path / "usr/bin/nvidia-cdi-hook", target)
    host = Folder("/", str(tmp_path))
    assert find_hook(host) == ""

    write(tmp_path / "opt/nv/nvidia-cdi-hook")
    assert find_hook(host) == "/usr/bin/nvidia-cdi-hook"


@pytest.mark.parametrize("of_folder", [True, False])
def test_the_library_may_be_a_link(tmp_path: Path, *, of_folder: bool) -> None:
    """The library that an absolute link names on the host is found where it is here."""
    write(tmp_path / f"opt/nv/{NVML_LIBRARY}")
    file = "" if of_folder else f"/{NVML_LIBRARY}"
    link(tmp_path / f"usr/lib64{file}", f"/opt/nv{file}")
    roots = find_roots(RootOptions(driver="/x", container_driver=str(tmp_path)))

    assert roots.library == str(tmp_path / "opt/nv" / NVML_LIBRARY)


def test_a_link_of_this_process_is_not_the_hosts(tmp_path: Path) -> None:
    """A file that exists at the link's target here, and not on the host, is not found."""
    elsewhere, host = tmp_path / "elsewhere", tmp_path / "host"
    write(elsewhere / "nvidia-cdi-hook")
    write(elsewhere / NVML_LIBRARY)
    link(host / "usr/bin/nvidia-cdi-hook", str(elsewhere / "nvidia-cdi-hook"))
    link(host / f"usr/lib64/{NVML_LIBRARY}", str(elsewhere / NVML_LIBRARY))

    assert find_hook(Folder("/", str(host))) == ""
    assert find_roots(RootOptions(driver="/x", container_driver=str(host))).library == ""


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    """A circle of links leads to no file; a link upwards stays below the root."""
    link(tmp_path / "one", "/two")
    link(tmp_path / "two", "one")
    link(tmp_path / "up", "../../../etc")

    assert not follow_links(tmp_path, "one").exists()
    assert follow_links(tmp_path, "up/passwd") == tmp_path / "etc/passwd"


def test_looks_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that does not exist is looked into by nobody: this repeats while a node rests."""
    looked: list[Path] = []

    def followed(root: Path, path: str) -> Path:
        looked.append(root)
        return follow_links(root, path)

    monkeypatch.setattr(driver_roots, "follow_links", followed)
    missing = find_roots(RootOptions(driver="/x", container_driver=str(tmp_path / "missing")))

    assert missing.library == ""
    assert tmp_path / "missing" not in looked
    find_roots(RootOptions(driver="/x", container_driver=str(tmp_path)))
    assert tmp_path in looked
