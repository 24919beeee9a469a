"""Watched configuration files: a change of any kind is noticed."""

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest

from metagpu.agent import config_watch
from metagpu.agent.config_watch import (
    EVERY_NAME,
    ConfigWatchTiming,
    changes,
    names_to_watch,
)


def mounted(folder: Path, text: str, generation: int = 1) -> Path:
    """Create or exchange a ConfigMap mounted as Kubernetes does: the file stays, `..data` moves."""
    data = folder / f"..{generation}"
    data.mkdir(parents=True)
    (data / "config.yaml").write_text(text, encoding="utf-8")
    (folder / "..tmp").symlink_to(data.name)
    (folder / "..tmp").rename(folder / "..data")
    if not (folder / "config.yaml").is_symlink():
        (folder / "config.yaml").symlink_to("..data/config.yaml")
    return folder / "config.yaml"


def rewrite(path: Path) -> None:
    """Write a file again."""
    path.write_text("new", encoding="utf-8")


def replace(path: Path) -> None:
    """Rename another file over the file, as editors do."""
    beside = path.with_name("beside")
    beside.write_text("new", encoding="utf-8")
    beside.rename(path)


def remove(path: Path) -> None:
    """Remove the file."""
    path.unlink()


@pytest.mark.parametrize("change", [rewrite, replace, remove])
async def test_a_file_that_changes_is_noticed(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """A file that is rewritten, replaced or removed wakes the watcher."""
    file = tmp_path / "metagpu.yaml"
    file.write_text("old", encoding="utf-8")

    async with aclosing(changes([file])) as watcher:
        await anext(watcher)
        change(file)
        await anext(watcher)


async def test_a_file_may_come_later(tmp_path: Path) -> None:
    """The watcher waits for a file, and for the folders above it, that do not exist yet."""
    file = tmp_path / "etc" / "metagpu" / "config.yaml"

    async with aclosing(changes([file])) as watcher:
        await anext(watcher)
        file.parent.mkdir(parents=True)
        await anext(watcher)
        file.write_text("new", encoding="utf-8")
        await anext(watcher)


async def test_an_exchanged_config_map_is_noticed(tmp_path: Path) -> None:
    """The watcher follows the links of a mounted ConfigMap and notices each exchange."""
    file = mounted(tmp_path / "config", "one")
    direct, folder = [file], [file.parent]

    for number, paths in enumerate((direct, folder), start=2):
        async with aclosing(changes(paths)) as watcher:
            await anext(watcher)
            mounted(tmp_path / "config", "two", 10 * number)
            await anext(watcher)
            mounted(tmp_path / "config", "three", 10 * number + 1)
            await anext(watcher)


async def test_a_link_to_another_folder_is_followed(tmp_path: Path) -> None:
    """A link to a profile in another folder, as NVIDIA's config manager has, is watched."""
    profile = mounted(tmp_path / "available", "one")
    chosen = tmp_path / "config.yaml"
    chosen.symlink_to(profile)

    async with aclosing(changes([chosen])) as watcher:
        await anext(watcher)
        mounted(tmp_path / "available", "two", 2)
        await anext(watcher)
        chosen.unlink()
        chosen.symlink_to("/dev/null")
        await anext(watcher)


async def test_other_files_are_ignored(tmp_path: Path) -> None:
    """Changes of other files in the folder do not wake the watcher."""
    file = tmp_path / "metagpu.yaml"
    file.write_text("old", encoding="utf-8")

    other = tmp_path / "other.yaml"

    async with aclosing(changes([file])) as watcher, aclosing(changes([other])) as others:
        await anext(watcher)
        await anext(others)
        async with anyio.create_task_group() as group:
            woken = anyio.Event()

            async def wait() -> None:
                await anext(watcher)
                woken.set()

            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            rewrite(other)
            await anext(others)
            rewrite(other)
            await anext(others)  # by now the first watcher has had time for two changes

            assert not woken.is_set()

            rewrite(file)
            await woken.wait()


def test_every_name_on_the_way_is_watched(tmp_path: Path) -> None:
    """The watched names are the links on the way, the end, and all of a folder of profiles."""
    file = mounted(tmp_path / "config", "one")

    assert names_to_watch([file]) == {
        tmp_path / "config": {"config.yaml", "..data"},
        tmp_path / "config" / "..1": {"config.yaml"},
    }
    assert names_to_watch([tmp_path / "config"]) == {
        tmp_path / "config": {EVERY_NAME},
        tmp_path: {"config"},
    }
    assert names_to_watch([tmp_path / "none" / "config.yaml"]) == {tmp_path: {"none"}}


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    """A link that leads to itself is watched in its own folder."""
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    assert names_to_watch([tmp_path / "a"]) == {tmp_path: {"a", "b"}}


async def test_without_inotify_files_are_polled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without free inotify watches the files are polled."""

    def none() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(config_watch, "Inotify", none)

    async with aclosing(
        changes([tmp_path / "config.yaml"], ConfigWatchTiming(poll=0.01))
    ) as watcher:
        await anext(watcher)
        await anext(watcher)


async def test_no_path_is_nothing_to_watch() -> None:
    """Without a path the watcher waits for ever, as the built-in configuration never changes."""
    assert [each async for each in changes([])] == []
