"""The relay's loop: callers are accepted, handed to the daemon, and closed."""

import os
import resource
import selectors
import signal
import socket
import struct
from collections import deque
from contextlib import suppress
from time import monotonic, sleep

from metagpu.plugins.pod_api.relay.callers import group_of, open_pidfd, pid_of, try_send
from metagpu.plugins.pod_api.relay.open_calls import EVENT_READ, Call, OpenCalls
from metagpu.plugins.pod_api.relay.turns import Pace, Turns

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
