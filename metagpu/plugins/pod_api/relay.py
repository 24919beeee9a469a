"""The relay: a process that holds the connections of containers for the daemon.

A container can send open files with its bytes. A reader that wants none of them still closes them,
as does the end of a connection with unread ones: and the close of a TCP socket with SO_LINGER takes
as long as its sender wants. A daemon that read or closed such a connection would stop, and with it
the kubelet. This process may stop: a timer interrupts each such close, and where that does not
help, the daemon kills this process, for the kernel lets no ending process linger.

It is started by its path, and knows the standard library alone, so that it stays small:

    python -I -S relay.py SOCKET PROC NAME=NUMBER …

Its standard input is a socket of whole messages to the daemon, which sends nothing. The messages
are `listening`, `failed TEXT`, now and then `alive`, and for each call `call PID` with two
descriptors: a connection that carries the caller's bytes, and the caller's pidfd. PID is 0, and
there is no pidfd, where the caller is in a pid namespace that this process does not see.
"""

import ctypes
import errno
import os
import re
import resource
import selectors
import signal
import socket
import struct
import sys
from collections import deque
from contextlib import suppress
from time import monotonic, sleep

EVENT_READ, EVENT_WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid and gid (unix(7)); the pid is 0 where the process is hidden."""
_SO_PEERPIDFD = 77
"""asm-generic/socket.h, since Linux 6.5: a pidfd of the very process, however its pid is reused."""
_PR_SET_PDEATHSIG = 1
_POD = re.compile(rb"pod[0-9a-f_-]{32,36}")
"""The pod in a text of `/proc/PID/cgroup`: whose turn it is, and never whose answer."""
_USER = re.compile(rb"user(\.slice|@)")
"""Cgroups of users of the host, who may name theirs like pods: they have one turn together."""

_BACKLOG = 4096
_HELD = 4096
"""Connections held at once, if the limit of open files allows; the others wait in the kernel."""
_OPEN = 256
"""Calls that the daemon has at once."""
_WAITING_OF_POD = 16
"""Calls of one pod that wait for their turn; more are refused."""
_ACCEPTED_AT_ONCE = 100
_CHUNK = 65536
_TICK = 0.01
"""Seconds after which a close that waits is interrupted."""
_NICE = 10
"""The daemon comes first, whatever callers do."""

_REFUSAL = b"mgctl: this pod has too many calls waiting; try again\n"
_REFUSED = struct.pack(">cI", b"e", len(_REFUSAL)) + _REFUSAL + struct.pack(">cI", b"x", 1)
"""The frames of mgctl.c: a line for the error output, and the exit status."""


class Pace:
    """At most `burst` at once, and `rate` a second."""

    def __init__(self, burst: float, rate: float) -> None:
        self._ahead, self._each = (burst - 1) / rate, 1 / rate
        self._next = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until the next one may go."""
        return max(0.0, self._next - now)

    def take(self, now: float) -> None:
        """Count one that goes now."""
        self._next = max(self._next, now - self._ahead) + self._each


class Call:
    """A caller's connection, and the connection that carries its bytes to the daemon."""

    __slots__ = ("caller", "daemon", "moved", "received", "rest")

    def __init__(self, caller: socket.socket, daemon: socket.socket) -> None:
        self.caller, self.daemon = caller, daemon
        self.rest = b""
        self.received, self.moved = 0, 0.0


class Relay:
    """Takes callers in turns by pod, and carries bytes between them and the daemon.

    Args:
        listener: where containers call.
        channel: to the daemon.
        proc: where the kernel shows processes.
        settings: `request_limit`, bytes of a caller; `reading_time`, seconds that a caller has to
            read more of its answer; `accept_burst` and `accepted`, connections a second;
            `call_burst` and `calls`, of them to the daemon; `beat`, seconds between signs of life.
    """

    def __init__(
        self,
        listener: socket.socket,
        channel: socket.socket,
        proc: str,
        settings: dict[str, float],
    ) -> None:
        self._listener, self._channel = listener, channel
        self._proc, self._settings = proc, settings
        self._accepts = Pace(settings["accept_burst"], settings["accepted"])
        self._turns = Pace(settings["call_burst"], settings["calls"])
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._held, self._open = min(_HELD, files // 2), min(_OPEN, files // 8)
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, EVENT_READ)
        self._is_listening = False
        self._waiting: dict[bytes, deque[socket.socket]] = {}
        self._calls: set[Call] = set()
        self._dropped: deque[socket.socket] = deque()

    def run(self) -> None:
        """Carry bytes until the daemon closes the channel."""
        beat = 0.0
        while True:
            now = monotonic()
            if now >= beat:
                self._channel.send(b"alive")
                self._drop_deaf(now)
                beat = now + self._settings["beat"]
            self._listen(now)
            ready = self._selector.select(self._pause(now, beat))
            # Until the next wait, whatever lingers is interrupted: it costs one tick.
            signal.setitimer(signal.ITIMER_REAL, _TICK, _TICK)
            for key, events in ready:
                if key.fileobj is self._channel:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._calls:
                    self._carry(key.data, key.fileobj is key.data.caller, events)
            self._hand_over()
            self._close_dropped()
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _pause(self, now: float, beat: float) -> float:
        """Return the seconds until there is something to do without an event."""
        if self._dropped:
            return 0.0
        until = [beat]
        if wait := self._accepts.wait(now):
            until.append(now + wait)
        if self._waiting and len(self._calls) < self._open:
            until.append(now + self._turns.wait(now))
        return max(0.0, min(until) - now)

    def _listen(self, now: float) -> None:
        """Watch for callers while there is room for more, and it is time for the next."""
        held = len(self._dropped) + sum(map(len, self._waiting.values()))
        wanted = held < self._held and not self._accepts.wait(now)
        if wanted and not self._is_listening:
            self._selector.register(self._listener, EVENT_READ)
        elif self._is_listening and not wanted:
            self._selector.unregister(self._listener)
        self._is_listening = wanted

    # --- callers ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Accept what waits, into the queues of the callers' pods."""
        for _ in range(_ACCEPTED_AT_ONCE):
            now = monotonic()
            if self._accepts.wait(now):
                return
            try:
                caller = self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError:
                sleep(_TICK)  # one has gone; or the machine has no file left, and needs time
                return
            self._accepts.take(now)
            caller.setblocking(False)  # noqa: FBT003 - the socket module's signature
            queue = self._waiting.setdefault(_pod_of(self._proc, _pid_of(caller)), deque())
            if len(queue) < _WAITING_OF_POD:
                queue.append(caller)
            else:
                _try_send(caller, _REFUSED)
                self._dropped.append(caller)

    def _hand_over(self) -> None:
        """Hand the daemon the calls whose turn it is: one of each pod, then the next."""
        while self._waiting and len(self._calls) < self._open:
            now = monotonic()
            if self._turns.wait(now):
                return
            self._turns.take(now)
            pod = next(iter(self._waiting))
            queue = self._waiting.pop(pod)
            caller = queue.popleft()
            if queue:
                self._waiting[pod] = queue
            if (call := self._announce(caller)) is None:
                self._dropped.append(caller)
                continue
            self._calls.add(call)
            self._selector.register(caller, EVENT_READ, call)
            self._selector.register(call.daemon, EVENT_READ, call)

    def _announce(self, caller: socket.socket) -> Call | None:
        """Announce a caller to the daemon; return `None` for a caller that has ended."""
        pid = _pid_of(caller)
        try:
            pidfds = [_pidfd(caller, pid)] if pid else []
        except OSError:
            return None
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                ours.setblocking(False)  # noqa: FBT003 - the socket module's signature
                # The channel waits for the daemon: without it, callers need no answers.
                socket.send_fds(self._channel, [b"call %d" % pid], [theirs.fileno(), *pidfds])
        except ConnectionError:
            raise  # the daemon has ended
        except OSError:
            return None  # no file is left, or too many are under way: this caller tries again
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
        return Call(caller, ours)

    # --- bytes ------------------------------------------------------------------------------------

    def _carry(self, call: Call, is_caller: bool, events: int) -> None:  # noqa: FBT001 - its side
        try:
            with suppress(BlockingIOError):
                if not is_caller:
                    self._carry_answer(call)
                elif events & EVENT_WRITE:
                    self._send_rest(call)
                else:
                    self._carry_request(call)
        except OSError:
            self._end(call)

    def _carry_request(self, call: Call) -> None:
        data = call.caller.recv(_CHUNK)
        if not data:
            self._end(call)
            return
        call.received += len(data)
        # A daemon that has answered already reads no more; its answer is still carried.
        _try_send(call.daemon, data)
        self._watch_caller(call, EVENT_READ | (EVENT_WRITE if call.rest else 0))

    def _carry_answer(self, call: Call) -> None:
        call.rest, call.moved = call.daemon.recv(_CHUNK), monotonic()
        if not call.rest:
            self._end(call)
            return
        self._selector.unregister(call.daemon)
        self._watch_caller(call, EVENT_READ | EVENT_WRITE)
        self._send_rest(call)

    def _send_rest(self, call: Call) -> None:
        call.rest = call.rest[call.caller.send(call.rest) :]
        call.moved = monotonic()
        if not call.rest:
            self._watch_caller(call, EVENT_READ)
            self._selector.register(call.daemon, EVENT_READ, call)

    def _watch_caller(self, call: Call, events: int) -> None:
        if self._has_said_all(call):
            events &= ~EVENT_READ
        self._unwatch(call.caller)
        if events:
            self._selector.register(call.caller, events, call)

    def _has_said_all(self, call: Call) -> bool:
        """Return whether a caller has sent more than any request; the daemon answers so."""
        return call.received > self._settings["request_limit"]

    def _unwatch(self, connection: socket.socket) -> None:
        with suppress(KeyError):
            self._selector.unregister(connection)

    # --- ends -------------------------------------------------------------------------------------

    def _end(self, call: Call) -> None:
        self._calls.discard(call)
        for connection in (call.caller, call.daemon):
            self._unwatch(connection)
        call.daemon.close()
        self._dropped.append(call.caller)

    def _drop_deaf(self, now: float) -> None:
        """End the calls of callers that do not read their answers."""
        limit = now - self._settings["reading_time"]
        for call in [call for call in self._calls if call.rest and call.moved < limit]:
            self._end(call)

    def _close_dropped(self) -> None:
        """Close connections, in the order of their ends, for one tick."""
        until = monotonic() + _TICK
        while self._dropped and monotonic() < until:
            caller = self._dropped.popleft()
            # Closed with unread bytes, the connection would fail the caller's read of its answer.
            with suppress(OSError):
                caller.recv(_CHUNK)
            caller.close()
        if len(self._dropped) > self._held // 2:
            # So many that each take a tick are an attack: an ending process closes them at once.
            os._exit(1)


def _pid_of(caller: socket.socket) -> int:
    credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[0])


def _pidfd(caller: socket.socket, pid: int) -> int:
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


def _pod_of(proc: str, pid: int) -> bytes:
    """Return the pod of a process, whose turns it takes; an empty name outside pods."""
    try:
        with open(f"{proc}/{pid}/cgroup", "rb", buffering=0) as file:  # noqa: PTH123 - pathlib is large
            text = file.read(_CHUNK)
    except OSError:
        return b""
    found = None if _USER.search(text) else _POD.search(text)
    return found[0] if found else b""


def _try_send(caller: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        caller.send(data)


def _listener(path: str, passrights: int) -> socket.socket:
    """Listen for all users, for the caller's pod decides about the answer.

    Raises:
        OSError: the socket cannot be created.
    """
    new = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(new)  # noqa: PTH108 - pathlib is large
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(new)
    os.chmod(new, 0o666)  # noqa: PTH101, S103 - as said
    with suppress(OSError):  # before Linux 6.16
        listener.setsockopt(socket.SOL_SOCKET, passrights, 0)
    listener.listen(_BACKLOG)
    os.replace(new, path)  # noqa: PTH105 - as above; a socket that is seen is one that listens
    listener.setblocking(False)  # noqa: FBT003 - the socket module's signature
    return listener


def main(path: str, proc: str, *settings: str) -> None:
    """Serve the socket at `path` until the daemon ends."""
    # A daemon that has ended before this is one whose channel is closed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGALRM, lambda *_: None)
    os.nice(_NICE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * _HELD), hard))

    values = {name: float(number) for name, _, number in (it.partition("=") for it in settings)}
    channel = socket.socket(fileno=0)
    try:
        listener = _listener(path, int(values["passrights"]))
    except OSError as error:
        channel.send(f"failed {error.strerror or error}".encode())
        return
    channel.send(b"listening")
    with suppress(BrokenPipeError):  # the daemon has ended
        Relay(listener, channel, proc, values).run()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
