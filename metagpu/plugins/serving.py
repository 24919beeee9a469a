"""A gRPC service on a unix socket, as a block: what is open when the block ends is closed.

grpclib's `Server.close()` ends neither streams nor connections, and a kubelet whose connection
stays open goes on counting our devices and waits for ever in a call that nobody will answer. So
this module drives grpclib's protocol and handler itself, and keeps account of the connections.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Final, Protocol

import anyio
import anyio.lowlevel
import h2.config
import h2.connection
from grpclib.config import Configuration
from grpclib.const import Handler as Method
from grpclib.events import _DispatchServerEvents
from grpclib.protocol import H2Protocol
from grpclib.server import Handler

from metagpu.plugins.wire import RawCodec

LINGER: Final = 1.0
"""Seconds a peer has to close its connection after our streams have ended."""

_H2: Final = h2.config.H2Configuration(
    client_side=False,
    header_encoding="ascii",
    # The kubelet's own headers would pass; checking them costs time in every call.
    validate_inbound_headers=False,
    validate_outbound_headers=False,
    normalize_inbound_headers=False,
    normalize_outbound_headers=False,
)
_GRPC: Final = Configuration().__for_server__()

# h2 remembers 65,536 closed streams of a connection, 6 MB of them, to tell a late frame from a
# wrong one. The kubelet keeps one connection for months and makes one call after the other.
h2.connection.H2Connection.MAX_CLOSED_STREAMS = 256


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


class Calls:
    """The calls of one service that last, such as ListAndWatch."""

    def __init__(self) -> None:
        self._scopes: dict[anyio.CancelScope, asyncio.Task[None] | None] = {}
        self._any = anyio.Event()
        self._changed = anyio.Event()

    @contextmanager
    def lasting(self) -> Iterator[None]:
        """Run a call's body until it ends or the service does; then the call returns as usual."""
        with anyio.CancelScope() as scope:
            self._scopes[scope] = asyncio.current_task()
            self._any.set()
            try:
                yield
            finally:
                del self._scopes[scope]
                self._changed.set()
                self._changed = anyio.Event()

    @property
    def tasks(self) -> frozenset[asyncio.Task[None] | None]:
        """What runs them."""
        return frozenset(self._scopes.values())

    async def opened(self) -> None:
        """Wait until there was such a call, be it over by now."""
        await self._any.wait()

    async def ended(self) -> None:
        """Wait until there is none."""
        while self._scopes:
            await self._changed.wait()

    def end(self) -> None:
        """End them all."""
        for scope in list(self._scopes):
            scope.cancel()


class _Handler(Handler):
    """What answers one peer."""

    @property
    def running(self) -> frozenset[asyncio.Task[None]]:
        """The calls that have no answer yet."""
        return frozenset(task for task in self._tasks.values() if not task.done())


class _Connection(H2Protocol):
    """One peer, accounted for while it is there."""

    def __init__(self, handler: _Handler, peers: "_Peers") -> None:
        super().__init__(handler, _GRPC, _H2)
        self.answering = handler
        self._peers = peers
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
        self._peers.came(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._peers.left(self)

    def abort(self) -> None:
        """Hang up without waiting for anything still to be sent."""
        if self._transport is not None:
            self._transport.abort()


class _Peers:
    """All connections of one service."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        self._methods = dict(methods)
        self._open: set[_Connection] = set()
        self._changed = anyio.Event()

    def connection(self) -> _Connection:
        """Make the protocol for one more peer."""
        handler = _Handler(self._methods, RawCodec(), None, _DispatchServerEvents())
        return _Connection(handler, self)

    def came(self, connection: _Connection) -> None:
        self._open.add(connection)

    def left(self, connection: _Connection) -> None:
        self._open.discard(connection)
        self._changed.set()
        self._changed = anyio.Event()

    async def gone(self) -> None:
        """Wait until nobody is connected."""
        while self._open:
            await self._changed.wait()

    async def answered(self, calls: Calls) -> None:
        """Wait until every call but the lasting ones has its answer."""
        running = frozenset[asyncio.Task[None]]().union(
            *(it.answering.running for it in self._open)
        )
        if short := running - calls.tasks:
            await asyncio.wait(short)

    def abort(self) -> None:
        for connection in list(self._open):
            connection.abort()


@asynccontextmanager
async def serving(path: Path, methods: Mapping[str, Method], calls: Calls) -> AsyncIterator[None]:
    """Serve on a socket file that only root may open, until the block ends.

    On leaving, in this order: the file is removed and nobody new comes in; calls that do not last
    have `LINGER` to be answered, since a kubelet whose list ends hears nothing more; lasting calls
    end with a status; peers may close their connections, which tells us that they saw the end;
    after `LINGER` the rest is cut, and callers still waiting hear an error instead of nothing.

    Raises:
        OSError: if the socket cannot be bound; a path of more than 107 bytes cannot.
    """
    peers = _Peers(methods)
    loop = asyncio.get_running_loop()

    with closing(_bound(path)) as listener:
        identity = identity_of(path)
        try:
            server = await loop.create_unix_server(peers.connection, sock=listener)
            try:
                yield
            finally:
                _remove(path, identity)
                with anyio.CancelScope(shield=True):
                    with anyio.move_on_after(LINGER):
                        await peers.answered(calls)
                    calls.end()
                    await stop_accepting(listener)
                    server.close()
                    with anyio.move_on_after(LINGER):
                        await peers.gone()
                    peers.abort()
                    await peers.gone()
        finally:
            _remove(path, identity)


async def stop_accepting(listener: _HasFileno) -> None:
    """Take no new connection, and wait until those just taken are known to their protocols.

    asyncio drops a connection on the floor, open, that it accepted in the turn of the loop in which
    its server closes; and it tells a protocol of its connection two turns after accepting it.
    """
    asyncio.get_running_loop().remove_reader(listener.fileno())
    for _ in range(3):
        await anyio.lowlevel.checkpoint()


def identity_of(path: Path) -> tuple[int, int, int] | None:
    """Tell one file from another of the same name, `None` when there is none.

    The inode number alone is used again at once when a kubelet restarts. The time of modification
    is a socket's birthday: unlike the time of change it survives a chmod.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _remove(path: Path, identity: tuple[int, int, int] | None) -> None:
    """Remove our socket file, unless somebody else's stands there now."""
    if identity_of(path) == identity:
        path.unlink(missing_ok=True)


def _bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(16)
        listener.setblocking(False)  # noqa: FBT003 - the socket module's signature
    except OSError:
        listener.close()
        raise
    return listener
