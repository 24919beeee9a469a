"""The file by which a daemon that waits for the node shows itself."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

STANDBY_FILE: Final = "standby.json"
_SIZE_LIMIT: Final = 65536
"""Bytes that are read."""


class Standby(msgspec.Struct, frozen=True):
    """A daemon that waits for the node.

    Attributes:
        problems: why it is not ready to take the node; none if it is.
    """

    version: str = ""
    problems: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        """True if it takes the node as soon as nobody has it."""
        return not self.problems


class StandbyFile:
    """Shows a daemon that waits, as long as its file is locked.

    The kernel unlocks it at any end of the process. The file is a help, never a need: a daemon that
    cannot write it takes the node as well, and the old one stops idle MPS daemons.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STANDBY_FILE
        self._file: int | None = None
        self._shown: Standby | None = None

    def show(self, standby: Standby) -> None:
        """Write a state, unless another daemon that waits has the file. Blocks."""
        if self._file is not None and not self._is_at_path(self._file):
            self.close()  # somebody has removed the run folder
        if self._file is None:
            self._file = self._open()
        if self._file is None or standby == self._shown:
            return
        content = msgspec.json.encode(standby)
        self._shown = None
        try:
            # Empty if the disk is full: a daemon without a state counts as one that is not ready.
            os.ftruncate(self._file, 0)
            if os.pwrite(self._file, content, 0) == len(content):
                self._shown = standby
        except OSError:
            pass  # the next call tries again

    def close(self) -> None:
        """Unlock the file: this daemon waits no more."""
        if self._file is not None:
            os.close(self._file)
        self._file = self._shown = None

    def _open(self) -> int | None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            file = os.open(self._path, flags, 0o600)
        except OSError:
            return None  # the control socket in the same folder reports it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)  # its text is an earlier daemon's
        except OSError:
            os.close(file)
            return None
        return file

    def _is_at_path(self, file: int) -> bool:
        with suppress(OSError):
            return os.path.samestat(self._path.stat(), os.fstat(file))
        return False


def read_standby(folder: Path) -> Standby | None:
    """Return the daemon that waits for the node of a run folder, `None` without one."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(folder / STANDBY_FILE, flags)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _decode(os.pread(file, _SIZE_LIMIT, 0))
    except OSError:
        return None
    finally:
        os.close(file)
    return None


def _decode(content: bytes) -> Standby:
    try:
        return msgspec.json.decode(content, type=Standby)
    except msgspec.MsgspecError:
        return Standby(problems=("it has just started",))
