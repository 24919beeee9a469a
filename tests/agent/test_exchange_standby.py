"""The file of a daemon that waits: a help to the one that serves, whatever happens to it."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from metagpu.agent.exchange import STANDBY_FILE, Standby, StandbyFile, read_standby

READY = Standby("v1")
UNREADY = Standby("v2", ("the driver: it does not answer",))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[StandbyFile]]:
    """Return the files of two daemons of one run folder."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(StandbyFile(tmp_path / "run"))) for _ in range(2)]


def test_a_daemon_is_seen_while_it_waits(tmp_path: Path, files: list[StandbyFile]) -> None:
    """The daemon makes the run folder; after its end nobody waits."""
    folder, file = tmp_path / "run", files[0]
    assert read_standby(folder) is None
    file.show(UNREADY)
    assert read_standby(folder) == UNREADY
    modes = [path.stat().st_mode & 0o777 for path in (folder, folder / STANDBY_FILE)]
    assert modes == [0o755, 0o600]
    file.show(READY)
    assert read_standby(folder) == READY
    file.close()
    assert read_standby(folder) is None


def test_a_second_daemon_that_waits_is_seen_after_the_first(
    tmp_path: Path, files: list[StandbyFile]
) -> None:
    """One file has one daemon; the other one tries again at each look."""
    first, second = files
    first.show(UNREADY)
    second.show(READY)
    assert read_standby(tmp_path / "run") == UNREADY
    first.close()
    assert read_standby(tmp_path / "run") is None
    second.show(READY)
    assert read_standby(tmp_path / "run") == READY


def test_a_lost_run_folder_is_made_again(tmp_path: Path, files: list[StandbyFile]) -> None:
    """A daemon that waits is seen again, though nothing about it has changed."""
    folder, (file, other) = tmp_path / "run", files
    file.show(READY)
    shutil.rmtree(folder)
    assert read_standby(folder) is None
    file.show(READY)
    assert read_standby(folder) == READY

    shutil.rmtree(folder)
    other.show(UNREADY)  # makes the folder again, and ends
    other.close()
    file.show(READY)
    assert read_standby(folder) == READY


@pytest.mark.parametrize("part", [0, 9])
def test_a_full_disk_leaves_no_daemon_that_seems_ready(
    tmp_path: Path, files: list[StandbyFile], monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """A daemon that cannot say that it is not ready any more counts as not ready, and lives on."""

    def full(file: int, content: bytes, at: int) -> int:
        if not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content[:part], at)

    write = os.pwrite
    files[0].show(READY)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        files[0].show(UNREADY)
    standby = read_standby(tmp_path / "run")
    assert standby is not None
    assert not standby.ready
    files[0].show(UNREADY)
    assert read_standby(tmp_path / "run") == UNREADY


def test_a_daemon_that_fails_while_it_writes_is_not_ready(
    tmp_path: Path, files: list[StandbyFile]
) -> None:
    """Half a text, or one of another version, is of a daemon that has just started."""
    files[0].show(READY)
    for text in ("", '{"version": "v1", "pro', "[]"):
        (tmp_path / "run" / STANDBY_FILE).write_text(text)
        assert read_standby(tmp_path / "run") == Standby(problems=("it has just started",))


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_what_is_no_file_holds_up_nobody(
    tmp_path: Path, files: list[StandbyFile], kind: str
) -> None:
    """Neither the daemon that waits nor the one that ends looks at it for long."""
    folder, path = tmp_path / "run", tmp_path / "run" / STANDBY_FILE
    folder.mkdir()
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case _:
            path.symlink_to(tmp_path / "elsewhere")
    files[0].show(READY)
    assert read_standby(folder) is None
    assert not (tmp_path / "elsewhere").exists()
