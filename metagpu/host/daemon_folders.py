"""Folders that containers may write to: never read, emptied, bounded.

These functions block.
"""

import errno
import os
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import Final

from metagpu.core.errors import ProgramError

EMPTY_DEADLINE: Final = 30.0
"""Seconds to empty a folder: a container may write into it faster than it is emptied."""
_BATCH: Final = 1024
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def empty(folder: Path) -> None:
    """Remove the content of a folder; a link is removed, and not followed.

    A container may leave a tree of any depth: folders move up before they are removed, so that
    neither paths nor calls get deep.

    Raises:
        ProgramError: something in the folder cannot be removed, or more is written all the time.
    """
    deadline = time.monotonic() + EMPTY_DEADLINE
    try:
        top = os.open(folder, _FOLDER)
        try:
            while names := _names(top):
                for name in names:
                    # A container may remove or exchange an entry meanwhile.
                    with suppress(FileNotFoundError, NotADirectoryError):
                        _remove(name, top)
                if time.monotonic() > deadline:
                    raise ProgramError(
                        f"{folder} cannot be emptied in {EMPTY_DEADLINE:g} s: a container writes "
                        "into it all the time; end the containers that use it"
                    )
        finally:
            os.close(top)
    except OSError as error:
        # Another user may have left a folder with the sticky bit.
        needed = "; metagpu needs the capability FOWNER" if error.errno == errno.EPERM else ""
        raise ProgramError(f"{folder} cannot be emptied: {error.strerror}{needed}") from error


def is_mounted(folder: Path) -> bool:
    """Return whether something is mounted at a folder, which may be missing."""
    return os.path.ismount(folder)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in islice(entries, _BATCH)]


def _remove(name: str, top: int) -> None:
    """Remove one entry; a folder's folders move to the top, and are removed later."""
    if _unlink(name, top):
        return
    inner = os.open(name, _FOLDER, dir_fd=top)
    try:
        for child in _names(inner):
            if not _unlink(child, inner):
                os.rename(child, token_hex(), src_dir_fd=inner, dst_dir_fd=top)
    finally:
        os.close(inner)
    try:
        os.rmdir(name, dir_fd=top)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # it had more than one batch, or has something new
            raise


def _unlink(name: str, folder: int) -> bool:
    """Remove an entry that is no folder; return whether it is gone."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    return True
