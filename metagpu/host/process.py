"""What the kernel says about a process.

These functions block. `None` means that it is gone, or not ours to see.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from metagpu.core.host import Identity, Particulars
from metagpu.host.cgroups import container_in

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_FILE_LIMIT: Final = 65536
_COMMAND_LIMIT: Final = 4096
"""Bytes of a command line that are told: a process may make its own as long as it likes."""

_OF_STATUS: Final = ("Name:", "Uid:", "NSpid:")
"""What is used of the sixty lines of /proc/PID/status."""

# Places in /proc/PID/stat behind the command's name, which may hold anything (proc_pid_stat(5)).
_UTIME, _STIME, _STARTED, _RESIDENT = 11, 12, 19, 21


def read_identity(proc: Path, pid: int) -> Identity | None:
    """Read who has a pid now."""
    try:
        with _opened(proc, pid) as folder:
            return Identity(pid, int(_stat(folder)[_STARTED]), container_in(_cgroup(folder)))
    except OSError:
        return None


def read_particulars(proc: Path, who: Identity, booted: float) -> Particulars | None:
    """Read what people want to know of a process; `booted` is seconds since the epoch."""
    try:
        with _opened(proc, who.pid) as folder:
            stat = _stat(folder)
            if int(stat[_STARTED]) != who.started:
                return None
            status = _status(folder)
            command = _read(folder, "cmdline", _COMMAND_LIMIT).rstrip(b"\0").split(b"\0")
    except OSError:
        return None

    return Particulars(
        inner_pid=int(status.get("NSpid", str(who.pid)).split()[-1]),
        uid=int(status["Uid"].split()[0]),
        command=_told(command) or (f"[{status['Name']}]",),
        started_at=booted + who.started / _TICKS,
        memory=int(stat[_RESIDENT]) * _PAGE,
        cpu=(int(stat[_UTIME]) + int(stat[_STIME])) / _TICKS,
    )


def read_boot_time(proc: Path) -> float:
    """Read when this machine was started, in seconds since the epoch.

    Raises:
        OSError: if there is no /proc.
    """
    for line in (proc / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0


@contextmanager
def _opened(proc: Path, pid: int) -> Iterator[int]:
    """Hold on to one process: what is read below its folder is its own, whoever gets its pid."""
    folder = os.open(proc / str(pid), os.O_PATH | os.O_DIRECTORY)

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
    lines = _read(folder, "status").decode(errors="replace").splitlines()
    wanted = (line.partition(":") for line in lines if line.startswith(_OF_STATUS))
    return {name: value.strip() for name, _, value in wanted}


def _told(command: list[bytes]) -> tuple[str, ...]:
    return tuple(part.decode(errors="replace") for part in command) if command != [b""] else ()
