"""The lock of a kubelet's folder."""

from pathlib import Path

import anyio
import pytest

from metagpu.core.errors import MetagpuError
from metagpu.plugins.kubelet.folder_lock import FolderLock
from tests.rigs.waiting import becomes


async def test_one_metagpu_serves_a_kubelet(tmp_path: Path) -> None:
    """The folder's second user is refused until the first one has ended."""
    async with FolderLock(tmp_path, 1).held():
        with pytest.raises(MetagpuError, match=f"another metagpu serves the kubelet of {tmp_path}"):
            async with FolderLock(tmp_path, 1).held():
                raise AssertionError
    async with FolderLock(tmp_path, 1).held():
        assert [file async for file in anyio.Path(tmp_path).iterdir()] == []


async def test_folder_that_comes_later_is_locked(tmp_path: Path) -> None:
    """Of two that wait for a folder, one gets it and the other ends; also when it is made again."""
    folder = tmp_path / "device-plugins"
    first, second = FolderLock(folder, 0.001), FolderLock(folder, 0.001)

    async with first.held(), anyio.create_task_group() as group:
        group.start_soon(first.run)
        for old in ("old", "older"):
            before = first._locked
            folder.mkdir()
            await becomes(lambda before=before: first._locked != before)  # type: ignore[misc]
            with anyio.fail_after(30), pytest.raises(MetagpuError):
                async with second.held():
                    await second.run()
            folder.rename(tmp_path / old)  # its inode must not come again
        group.cancel_scope.cancel()


async def test_folder_that_cannot_be_locked_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without locks costs the lock alone."""

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("metagpu.plugins.kubelet.folder_lock.fcntl.flock", refuse)
    async with FolderLock(tmp_path, 1).held():
        pass


async def test_lock_that_was_given_up_is_not_taken_again(tmp_path: Path) -> None:
    """A look at the folder after the release leaves it to another metagpu."""
    first, second = FolderLock(tmp_path, 0.001), FolderLock(tmp_path, 1)
    async with anyio.create_task_group() as group:
        async with first.held():
            group.start_soon(first.run)
        await anyio.sleep(0.05)
        async with second.held():
            pass
        group.cancel_scope.cancel()
