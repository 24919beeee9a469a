"""The kernel's account of a process, in /proc.

These functions block. `None` means that the process has ended, or is hidden from this one.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from metagpu.core.contracts.host import ProcessDetails, ProcessIdentity
from metagpu.host.cgroups import DEFAULT_ROOT, find_container

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_FILE_LIMIT: Final = 65536
_COMMAND_LIMIT: Final = 4096
"""Bytes of a command line that are read: a process may make its own very long."""

_OF_STATUS: Final = ("Name:", "Uid:", "NSpid:")
"""The used ones of the sixty lines of /proc/PID/status."""

# Fields of /proc/PID/stat behind the command's name, which may have any bytes (proc_pid_stat(5)).
_UTIME, _STIME, _STARTED, _RESIDENT = 11, 12, 19, 21


def read_identity(proc: Path, pid: int, cgroups: Path = DEFAULT_ROOT) -> ProcessIdentity | None:
    """Read the identity of the process that has a pid now."""
    try:
        with _opened(proc, pid) as folder:
            container = find_container(_cgroup(folder), cgroups)
            return ProcessIdentity(pid, int(_stat(folder)[_STARTED]), container)
    except OSError:
        return None


def read_process_details(proc: Path, who: ProcessIdentity, booted: float) -> ProcessDetails | None:
    """Read a process's details; `booted` is the boot time in seconds since the epoch."""
    try:
        with _opened(proc, who.pid) as folder:
            stat = _stat(folder)
            if int(stat[_STARTED]) != who.started:
                return None
            status = _status(folder)
            command = _read(folder, "cmdline", _COMMAND_LIMIT).rstrip(b"\0").split(b"\0")
    except OSError:
        return None

    return ProcessDetails(
        inner_pid=int(status.get("NSpid", str(who.pid)).split()[-1]),
        uid=int(status["Uid"].split()[0]),
        command=_decode(command) or (f"[{status['Name']}]",),
        started_at=booted + who.started / _TICKS,
        memory=int(stat[_RESIDENT]) * _PAGE,
        cpu=(int(stat[_UTIME]) + int(stat[_STIME])) / _TICKS,
    )


def ticks_since_boot() -> int:
    """Return the present moment as the kernel counts the start of a process."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)


def read_boot_time(proc: Path) -> float:
    """Read the machine's boot time, in seconds since the epoch.

    Raises:
        OSError: there is no /proc.
    """
    for line in (proc / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0


@contextmanager
def _opened(proc: Path, pid: int) -> Iterator[int]:
    """Open one process's folder: reads below it never reach a process of the same pid."""
    folder = os.open(f"{proc}/{pid}", os.O_PATH | os.O_DIRECTORY)  # a Path takes as long again

    try:
        yield folder
    finally:
        os.close(folder)


def _read(folder: int, name: str, limit: int = _FILE_LIMIT) -> bytes:
    file = os.open(name, os.O_RDONLY, dir_fd=folder)

    try:
        return os.read(file, limit)
    finally:
        os.close(file)


def _stat(folder: int) -> list[bytes]:
    return _read(folder, "stat").rpartition(b")")[2].split()


def _cgroup(folder: int) -> str:
    return _read(folder, "cgroup").decode(errors="replace")


def _status(folder: int) -> dict[str, str]:
    lines = _read(folder, "status").decode(errors="replace").split("\n")
    wanted = (line.partition(":") for line in lines if line.startswith(_OF_STATUS))
    return {name: value.strip() for name, _, value in wanted}


def _decode(command: list[bytes]) -> tuple[str, ...]:
    return tuple(part.decode(errors="replace") for part in command) if command != [b""] else ()
