"""The identity of files."""

from pathlib import Path


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
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: CDI's library notices a rename within the folder, not a move into it.
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    fresh.chmod(0o644)
    fresh.replace(path)
