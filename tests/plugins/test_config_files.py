"""Configuration files, watched: whatever way a file changes, it is heard."""

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest

from metagpu.plugins import config_files
from metagpu.plugins.config_files import EVERY, changes, places


def mounted(folder: Path, text: str, generation: int = 1) -> Path:
    """Make, or exchange, what Kubernetes mounts of a ConfigMap: the file stays, `..data` moves."""
    data = folder / f"..{generation}"
    data.mkdir(parents=True)
    (data / "config.yaml").write_text(text, encoding="utf-8")
    (folder / "..tmp").symlink_to(data.name)
    (folder / "..tmp").rename(folder / "..data")
    if not (folder / "config.yaml").is_symlink():
        (folder / "config.yaml").symlink_to("..data/config.yaml")
    return folder / "config.yaml"


def rewritten(path: Path) -> None:
    """Write a file anew."""
    path.write_text("new", encoding="utf-8")


def replaced(path: Path) -> None:
    """Rename another file over it, as editors do."""
    beside = path.with_name("beside")
    beside.write_text("new", encoding="utf-8")
    beside.rename(path)


def removed(path: Path) -> None:
    """Take it away."""
    path.unlink()


@pytest.mark.parametrize("change", [rewritten, replaced, removed])
async def test_a_file_that_changes_is_heard(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """Written anew, replaced or removed: each is heard."""
    file = tmp_path / "metagpu.yaml"
    file.write_text("old", encoding="utf-8")

    async with aclosing(changes([file])) as heard:
        await anext(heard)
        change(file)
        await anext(heard)


async def test_a_file_may_come_later(tmp_path: Path) -> None:
    """A file, and the folders above it, that do not exist yet are waited for."""
    file = tmp_path / "etc" / "metagpu" / "config.yaml"

    async with aclosing(changes([file])) as heard:
        await anext(heard)
        file.parent.mkdir(parents=True)
        await anext(heard)
        file.write_text("new", encoding="utf-8")
        await anext(heard)


async def test_an_exchanged_config_map_is_heard(tmp_path: Path) -> None:
    """The links of a mounted ConfigMap are followed: the exchange is heard each time."""
    file = mounted(tmp_path / "config", "one")
    direct, folder = [file], [file.parent]

    for number, paths in enumerate((direct, folder), start=2):
        async with aclosing(changes(paths)) as heard:
            await anext(heard)
            mounted(tmp_path / "config", "two", 10 * number)
            await anext(heard)
            mounted(tmp_path / "config", "three", 10 * number + 1)
            await anext(heard)


async def test_a_link_to_another_folder_is_followed(tmp_path: Path) -> None:
    """A link as NVIDIA's config manager makes it, to a profile elsewhere, is heard at both ends."""
    profile = mounted(tmp_path / "available", "one")
    chosen = tmp_path / "config.yaml"
    chosen.symlink_to(profile)

    async with aclosing(changes([chosen])) as heard:
        await anext(heard)
        mounted(tmp_path / "available", "two", 2)
        await anext(heard)
        chosen.unlink()
        chosen.symlink_to("/dev/null")
        await anext(heard)


async def test_other_files_are_not_heard(tmp_path: Path) -> None:
    """What else happens in the folder wakes nobody."""
    file = tmp_path / "metagpu.yaml"
    file.write_text("old", encoding="utf-8")

    other = tmp_path / "other.yaml"

    async with aclosing(changes([file])) as heard, aclosing(changes([other])) as others:
        await anext(heard)
        await anext(others)
        async with anyio.create_task_group() as group:
            woken = anyio.Event()

            async def wait() -> None:
                await anext(heard)
                woken.set()

            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            rewritten(other)
            await anext(others)
            rewritten(other)
            await anext(others)  # by now the first would have been heard twice over

            assert not woken.is_set()

            rewritten(file)
            await woken.wait()


def test_what_decides_where_a_path_leads(tmp_path: Path) -> None:
    """The names watched are the links on the way, the end, and all of a folder of profiles."""
    file = mounted(tmp_path / "config", "one")

    assert places([file]) == {
        tmp_path / "config": {"config.yaml", "..data"},
        tmp_path / "config" / "..1": {"config.yaml"},
    }
    assert places([tmp_path / "config"]) == {
        tmp_path / "config": {EVERY},
        tmp_path: {"config"},
    }
    assert places([tmp_path / "none" / "config.yaml"]) == {tmp_path: {"none"}}


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    """A link that leads to itself is watched where it stands."""
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    assert places([tmp_path / "a"]) == {tmp_path: {"a", "b"}}


async def test_without_inotify_it_is_looked_at_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel has no more watches, files are read every so often."""

    def none() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(config_files, "Inotify", none)
    monkeypatch.setattr(config_files, "BLIND", 0.01)

    async with aclosing(changes([tmp_path / "config.yaml"])) as heard:
        await anext(heard)
        await anext(heard)


async def test_no_path_is_nothing_to_watch() -> None:
    """The built-in configuration never changes."""
    assert [each async for each in changes([])] == []
