"""Processes of this host, in /proc: identity, details, end; own open files.

These functions block. `None` means that a process has ended, or is hidden from this one.
"""

import errno
import fcntl
import os
import resource
import select
import signal
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from metagpu.core.contracts.host import Peer, ProcessDetails, ProcessIdentity
from metagpu.core.contracts.programs import DaemonProcess
from metagpu.host.containers import DEFAULT_ROOT, find_container

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_FILE_LIMIT: Final = 65536
_COMMAND_LIMIT: Final = 4096
"""Bytes of a command line that are read: a process may make its own very long."""

_OF_STATUS: Final = ("Name:", "Uid:", "NSpid:")
"""The used ones of the sixty lines of /proc/PID/status."""

# Fields of /proc/PID/stat behind the command's name, which may have any bytes (proc_pid_stat(5)).
_STATE, _FLAGS, _UTIME, _STIME, _THREADS, _STARTED, _RESIDENT = 0, 6, 11, 12, 17, 19, 21
_ZOMBIE: Final = b"Z"
_EXITING: Final = 0x4
"""PF_EXITING of Linux' sched.h, among the flags of a thread."""
_RETRY_TIME: Final = 0.05
"""Seconds after which the threads of a process without its first one are not listed again."""


def read_identity(proc: Path, pid: int, cgroups: Path = DEFAULT_ROOT) -> ProcessIdentity | None:
    """Read the identity of the process that has a pid now."""
    try:
        with _opened(proc, pid) as folder:
            stat = _stat(folder)
            container = find_container(_cgroup(folder, stat), cgroups)
            return ProcessIdentity(pid, int(stat[_STARTED]), container)
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


def _stat(folder: int, name: str = "stat") -> list[bytes]:
    return _read(folder, name).rpartition(b")")[2].split()


def _ends(tasks: int, thread: str) -> bool:
    return bool(int(_stat(tasks, f"{thread}/stat")[_FLAGS]) & _EXITING)


def _cgroup(folder: int, stat: list[bytes]) -> str:
    """Read the cgroups of a process, or of a thread where the first one has ended.

    The kernel shows what ends in the root of each hierarchy of cgroup v1, and in its place in v2.
    Threads may end as fast as they are found: a text counts if its thread lives after it was read.

    Raises:
        OSError: the process has threads, and none lived long enough.
    """
    own = _read(folder, "cgroup").decode(errors="replace")
    if stat[_STATE] != _ZOMBIE or (own.startswith("0::") and own.count("\n") == 1):
        return own
    deadline = time.monotonic() + _RETRY_TIME
    tasks = os.open("task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    try:
        while True:
            for thread in os.listdir(tasks):  # noqa: PTH208 - of a descriptor
                with suppress(OSError):
                    if not _ends(tasks, thread):
                        text = _read(tasks, f"{thread}/cgroup")
                        if not _ends(tasks, thread):
                            return text.decode(errors="replace")
            now = _stat(folder)
            if now[_STATE] == _ZOMBIE and int(now[_THREADS]) == 1:
                return own
            if time.monotonic() > deadline:
                raise ProcessLookupError(errno.ESRCH, "no thread lived long enough to be read")
    finally:
        os.close(tasks)


def _status(folder: int) -> dict[str, str]:
    lines = _read(folder, "status").decode(errors="replace").split("\n")
    wanted = (line.partition(":") for line in lines if line.startswith(_OF_STATUS))
    return {name: value.strip() for name, _, value in wanted}


def _decode(command: list[bytes]) -> tuple[str, ...]:
    return tuple(part.decode(errors="replace") for part in command) if command != [b""] else ()


_PROC: Final = Path("/proc")
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


def read_peer(proc: Path, peer: Peer, cgroups: Path = DEFAULT_ROOT) -> ProcessIdentity | None:
    """Return the identity of a peer; `None` if its process has ended or is hidden."""
    identity = read_identity(proc, peer.pid, cgroups)
    # The identity is this process's only if the process kept its pid meanwhile.
    return identity if is_running(peer.pidfd) else None


def is_running(process: int) -> bool:
    """Return whether a process runs: its pidfd is readable once it has ended."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return not poll.poll(0)


ENOUGH: Final = 2048
"""Open files with room: crowds at every port of a daemon have some 900, of the webhook 1100."""
NEEDED: Final = 128
"""With fewer, some of the sockets cannot be opened."""

log = structlog.get_logger()


def raise_file_limit() -> None:
    """Raise the limit as far as it is needed and allowed; report one that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft != resource.RLIM_INFINITY and soft < NEEDED:
        log.error(
            "too few open files allowed",
            limit=soft,
            needed=NEEDED,
            effect="sockets cannot be opened: shares may not be offered at all",
            fix=f"start metagpu with a limit of {ENOUGH} (systemd: LimitNOFILE={ENOUGH})",
        )
