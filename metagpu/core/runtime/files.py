"""The identity of files, their replacement, and their mounts."""

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


def is_noexec(folder: Path, proc: Path = Path("/proc")) -> bool:
    """Return whether no program starts from a folder, here or on the host; blocks.

    A container's mount does not show the flag of the host's, which the first process sees.
    """
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return True
    try:
        lines = (proc / "1/mountinfo").read_bytes().split(b"\n")
    except OSError:
        return False  # without the host's processes it would be a container's too
    mounts = [line.split(b" ")[4:6] for line in lines if line]
    # The last of equal points is on top. Octal codes stand for spaces (proc_pid_mountinfo(5)).
    points = {point.decode("unicode_escape").encode("latin-1"): flags for point, flags in mounts}
    around = [point for point in points if folder.is_relative_to(os.fsdecode(point))]
    return b"noexec" in points.get(max(around, key=len, default=b""), b"").split(b",")


def _create(path: Path) -> int:
    """Open a file for writing, without its previous content."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _MODE)
