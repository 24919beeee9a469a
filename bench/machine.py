"""The machine of a run, and the kernel's counters of a process."""

import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = ("metagpu", "grpclib", "h2", "betterproto2", "anyio", "msgspec", "grpcio")
_CPUCLOCK_SCHED = 2
"""The kernel's number for the clock that counts a process's time on a CPU."""


def describe() -> dict[str, Any]:
    """Return the facts on which the numbers depend."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _DISTRIBUTIONS},
    }


def busy() -> bool:
    """Return whether other processes use the machine, which makes times unreliable."""
    return os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)


def resident(pid: int) -> float:
    """Return a process's resident memory (VmRSS) in MB of 1024 kB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def resident_of_tree(pid: int) -> float:
    """Return the resident memory of a process and of its children, in MB of 1024 kB."""
    return resident(pid) + sum(map(resident, _children(pid)))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, in seconds.

    The clock has nanoseconds; /proc/PID/stat counts in steps of 10 ms, too coarse for an idle
    process.
    """
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def cpu_seconds_of_tree(pid: int) -> float:
    """Return the CPU time of a process and of its children that run, in seconds."""
    spent = cpu_seconds(pid)
    for child in _children(pid):
        with suppress(OSError):  # it has ended meanwhile
            spent += cpu_seconds(child)
    return spent


def _children(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            yield from map(int, file.read_text().split())


def _cpu() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found[1] if found else platform.machine()
