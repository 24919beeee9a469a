"""Callers: what the kernel knows of the process at the other end of a connection."""

import errno
import os
import re
import socket
import struct
from contextlib import suppress

CGROUPS = "/sys/fs/cgroup"

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid and gid (unix(7)); the pid is 0 where the process is hidden."""
_SO_PEERPIDFD = 77
"""asm-generic/socket.h, since Linux 6.5: a pidfd of the very process, however its pid is reused."""
_LONGEST = 65536
_POD = re.compile(rb"(?P<folder>/.*?(?P<pod>pod[0-9a-f_-]{32,36})[^/]*)")
"""The folder of a pod in a line of `/proc/PID/cgroup`."""
_USER = re.compile(rb"user(\.slice|@)")
"""Cgroups of users of the host, by the names that systemd gives them."""


def pid_of(caller: socket.socket) -> int:
    """Return the pid of a caller, 0 where its process is hidden."""
    credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[0])


def open_pidfd(caller: socket.socket, pid: int) -> int:
    """Open a caller's pidfd; before Linux 6.5, of the process that has its pid now.

    Raises:
        OSError: the process has ended.
    """
    try:
        return caller.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        return os.pidfd_open(pid)


def group_of(proc: str, pid: int, cgroups: str = CGROUPS) -> bytes:
    """Return the group of a process, whose turns it takes; never whose answer it gets.

    A group is a pod, by a cgroup that root alone can make: its folder belongs to root. All other
    processes are one group with an empty name, as those of a user of the host, who makes cgroups of
    any name below the user's own. Where the folder is not visible, systemd's names of users decide.
    """
    try:
        with open(f"{proc}/{pid}/cgroup", "rb", buffering=0) as file:  # noqa: PTH123 - pathlib is large
            text = file.read(_LONGEST)
    except OSError:
        return b""
    for line in text.split(b"\n"):
        _, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        if (found := _POD.match(path)) is None:
            continue
        owner = _owner(cgroups, controllers.decode(), os.fsdecode(found["folder"]))
        if not _USER.search(path) if owner is None else owner in {0, os.geteuid()}:
            return found["pod"]
    return b""


def try_send(caller: socket.socket, data: bytes) -> None:
    """Send bytes, unless the other end has gone or does not read."""
    with suppress(OSError):
        caller.send(data)


def _owner(cgroups: str, controllers: str, folder: str) -> int | None:
    """Return the user that owns a cgroup's folder; `None` where it is not visible."""
    for hierarchy in [controllers.removeprefix("name=")] if controllers else ["", "unified"]:
        with suppress(OSError):
            return os.lstat(f"{cgroups}/{hierarchy}{folder}").st_uid
    return None
