"""Folders that containers may write to: emptied without following, waiting, or going deep."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from metagpu.core.errors import ProgramError
from metagpu.host import daemons
from tests.rigs.privileges import with_only

MPS = ("sys_admin", "sys_ptrace", "sys_chroot", "dac_override", "fowner")
"""The capabilities of a container with MPS (docs/permissions.md)."""
EMPTY = """
import sys
from pathlib import Path
from metagpu.core.errors import ProgramError
from metagpu.host.daemons import empty
try:
    empty(Path(sys.argv[1]))
except ProgramError as error:
    print(error)
"""


def deep_tree(folder: Path, depth: int) -> None:
    """Create a folder in a folder in a folder, longer than any path may be."""
    here = os.open(folder, os.O_RDONLY)
    for name in ["d" * 200] * depth:
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_a_deep_tree_is_removed(tmp_path: Path) -> None:
    """A tree deeper than Python's calls and Linux's paths may be is removed."""
    deep_tree(tmp_path, 1200)

    daemons.empty(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_wide_tree_is_removed(tmp_path: Path) -> None:
    """More entries than are listed at once are removed, hidden ones too."""
    wide = tmp_path / "wide"
    wide.mkdir()
    for number in range(1100):
        (wide / f".{number}").touch()
    for number in range(30):
        (wide / f"d{number}").mkdir()

    daemons.empty(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    """Links are removed, and files and folders that they lead to stay."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    (other / "inner").mkdir(parents=True)
    (other / "file").touch()
    (folder / "a").symlink_to(other)
    (folder / "b").symlink_to(other / "file")
    os.mkfifo(folder / "c")

    daemons.empty(folder)

    assert list(folder.iterdir()) == []
    assert {path.name for path in other.iterdir()} == {"inner", "file"}


def test_a_link_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    """A folder that is a link is not emptied."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    (tmp_path / "folder").symlink_to(other)

    with pytest.raises(ProgramError, match="folder cannot be emptied: Not a directory"):
        daemons.empty(tmp_path / "folder")
    assert (other / "file").exists()


def test_a_folder_that_is_filled_all_the_time_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that writes faster than the folder is emptied costs a limited time."""
    monkeypatch.setattr(daemons, "EMPTY_DEADLINE", 0.0)
    (tmp_path / "file").touch()

    with pytest.raises(ProgramError, match="a container writes into it all the time"):
        daemons.empty(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
@pytest.mark.skipif(which("setpriv") is None, reason="setpriv of util-linux is missing")
@pytest.mark.parametrize("lacking", ["", "fowner"])
def test_a_sticky_folder_of_another_user_is_removed(tmp_path: Path, lacking: str) -> None:
    """The capabilities of MPS suffice for what a container's user keeps; a missing one is named."""
    sticky = tmp_path / "sticky"
    sticky.mkdir()
    (sticky / "kept").touch()
    for path in (sticky / "kept", sticky):
        os.chown(path, 1000, 1000)
    sticky.chmod(0o1777)
    run = (*with_only(*(name for name in MPS if name != lacking)), sys.executable, "-c", EMPTY)
    done = subprocess.run((*run, tmp_path), check=True, capture_output=True, text=True)  # noqa: S603

    if lacking:
        assert "metagpu needs the capability FOWNER" in done.stdout
        assert sticky.exists()
    else:
        assert done.stdout == ""
        assert list(tmp_path.iterdir()) == []
