"""The relay as a process: callers are accepted, get their turn, and are closed."""

import ctypes
import os
import resource
import selectors
import signal
import socket
import struct
from collections import deque
from contextlib import suppress
from time import monotonic, sleep

from metagpu.plugins.pod_api.relay.open_calls import (
    EVENT_READ,
    Call,
    OpenCalls,
    group_of,
    open_pidfd,
    pid_of,
    try_send,
)

WAITING_OF_GROUP = 16
"""Calls of one group that wait for their turn; more are refused."""


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


class Turns:
    """The callers that wait, by group, and the calls under way.

    One caller of each group goes, and then the next of each.

    Args:
        pace: of all calls.
        most: calls under way at once.
        most_of_group: calls of one group under way at once; its others wait for their ends.
    """

    def __init__(self, pace: Pace, most: int, most_of_group: int) -> None:
        self._pace = pace
        self._most, self._most_of_group = most, most_of_group
        self._waiting: dict[bytes, deque[socket.socket]] = {}
        self._under_way: dict[bytes, int] = {}

    @property
    def waiting(self) -> int:
        """Number of callers that wait."""
        return sum(map(len, self._waiting.values()))

    def add(self, group: bytes, caller: socket.socket) -> bool:
        """Put a caller into its group; return false for one too many."""
        queue = self._waiting.setdefault(group, deque())
        if len(queue) >= WAITING_OF_GROUP:
            return False
        queue.append(caller)
        return True

    def wait(self, now: float) -> float | None:
        """Return the seconds until the next turn, `None` if only an event can bring it."""
        return None if self._next_group() is None else self._pace.wait(now)

    def take(self, now: float) -> tuple[bytes, socket.socket] | None:
        """Return the next caller with its group, under way from now on, or `None`."""
        group = self._next_group()
        if group is None or self._pace.wait(now):
            return None
        self._pace.take(now)
        queue = self._waiting.pop(group)
        caller = queue.popleft()
        if queue:
            self._waiting[group] = queue  # behind all other groups
        self._under_way[group] = self._under_way.get(group, 0) + 1
        return group, caller

    def end(self, group: bytes) -> None:
        """Count the end of a call."""
        self._under_way[group] -= 1
        if not self._under_way[group]:
            del self._under_way[group]

    def _next_group(self) -> bytes | None:
        if sum(self._under_way.values()) >= self._most:
            return None
        for group in self._waiting:
            if self._under_way.get(group, 0) < self._most_of_group:
                return group
        return None


HELD = 4096
"""Connections held at once, if the limit of open files allows; the others wait in the kernel."""
OPEN = 256
"""Calls that the daemon has at once."""

_ACCEPTED_AT_ONCE = 100
_CHUNK = 65536
_TICK = 0.01
"""Seconds after which a close that waits is interrupted."""

_REFUSAL = b"mgctl: this pod has too many calls waiting; try again\n"
_REFUSED = struct.pack(">cI", b"e", len(_REFUSAL)) + _REFUSAL + struct.pack(">cI", b"x", 1)
"""The frames of mgctl.c: a line for the error output, and the exit status."""


class Relay:
    """Takes callers in turns by pod, and carries bytes between them and the daemon.

    Args:
        listener: where containers call.
        channel: to the daemon.
        proc: where the kernel shows processes.
        settings: `request_limit`, bytes of a caller; `reading_time`, seconds that a caller has for
            each part of its answer; `accept_burst` and `accepted`, connections a second;
            `call_burst` and `calls`, of them to the daemon; `pod_calls`, of one pod at once;
            `beat`, seconds between signs of life.
    """

    def __init__(
        self,
        listener: socket.socket,
        channel: socket.socket,
        proc: str,
        settings: dict[str, float],
    ) -> None:
        self._listener, self._channel = listener, channel
        self._proc, self._beat = proc, settings["beat"]
        self._accepts = Pace(settings["accept_burst"], settings["accepted"])
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._held = min(HELD, files // 2)
        self._turns = Turns(
            Pace(settings["call_burst"], settings["calls"]),
            min(OPEN, files // 8),
            int(settings["pod_calls"]),
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, EVENT_READ)
        self._is_listening = False
        self._calls = OpenCalls(
            self._selector, settings["request_limit"], settings["reading_time"], self._call_ended
        )
        self._dropped: deque[socket.socket] = deque()

    def run(self) -> None:
        """Carry bytes until the daemon closes the channel."""
        beat = 0.0
        while True:
            now = monotonic()
            if now >= beat:
                self._channel.send(b"alive")
                self._calls.end_unread(now)
                beat = now + self._beat
            self._listen(now)
            ready = self._selector.select(self._pause(now, beat))
            # Until the next wait, whatever lingers is interrupted: it costs one tick.
            signal.setitimer(signal.ITIMER_REAL, _TICK, _TICK)
            for key, events in ready:
                if key.fileobj is self._channel:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._calls.carry(key.data, key.fileobj, events, monotonic())
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
        if (wait_for_turn := self._turns.wait(now)) is not None:
            until.append(now + wait_for_turn)
        return max(0.0, min(until) - now)

    def _listen(self, now: float) -> None:
        """Watch for callers while there is room for more, and it is time for the next."""
        held = len(self._dropped) + self._turns.waiting
        wanted = held < self._held and not self._accepts.wait(now)
        if wanted and not self._is_listening:
            self._selector.register(self._listener, EVENT_READ)
        elif self._is_listening and not wanted:
            self._selector.unregister(self._listener)
        self._is_listening = wanted

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
            if not self._turns.add(group_of(self._proc, pid_of(caller)), caller):
                try_send(caller, _REFUSED)
                self._dropped.append(caller)

    def _hand_over(self) -> None:
        """Hand the daemon the calls whose turn it is."""
        while (turn := self._turns.take(monotonic())) is not None:
            group, caller = turn
            if (daemon := self._announce(caller)) is None:
                self._turns.end(group)
                self._dropped.append(caller)
            else:
                self._calls.add(Call(group, caller, daemon))

    def _announce(self, caller: socket.socket) -> socket.socket | None:
        """Announce a caller to the daemon; return their connection, `None` without one."""
        pid = pid_of(caller)
        try:
            pidfds = [open_pidfd(caller, pid)] if pid else []
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
        return ours

    def _call_ended(self, call: Call) -> None:
        self._turns.end(call.group)
        self._dropped.append(call.caller)

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


_PR_SET_PDEATHSIG = 1
_BACKLOG = 4096
_NICE = 10
"""The daemon comes first, whatever callers do."""


def main(path: str, proc: str, *settings: str) -> None:
    """Serve the socket at `path` until the daemon ends."""
    # A daemon that has ended before this is one whose channel is closed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGALRM, lambda *_: None)
    os.nice(_NICE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * HELD), hard))

    values = {
        name: float(number) for name, _, number in (setting.partition("=") for setting in settings)
    }
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
