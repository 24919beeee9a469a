"""Leftovers in folders: metagpu's own files go, those of others stay."""

from pathlib import Path

import anyio
import pytest

from metagpu.core.contracts.leftovers import Leftover, Removal, Result, settle
from metagpu.core.errors import MetagpuError
from metagpu.host.node_leftovers import find_folder, find_service
from metagpu.host.service import ServiceFile


def removed(found: Leftover, *, force: bool = False) -> Removal:
    """Remove a leftover."""
    return anyio.run(lambda: settle(found, wanted=True, force=force))


def test_files_of_others_keep_their_folder(tmp_path: Path) -> None:
    """A run folder that is anybody's loses our files alone; one of ours goes with its parent."""
    mine, shared = tmp_path / "metagpu" / "pod", tmp_path / "shared"
    for folder in (mine, shared):
        folder.mkdir(parents=True)
        (folder / "mgctl").touch()
    (shared / "other").touch()

    for folder in (mine, shared):
        [found] = find_folder("pod folder", folder, ["mgctl"], with_parent=True)
        assert removed(found).result is Result.REMOVED
    assert list(tmp_path.rglob("*")) == [shared, shared / "other"]


def test_a_folder_with_control_daemons_stays_whole(tmp_path: Path) -> None:
    """Nothing of a run folder is removed while a control daemon has its folder there."""
    (tmp_path / "mps" / "GPU-1").mkdir(parents=True)
    (tmp_path / "metagpu.lock").touch()

    [found] = find_folder("run folder", tmp_path, ["mps", "metagpu.lock"])
    done = removed(found)
    assert done.result is Result.STAYS
    assert "GPU-1" in done.reason
    assert (tmp_path / "metagpu.lock").exists()


def test_what_an_operator_has_changed_stays(tmp_path: Path) -> None:
    """A service file that differs stays, with force too; the others go, and the unit's link."""
    files = [ServiceFile(tmp_path / "etc/metagpu" / name, "x") for name in ("a", "b", "c")]
    for file in files[:2]:
        file.write()
    files[1].path.write_text("y")
    files[2].path.mkdir()  # cannot be read
    link = tmp_path / "etc/systemd/system/multi-user.target.wants/metagpu.service"
    link.parent.mkdir(parents=True)
    link.symlink_to("/etc/systemd/system/metagpu.service")

    results = [removed(leftover, force=True).result for leftover in find_service(files, tmp_path)]
    assert results == [Result.REMOVED, Result.STAYS, Result.STAYS, Result.REMOVED]
    assert files[1].path.read_text() == "y"
    assert not link.is_symlink()


@pytest.mark.parametrize("force", [False, True])
def test_what_pods_use_goes_by_force_alone(*, force: bool) -> None:
    """The reason has the pods, and how to remove it all the same."""
    done = removed(Leftover("a", "b", stays="used by pod a/b", forced=True), force=force)

    assert done.result is (Result.REMOVED if force else Result.STAYS)
    assert done.reason == ("" if force else "used by pod a/b; --force removes it")


def test_a_failed_removal_has_its_reason() -> None:
    """An error is a reason to stay, and ends nothing."""

    async def fail() -> None:
        raise MetagpuError("it is busy")

    assert removed(Leftover("a", "b", fail)).reason == "it is busy"
