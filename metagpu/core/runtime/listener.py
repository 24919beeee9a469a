"""Listening unix sockets; connections at a limited rate, source by source."""

import asyncio
import math
import socket
import struct
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import anyio
import structlog

from metagpu.core.runtime.files import file_identity
from metagpu.core.runtime.rate_limit import TokenBucket

SO_PASSRIGHTS: Final = 83
"""asm-generic/socket.h, since Linux 6.16: whether a peer may send descriptors; 1 by default."""
MOST_WAITING: Final = 256
"""Connections that wait for their turn; with one more, the source that has most loses one."""
_AT_ONCE: Final = 64
"""Connections that are taken out of the kernel's queue in one step: so many cost 2 ms."""
_LOOPBACK: Final = "127.0.0.0/8"
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER with which a close tells the peer at once, and leaves nothing in the kernel."""

log = structlog.get_logger()


@contextmanager
def unix_listener(path: Path, *, mode: int, backlog: int) -> Iterator[socket.socket]:
    """Listen on a unix socket until the block ends, then remove its file.

    The mode is set before the socket listens, so only permitted processes connect. Where the
    kernel can, it refuses descriptors to who sends them: the close of a received one may take as
    long as its sender wants. A file that another process has put in the socket's place stays.

    Raises:
        OSError: the socket cannot be bound; a path of more than 107 bytes cannot.
    """
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        listener.bind(str(path))
        identity = file_identity(path)
        try:
            path.chmod(mode)
            with suppress(OSError):
                listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
            listener.listen(backlog)
            listener.setblocking(False)  # noqa: FBT003 - the socket module's signature
            yield listener
        finally:
            remove_socket(path, identity)


def remove_socket(path: Path, identity: tuple[int, int, int] | None) -> None:
    """Remove a socket file, unless another process has put its own in its place."""
    if identity is not None and file_identity(path) == identity:
        path.unlink(missing_ok=True)


async def accept(
    listener: socket.socket,
    rate: TokenBucket,
    *,
    retry_delay: float = 1.0,
    most_waiting: int = MOST_WAITING,
) -> AsyncGenerator[tuple[socket.socket, str], None]:
    """Yield connections at a limited rate, each with the address of its client.

    Each source has its turn, however many connections another one opens. So they do not wait in
    the kernel, where the first come first, but here. A connection that cannot be accepted, for
    want of a descriptor or because its client has gone, is logged; the next one is accepted after
    `retry_delay` seconds.
    """
    loop, waiting = asyncio.get_running_loop(), _Waiting(most_waiting)

    with closing(waiting):
        while True:
            await anyio.sleep(rate.wait(loop.time()))
            try:
                waiting.take_in(listener)
            except OSError as error:
                log.warning("connection not accepted", error=str(error))
                await anyio.sleep(retry_delay)
            if (following := waiting.next()) is None:
                await anyio.wait_readable(listener)
            else:
                rate.take(loop.time())
                yield following


def log_failed_accepts_once(every: float = 1.0) -> None:
    """Log the failed accepts of asyncio's own servers once every so many seconds.

    Without free descriptors asyncio tries a hundred times at once, and logs each.
    """
    loop, quiet_until = asyncio.get_running_loop(), -math.inf

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal quiet_until
        if not str(context.get("message", "")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif loop.time() >= quiet_until:
            quiet_until = loop.time() + every
            log.warning("connection not accepted", error=str(context.get("exception")))

    loop.set_exception_handler(handle)


class _Waiting:
    """Accepted connections that wait for their turn, by source."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._sources: dict[str, deque[socket.socket]] = {}

    def take_in(self, listener: socket.socket) -> None:
        """Accept what waits in the kernel.

        Raises:
            OSError: a connection cannot be accepted.
        """
        for _ in range(_AT_ONCE):
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)  # noqa: FBT003 - the socket module's signature
            self._add(connection, _source(address))

    def _add(self, connection: socket.socket, source: str) -> None:
        self._sources.setdefault(source, deque()).append(connection)
        self._count += 1
        if self._count > self._most:
            most = max(self._sources, key=lambda peer: len(self._sources[peer]))
            _reset(self._pop(most, self._sources[most].pop()))

    def next(self) -> tuple[socket.socket, str] | None:
        """Return the next connection and its source, which is then behind all others."""
        source = next(iter(self._sources), None)
        if source is None:
            return None
        queue = self._sources.pop(source)
        self._sources[source] = queue
        return self._pop(source, queue.popleft()), source

    def _pop(self, source: str, connection: socket.socket) -> socket.socket:
        self._count -= 1
        if not self._sources[source]:
            del self._sources[source]
        return connection

    def close(self) -> None:
        """Close all that wait."""
        for queue in self._sources.values():
            for connection in queue:
                _reset(connection)


def _source(address: object) -> str:
    """Return a client's address; what a user binds of the loopback is one."""
    host = str(address[0]).removeprefix("::ffff:") if isinstance(address, tuple) else ""
    return _LOOPBACK if host.startswith("127.") and host != "127.0.0.1" else host


def _reset(connection: socket.socket) -> None:
    with closing(connection), suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
