"""Processes of the host that we keep: who they are, what they were started as, how they end.

These functions block.
"""

import os
import signal
from pathlib import Path
from typing import Final

import msgspec

from metagpu.core.companions import Process
from metagpu.host.process import read_identity

_PROC: Final = Path("/proc")
_STATE, _STARTED = 0, 19
"""Fields of /proc/PID/stat behind the name: see proc_pid_stat(5), fields 3 and 22."""
_GONE: Final = ("Z", "X", "x")


class Running(msgspec.Struct, frozen=True):
    """A process that runs: which it is, and what it was started as."""

    process: Process
    arguments: tuple[str, ...]
    env: frozenset[str]


def read(pid: int) -> Running | None:
    """Read what the process of a number is; `None` if none runs or it may not be read."""
    folder = _PROC / str(pid)

    try:
        started = _started(pid)
        arguments = _strings(folder / "cmdline")
        env = frozenset(_strings(folder / "environ"))
        if started is None or _started(pid) != started:
            return None  # the number went to another process while we read
    except OSError:
        return None
    return Running(Process(pid, started), arguments, env)


def is_elsewhere(pid: int, proc: Path = _PROC) -> bool:
    """Tell whether a process runs in a pod's container that is not our own, or is gone.

    Name, arguments and environment of a process are its own to choose; where it runs is not.
    """
    who, we = read_identity(proc, pid), read_identity(proc, os.getpid())
    return who is None or who.container not in (None, we and we.container)


def opened(process: Process) -> int | None:
    """Open a descriptor of exactly this process; `None` if it has ended.

    It is readable once the process has ended, and a signal sent through it reaches nobody else.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None

    # What the descriptor stands for cannot change any more: so look now who that is.
    if _started(process.pid) != process.started:
        os.close(descriptor)
        return None
    return descriptor


def kill(descriptor: int) -> None:
    """Send SIGKILL to the process that a descriptor stands for; one that has ended is no matter.

    Raises:
        OSError: if we may not.
    """
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return


def buried(process: Process) -> None:
    """Take note of the end of a process that was left to us, as orphans are to PID 1."""
    try:
        os.waitpid(process.pid, os.WNOHANG)
    except ChildProcessError:
        return


def _started(pid: int) -> int | None:
    """Read when the process of a number began; `None` if it has ended."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name stands in brackets and may have brackets and spaces in it.
    fields = stat.rpartition(")")[2].split()
    return None if fields[_STATE] in _GONE else int(fields[_STARTED])


def _strings(file: Path) -> tuple[str, ...]:
    text = file.read_bytes().decode(errors="surrogateescape")
    return tuple(text.split("\0")[:-1])
