"""Leftovers of the daemon in folders of this host, and their removal.

Only what metagpu makes is removed, by its name: a run folder may be anybody's folder.
These functions block.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Final

from anyio import to_thread

from metagpu.core.contracts.leftovers import Leftover
from metagpu.core.errors import LeftoverInUse
from metagpu.host.service import UNITS, FileState, ServiceFile

_ENABLED: Final = UNITS / "multi-user.target.wants" / "metagpu.service"


def leftover(
    kind: str, path: Path, remove: Callable[[], object], stays: str = "", *, forced: bool = False
) -> Leftover:
    """Return a leftover at a path, whose removal blocks."""

    async def run() -> None:
        await to_thread.run_sync(remove)

    return Leftover(kind, str(path), run, stays, forced)


def find_sockets(kubelet_dir: Path) -> Iterator[Leftover]:
    """Find the sockets of killed daemons in the kubelet's folder."""
    for path in sorted(kubelet_dir.glob("metagpu-*.sock")):
        yield leftover("socket", path, path.unlink)


def find_dead_socket(path: Path) -> Iterator[Leftover]:
    """Find a socket that nobody serves: another program may have put its own there."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            yield leftover("socket", path, path.unlink)
        except OSError:
            return  # there is none


def find_file(kind: str, path: Path, stays: str = "") -> Iterator[Leftover]:
    """Find one file."""
    if path.exists():
        yield leftover(kind, path, path.unlink, stays, forced=True)


def find_folder(
    kind: str, folder: Path, names: Sequence[str], stays: str = "", *, with_parent: bool = False
) -> Iterator[Leftover]:
    """Find a folder of metagpu's that has the entries `names`; others keep the folder.

    With its parent, if that is empty then.
    """
    present = [folder / name for name in names if (folder / name).exists()]
    parent = folder.parent if with_parent else None
    if present or (folder.is_dir() and not any(folder.iterdir())):
        remove = partial(_remove_entries, folder, present, parent)
        yield leftover(kind, folder, remove, stays, forced=True)


def find_service(files: Sequence[ServiceFile], root: Path) -> Iterator[Leftover]:
    """Find the files of the service; those that an operator has changed stay."""
    for file in files:
        match file.state:
            case FileState.SAME:
                yield leftover("service file", file.path, partial(_remove_service_file, file.path))
            case FileState.CHANGED:
                yield leftover("service file", file.path, file.path.unlink, "it was changed here")
    link = root / _ENABLED
    if link.is_symlink():
        yield leftover("service file", link, link.unlink)


def _remove_service_file(path: Path) -> None:
    path.unlink()
    if path.parent.name in {"metagpu", "metagpu.service.d"}:
        with suppress(OSError):  # it has files of others
            path.parent.rmdir()


def _remove_entries(folder: Path, present: Sequence[Path], parent: Path | None) -> None:
    for entry in present:
        if entry.is_dir() and not entry.is_symlink():
            # Links to programs may go; a folder in it is that of a control daemon.
            if inner := [
                file.name for file in entry.iterdir() if file.is_dir() and not file.is_symlink()
            ]:
                raise LeftoverInUse(f"{entry} is used, for {', '.join(inner)}")
            for link in entry.iterdir():
                link.unlink()
            entry.rmdir()
        else:
            entry.unlink(missing_ok=True)
    for each in (folder, parent):
        if each is not None:
            with suppress(OSError):  # it has files of others, or is a mount of this container
                each.rmdir()
