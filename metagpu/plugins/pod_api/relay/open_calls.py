"""The calls under way: bytes between a caller and the daemon."""

import selectors
import socket
from collections.abc import Callable
from contextlib import suppress

from metagpu.plugins.pod_api.relay.callers import try_send

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
