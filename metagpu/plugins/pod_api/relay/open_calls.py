"""The calls under way: callers as the kernel knows them, and bytes to the daemon."""

import errno
import os
import re
import selectors
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

CGROUPS = "/sys/fs/cgroup"

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid and gid (unix(7)); the pid is 0 where the process is hidden."""
_SO_PEERPIDFD = 77
"""asm-generic/socket.h, since Linux 6.5: a pidfd of the very process, however its pid is reused."""
_LONGEST = 65536
_MOST_THREADS = 16
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
    Of a process whose first thread has ended, which the kernel shows in no cgroup of v1, all
    threads are looked at.
    """
    if group := _group(f"{proc}/{pid}", cgroups):
        return group
    with suppress(OSError):
        threads = os.listdir(f"{proc}/{pid}/task")  # noqa: PTH208 - pathlib is large
        for thread in threads[1:_MOST_THREADS]:
            if group := _group(f"{proc}/{pid}/task/{thread}", cgroups):
                return group
    return b""


def _group(folder: str, cgroups: str) -> bytes:
    try:
        with open(f"{folder}/cgroup", "rb", buffering=0) as file:  # noqa: PTH123 - pathlib is large
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


EVENT_READ, EVENT_WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

_CHUNK = 65536


class Call:
    """A caller's connection, and the connection that carries its bytes to the daemon.

    Attributes:
        group: whose turn the call has taken.
        received: bytes of the caller so far.
        rest: a part of the answer that the caller has not read yet.
        answered: the time when that part came from the daemon.
    """

    __slots__ = ("answered", "caller", "daemon", "group", "received", "rest")

    def __init__(self, group: bytes, caller: socket.socket, daemon: socket.socket) -> None:
        self.group, self.caller, self.daemon = group, caller, daemon
        self.rest = b""
        self.received, self.answered = 0, 0.0


class OpenCalls:
    """The calls that the daemon has.

    Args:
        selector: watches the connections, with the call as their data.
        request_limit: bytes of a caller; the daemon reads no more.
        reading_time: seconds that a caller has for each part of its answer, of 64 KiB at most. A
            caller that reads slower holds a place that others wait for.
        ended: takes each call that has ended, with the connection of its caller still open.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        request_limit: float,
        reading_time: float,
        ended: Callable[[Call], None],
    ) -> None:
        self._selector = selector
        self._request_limit, self._reading_time = request_limit, reading_time
        self._ended = ended
        self._open: set[Call] = set()

    def add(self, call: Call) -> None:
        """Carry the bytes of a call from now on."""
        self._open.add(call)
        self._selector.register(call.caller, EVENT_READ, call)
        self._selector.register(call.daemon, EVENT_READ, call)

    def carry(self, call: Call, ready: object, events: int, now: float) -> None:
        """Carry what a connection of a call is ready for, unless the call has ended."""
        if call not in self._open:
            return
        try:
            with suppress(BlockingIOError):
                if ready is call.daemon:
                    self._carry_answer(call, now)
                elif events & EVENT_WRITE:
                    self._send_rest(call)
                else:
                    self._carry_request(call)
        except OSError:
            self._end(call)

    def end_unread(self, now: float) -> None:
        """End the calls of callers that do not read their answers in time."""
        limit = now - self._reading_time
        for call in [call for call in self._open if call.rest and call.answered < limit]:
            self._end(call)

    def _carry_request(self, call: Call) -> None:
        data = call.caller.recv(_CHUNK)
        if not data:
            self._end(call)
            return
        call.received += len(data)
        # A daemon that has answered already reads no more; its answer is still carried.
        try_send(call.daemon, data)
        self._watch_caller(call, EVENT_READ | (EVENT_WRITE if call.rest else 0))

    def _carry_answer(self, call: Call, now: float) -> None:
        call.rest, call.answered = call.daemon.recv(_CHUNK), now
        if not call.rest:
            self._end(call)
            return
        self._selector.unregister(call.daemon)
        self._watch_caller(call, EVENT_READ | EVENT_WRITE)
        self._send_rest(call)

    def _send_rest(self, call: Call) -> None:
        call.rest = call.rest[call.caller.send(call.rest) :]
        if not call.rest:
            self._watch_caller(call, EVENT_READ)
            self._selector.register(call.daemon, EVENT_READ, call)

    def _watch_caller(self, call: Call, events: int) -> None:
        if call.received > self._request_limit:  # it has said all; the daemon answers so
            events &= ~EVENT_READ
        self._unwatch(call.caller)
        if events:
            self._selector.register(call.caller, events, call)

    def _unwatch(self, connection: socket.socket) -> None:
        with suppress(KeyError):
            self._selector.unregister(connection)

    def _end(self, call: Call) -> None:
        self._open.discard(call)
        for connection in (call.caller, call.daemon):
            self._unwatch(connection)
        call.daemon.close()
        self._ended(call)
