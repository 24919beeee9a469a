"""Configuration files, watched: whoever changes one, by whatever way, is heard.

An editor writes a file anew or renames one over it; Kubernetes exchanges the link `..data` of a
mounted ConfigMap, so that the files themselves never change; NVIDIA's config manager exchanges a
link to the file. So every link on the way is watched, and the file.
"""

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio import to_thread
from asyncinotify import Inotify, Mask

from metagpu.core.errors import why

SETTLE: Final = 0.05
"""Seconds without another event after which a change is taken to be complete."""
LONGEST: Final = 1.0
"""Seconds after which a folder that never rests is read nevertheless."""
EVERY: Final = "*"
"""Stands for all names of a folder."""
BLIND: Final = 30.0
"""Seconds between two looks where the kernel does not tell."""
_MOST_LINKS: Final = 40
"""Links that Linux follows on the way to a file."""
_WHAT: Final = (
    Mask.CREATE
    | Mask.CLOSE_WRITE
    | Mask.MOVED_TO
    | Mask.MOVED_FROM
    | Mask.DELETE
    | Mask.DELETE_SELF
    | Mask.MOVE_SELF
)

log = structlog.get_logger()


async def changes(paths: Sequence[Path]) -> AsyncGenerator[None, None]:
    """Say, first at once, that what the paths lead to may have changed; for ever.

    A yield is no promise that anything differs: the reader compares.
    """
    told = False

    while paths:
        try:
            with Inotify() as inotify:
                watched = await to_thread.run_sync(places, tuple(paths))
                for folder in watched:
                    _add(inotify, folder)
                yield None  # what changed before the watch began is seen now
                await _news(inotify, watched)
        except OSError as error:
            if not told:
                told = True
                mend = "raise fs.inotify.max_user_instances, or reload by SIGHUP"
                log.warning("no inotify: changes are seen late", error=why(error), mend=mend)
            yield None
            await anyio.sleep(BLIND)


async def _news(inotify: Inotify, watched: Mapping[Path, AbstractSet[str]]) -> None:
    """Wait for an event that concerns us, and then for quiet, but not for long."""
    async for event in inotify:
        names = watched.get(event.watch.path, frozenset()) if event.watch else frozenset()
        if event.name is None or EVERY in names or event.name.name in names:
            break

    with anyio.move_on_after(LONGEST):
        while True:
            with anyio.move_on_after(SETTLE) as quiet:
                await inotify.get()
            if quiet.cancelled_caught:
                return


def places(paths: Sequence[Path]) -> Mapping[Path, AbstractSet[str]]:
    """Find the folders, and the names in them, that decide where these paths lead.

    These are the links on the way, the file itself, or what is missing; of a folder of profiles
    `EVERY` name.
    """
    found: dict[Path, set[str]] = {}

    for path in paths:
        here: Path | None = Path(os.path.abspath(path))  # noqa: PTH100 - `resolve` follows links
        for _ in range(_MOST_LINKS):
            if here is None:
                break
            if here.is_dir():
                found.setdefault(here, set()).add(EVERY)
            turn = _turn(here)
            found.setdefault(turn.parent, set()).add(turn.name)
            here = _beyond(turn, here)
    return found


def _turn(path: Path) -> Path:
    """Find the first part of a path that is a link or missing, or else the whole."""
    parts = (*reversed(path.parents), path)
    return next((part for part in parts if part.is_symlink() or not part.exists()), path)


def _beyond(link: Path, path: Path) -> Path | None:
    """Give the path with one of its links followed by one step; `None` if that is no link."""
    if not link.is_symlink():
        return None
    target = Path(os.path.abspath(link.parent / link.readlink()))  # noqa: PTH100 - as above
    return target / path.relative_to(link)


def _add(inotify: Inotify, folder: Path) -> None:
    # A folder that is gone since has a parent that is watched too, or is looked for again.
    with suppress(FileNotFoundError):
        inotify.add_watch(folder, _WHAT)
