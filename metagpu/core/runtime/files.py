"""The identity of files."""

import os
from pathlib import Path
from typing import Final

_MODE: Final = 0o644


def file_identity(path: Path) -> tuple[int, int, int] | None:
    """Return a file's device, inode and modification time; `None` without a file.

    The inode number alone is reused at once when a kubelet restarts. The modification time of a
    socket is its creation time: unlike the change time, it survives a chmod.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically; blocks.

    A reader sees the old or the new text, never a part.
    """
    # In the same folder: CDI's library notices a rename within the folder, not a move into it.
    fresh = path.with_name(f".{path.name}.new")
    try:
        descriptor = _create(fresh)
    except (FileNotFoundError, NotADirectoryError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _create(fresh)
    # Unbuffered: each call to the system makes this thread wait for the event loop's.
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        os.fchmod(descriptor, _MODE)
        left = memoryview(text.encode())
        while left:
            left = left[file.write(left) :]
    fresh.replace(path)


def _create(path: Path) -> int:
    """Open a file for writing, without its previous content."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _MODE)
