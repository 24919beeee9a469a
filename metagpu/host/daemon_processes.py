"""Processes of our host daemons: identity, command line, environment and end.

These functions block.
"""

import fcntl
import os
import signal
import stat
import struct
from pathlib import Path
from typing import Final

import msgspec

from metagpu.core.contracts.programs import DaemonProcess
from metagpu.host.process import read_identity

_PROC: Final = Path("/proc")
_STATE, _STARTED = 0, 19
"""Fields of /proc/PID/stat behind the name: see proc_pid_stat(5), fields 3 and 22."""
_FLOCK: Final = struct.Struct("hhqqi4x")
"""`struct flock` of fcntl(2) on 64-bit Linux: type, whence, start, length, pid."""
_PID_LENGTH: Final = 20
_GONE: Final = ("Z", "X", "x")


class RunningProcess(msgspec.Struct, frozen=True):
    """A running process, with its command line and environment."""

    process: DaemonProcess
    arguments: tuple[str, ...]
    env: frozenset[str]


def read_process(pid: int) -> RunningProcess | None:
    """Read the process of a pid; `None` if there is none, or it may not be read."""
    folder = _PROC / str(pid)

    try:
        started = _started(pid)
        arguments = _strings(folder / "cmdline")
        env = frozenset(_strings(folder / "environ"))
        if started is None or _started(pid) != started:
            return None  # the pid went to another process meanwhile
    except OSError:
        return None
    return RunningProcess(DaemonProcess(pid, started), arguments, env)


def write_pid(file: Path, pid: int) -> None:
    """Write the number of a daemon's process.

    Raises:
        OSError: the file cannot be written.
    """
    file.write_text(str(pid), encoding="ascii")


def read_pid(file: Path) -> int | None:
    """Read the number that `write_pid` wrote; `None` if there is none."""
    try:
        with file.open("rb") as opened:
            return int(opened.read(_PID_LENGTH))
    except (OSError, ValueError):
        return None


def lock_holder(file: Path) -> int | None:
    """Return the process that has locked a file, as the kernel knows it.

    Containers may write to the file's folder: only a regular file is opened, no link is followed,
    and the content is not read.
    """
    try:
        found = os.open(file, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            return None
        # Exactly this file. A container that has a lease on it would make a plain open wait.
        how = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(f"/proc/self/fd/{found}", how), "rb", buffering=0) as opened:
            whole = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(opened, fcntl.F_GETLK, whole))
    except OSError:
        return None
    finally:
        os.close(found)
    # A lock of an open file, or of a process that this one does not see, has no number.
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None


def is_in_other_container(pid: int, proc: Path = _PROC) -> bool:
    """Return whether a process has ended, or is in another pod's container.

    A process can choose its name, arguments and environment, but not its container.
    """
    identity, own = read_identity(proc, pid), read_identity(proc, os.getpid())
    return identity is None or identity.container not in (None, own and own.container)


def open_pidfd(process: DaemonProcess) -> int | None:
    """Open a descriptor of exactly this process; `None` if it has ended.

    The descriptor is readable once the process has ended. A signal through it reaches no other
    process.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None

    # The descriptor's process cannot change any more, so its start time is valid now.
    if _started(process.pid) != process.started:
        os.close(descriptor)
        return None
    return descriptor


def kill(descriptor: int) -> None:
    """Send SIGKILL to the process of a descriptor; an ended process is no error.

    Raises:
        OSError: the kernel refuses.
    """
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return


def reap(process: DaemonProcess) -> None:
    """Reap an ended child process; as PID 1, this process also gets orphans."""
    try:
        os.waitpid(process.pid, os.WNOHANG)
    except ChildProcessError:
        return


def _started(pid: int) -> int | None:
    """Return the start time of the process of a pid; `None` if it has ended."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name is in brackets, and may have brackets and spaces itself.
    fields = stat.rpartition(")")[2].split()
    return None if fields[_STATE] in _GONE else int(fields[_STARTED])


def _strings(file: Path) -> tuple[str, ...]:
    text = file.read_bytes().decode(errors="surrogateescape")
    return tuple(text.split("\0")[:-1])
