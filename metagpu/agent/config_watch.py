"""A watch of configuration files that notices every way of changing one.

An editor writes the file again or renames another file over it. Kubernetes replaces the link
`..data` of a mounted ConfigMap, so that the files themselves never change. NVIDIA's config manager
replaces a link to the file. So the watch covers every link on the way, and the file.
"""

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog
from anyio import to_thread
from asyncinotify import Inotify, Mask

from metagpu.core.errors import describe_error

EVERY_NAME: Final = "*"
"""All names of a folder."""
_MOST_LINKS: Final = 40
"""Links that Linux follows on the way to a file."""
_EVENTS: Final = (
    Mask.CREATE
    | Mask.CLOSE_WRITE
    | Mask.MOVED_TO
    | Mask.MOVED_FROM
    | Mask.DELETE
    | Mask.DELETE_SELF
    | Mask.MOVE_SELF
)

log = structlog.get_logger()


class ConfigWatchTiming(msgspec.Struct, frozen=True):
    """Seconds.

    Attributes:
        quiet: without another event, after which a change counts as complete.
        longest: after which a folder that never rests is read nevertheless.
        poll: between two reads where inotify is not available.
    """

    quiet: float = 0.05
    longest: float = 1.0
    poll: float = 30.0


async def changes(
    paths: Sequence[Path],
    timing: ConfigWatchTiming = ConfigWatchTiming(),  # noqa: B008 - frozen
) -> AsyncGenerator[None, None]:
    """Yield at once, and then whenever the files may have changed; never end.

    A yield is no promise of a difference: the reader compares.
    """
    logged = False

    while paths:
        try:
            with Inotify() as inotify:
                watched = await to_thread.run_sync(names_to_watch, tuple(paths))
                for folder in watched:
                    _add(inotify, folder)
                yield None  # for a change before the watch began
                await _wait_change(inotify, watched, timing)
        except OSError as error:
            if not logged:
                logged = True
                fix = "raise fs.inotify.max_user_instances, or reload by SIGHUP"
                log.warning(
                    "inotify failed; files are polled", error=describe_error(error), fix=fix
                )
            yield None
            await anyio.sleep(timing.poll)


async def _wait_change(
    inotify: Inotify, watched: Mapping[Path, AbstractSet[str]], timing: ConfigWatchTiming
) -> None:
    """Wait for an event of a watched name, and then for quiet, but not for long."""
    async for event in inotify:
        names = watched.get(event.watch.path, frozenset()) if event.watch else frozenset()
        if event.name is None or EVERY_NAME in names or event.name.name in names:
            break

    with anyio.move_on_after(timing.longest):
        while True:
            with anyio.move_on_after(timing.quiet) as quiet:
                await inotify.get()
            if quiet.cancelled_caught:
                return


def names_to_watch(paths: Sequence[Path]) -> Mapping[Path, AbstractSet[str]]:
    """Find the folders, and the names in them, that decide where these paths lead.

    The names are those of the links on the way, of the file, or of the missing part; of a folder
    of profiles `EVERY_NAME`.
    """
    found: dict[Path, set[str]] = {}

    for path in paths:
        here: Path | None = Path(os.path.abspath(path))  # noqa: PTH100 - `resolve` follows links
        for _ in range(_MOST_LINKS):
            if here is None:
                break
            if here.is_dir():
                found.setdefault(here, set()).add(EVERY_NAME)
            link = _first_link(here)
            found.setdefault(link.parent, set()).add(link.name)
            here = _follow_link(link, here)
    return found


def _first_link(path: Path) -> Path:
    """Return the first part of a path that is a link or missing, or else the path."""
    parts = (*reversed(path.parents), path)
    return next((part for part in parts if part.is_symlink() or not part.exists()), path)


def _follow_link(link: Path, path: Path) -> Path | None:
    """Return the path with its link followed by one step; `None` without a link."""
    if not link.is_symlink():
        return None
    target = Path(os.path.abspath(link.parent / link.readlink()))  # noqa: PTH100 - as above
    return target / path.relative_to(link)


def _add(inotify: Inotify, folder: Path) -> None:
    # A folder that is gone since then has a watched parent, or is looked for again.
    with suppress(FileNotFoundError):
        inotify.add_watch(folder, _EVENTS)
