"""Folders that containers may write to: emptied without following, waiting, or going deep."""

import os
from pathlib import Path

import pytest

from metagpu.core.errors import ProgramError
from metagpu.host import daemon_folders


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

    daemon_folders.empty(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_wide_tree_is_removed(tmp_path: Path) -> None:
    """More entries than are listed at once are removed, hidden ones too."""
    wide = tmp_path / "wide"
    wide.mkdir()
    for number in range(1100):
        (wide / f".{number}").touch()
    for number in range(30):
        (wide / f"d{number}").mkdir()

    daemon_folders.empty(tmp_path)

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

    daemon_folders.empty(folder)

    assert list(folder.iterdir()) == []
    assert {path.name for path in other.iterdir()} == {"inner", "file"}


def test_a_link_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    """A folder that is a link is not emptied."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    (tmp_path / "folder").symlink_to(other)

    with pytest.raises(ProgramError, match="folder cannot be emptied: Not a directory"):
        daemon_folders.empty(tmp_path / "folder")
    assert (other / "file").exists()


def test_a_folder_that_is_filled_all_the_time_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that writes faster than the folder is emptied costs a limited time."""
    monkeypatch.setattr(daemon_folders, "EMPTY_DEADLINE", 0.0)
    (tmp_path / "file").touch()

    with pytest.raises(ProgramError, match="a container writes into it all the time"):
        daemon_folders.empty(tmp_path)
