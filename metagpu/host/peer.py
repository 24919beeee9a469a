"""Who has opened the other end of a unix socket, by what the kernel remembers of that moment.

These functions block, for microseconds.
"""

import errno
import os
import select
import socket
import struct
from pathlib import Path
from typing import Final

from metagpu.core.host import Identity
from metagpu.host.process import read_identity

_CREDENTIALS: Final = struct.Struct("3i")
"""`struct ucred`: pid, uid and gid (unix(7)); the pid is 0 where we cannot see the process."""
_SO_PEERPIDFD: Final = 77
"""asm-generic/socket.h, since Linux 6.5: a pidfd of the very process, however its pid is reused."""


def read_peer(proc: Path, connection: socket.socket) -> Identity | None:
    """Identify the process that connected; `None` when it has ended, or we cannot see it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(credentials)
    if pid <= 0:
        return None

    try:
        process = _pidfd(connection, pid)
    except OSError:
        return None

    try:
        identity = read_identity(proc, pid)
        # What was read is this process's own only if it has had its pid all the while.
        return identity if _lives(process) else None
    finally:
        os.close(process)


def _pidfd(connection: socket.socket, pid: int) -> int:
    """Open the peer's pidfd; on a kernel before 6.5 it is that of whoever has the pid now.

    Raises:
        OSError: if the process has ended.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        return os.pidfd_open(pid)


def _lives(process: int) -> bool:
    """Say whether a process has not ended: its pidfd can be read once it has."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return not poll.poll(0)
