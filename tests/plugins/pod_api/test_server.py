"""The folder that containers see."""

import threading
from pathlib import Path

import anyio
import pytest

from metagpu.plugins.pod_api import server as pod_folder
from metagpu.plugins.pod_api.server import PodFolder


async def test_the_folder_is_installed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts of the daemon that need the folder at once get it from one installation."""
    installations, both_asked = list[Path](), threading.Event()

    def slow(path: Path) -> None:
        installations.append(path)
        both_asked.wait(30)

    monkeypatch.setattr(pod_folder, "install_mgctl", slow)
    folder, found = PodFolder(tmp_path), list[Path | None]()

    async def prepare() -> None:
        found.append(await folder.prepare())

    async with anyio.create_task_group() as group:
        group.start_soon(prepare)
        group.start_soon(prepare)
        await anyio.wait_all_tasks_blocked()
        both_asked.set()

    assert (installations, found) == ([tmp_path], [tmp_path, tmp_path])
