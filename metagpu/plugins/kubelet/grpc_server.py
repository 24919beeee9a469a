"""A gRPC server on a unix socket, as a block whose end closes all connections.

grpclib's `Server.close()` ends neither streams nor connections. A kubelet whose connection stays
open goes on counting our devices, and waits for ever in a call without an answer. So this module
drives grpclib's protocol and handler itself and tracks the connections.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio
import anyio.lowlevel
import h2.config
from grpclib.config import Configuration
from grpclib.const import Cardinality
from grpclib.const import Handler as Method
from grpclib.events import _DispatchServerEvents
from grpclib.protocol import H2Protocol
from grpclib.server import Handler

from metagpu.core.runtime.files import file_identity
from metagpu.core.runtime.listener import remove_socket, unix_listener
from metagpu.patches import lighten_http2
from metagpu.plugins.kubelet.messages import RawCodec, to_grpc_error
from metagpu.plugins.kubelet.timing import TIMING


class BatchedTransport(asyncio.Transport):
    """A transport for grpclib that sends all of one turn of the loop together.

    grpclib writes the headers, the message and the end of an answer one after the other. Each would
    be a call to the system, and wake the kubelet.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._unsent: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send data before the event loop's next turn ends."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(bytes(data))

    def close(self) -> None:
        """Close the connection once all data is sent."""
        self._send()
        self._transport.close()

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or will be."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - as asyncio has it
        """Return a property of the connection."""
        return self._transport.get_extra_info(name, default)

    def _send(self) -> None:
        data = b"".join(self._unsent)
        self._unsent.clear()
        if data and not self._transport.is_closing():
            self._transport.write(data)


if TYPE_CHECKING:
    from grpclib.server import Stream

_BACKLOG: Final = 16

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

lighten_http2()


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


class StreamingCalls:
    """The streaming calls of one service, such as ListAndWatch."""

    def __init__(self) -> None:
        self._scopes: dict[anyio.CancelScope, asyncio.Task[None] | None] = {}
        self._opened = anyio.Event()
        self._changed = anyio.Event()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Run a call's body until body or service ends; the call then returns normally."""
        with anyio.CancelScope() as scope:
            self._scopes[scope] = asyncio.current_task()
            self._opened.set()
            try:
                yield
            finally:
                del self._scopes[scope]
                self._changed.set()
                self._changed = anyio.Event()

    @property
    def tasks(self) -> frozenset[asyncio.Task[None] | None]:
        """The tasks of these calls."""
        return frozenset(self._scopes.values())

    async def wait_opened(self) -> None:
        """Wait for the first call; return at once if there was one."""
        await self._opened.wait()

    async def wait_ended(self) -> None:
        """Wait until no call runs."""
        while self._scopes:
            await self._changed.wait()

    def cancel(self) -> None:
        """Cancel all calls."""
        for scope in list(self._scopes):
            scope.cancel()


class _Handler(Handler):
    """grpclib's handler for one connection."""

    @property
    def running(self) -> frozenset[asyncio.Task[None]]:
        """The calls that have not ended, those that were cancelled too."""
        calls = {*self._tasks.values(), *self._cancelled}
        return frozenset(task for task in calls if not task.done())


class _Connection(H2Protocol):
    """One connection, tracked while it is open."""

    def __init__(self, handler: _Handler, connections: "Connections") -> None:
        super().__init__(handler, _GRPC, _H2)
        self.call_handler = handler
        self._connections = connections
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - a socket's is one
        self._transport = transport
        super().connection_made(BatchedTransport(transport))
        self._connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._connections.discard(self)

    def abort(self) -> None:
        """Close the connection without sending the rest of its data."""
        if self._transport is not None:
            self._transport.abort()


class Connections:
    """All connections of one service."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        self._methods = dict(methods)
        self._open: set[_Connection] = set()
        self._left: set[asyncio.Task[None]] = set()
        """Calls whose connection is gone."""
        self._changed = anyio.Event()

    def new_connection(self) -> _Connection:
        """Create the protocol of a new connection."""
        handler = _Handler(self._methods, RawCodec(), None, _DispatchServerEvents())
        return _Connection(handler, self)

    def add(self, connection: _Connection) -> None:
        """Count an open connection."""
        self._open.add(connection)

    def discard(self, connection: _Connection) -> None:
        """Count a closed connection."""
        self._open.discard(connection)
        self._left = {task for task in self._left if not task.done()}
        self._left |= connection.call_handler.running
        self._changed.set()
        self._changed = anyio.Event()

    async def wait_closed(self) -> None:
        """Wait until no connection is open."""
        while self._open:
            await self._changed.wait()

    async def wait_answered(self, calls: StreamingCalls) -> None:
        """Wait until all calls but the streaming ones are answered."""
        running = self._left.union(*(connection.call_handler.running for connection in self._open))
        if unary := running - calls.tasks:
            await asyncio.wait(unary)

    def abort(self) -> None:
        """Close all connections without sending the rest of their data."""
        for connection in list(self._open):
            connection.abort()


async def answer_alone(answer: Coroutine[Any, Any, bytes]) -> bytes:
    """Answer a call in a task of its own, which ends before this returns.

    grpclib cancels the task of a call whose connection is lost, and asyncio's cancellation knows no
    shield of anyio: it leaves a thread that writes a file to itself, and unlocks its lock. So that
    cancellation becomes one of a scope here.
    """
    scope = anyio.CancelScope()

    async def run() -> bytes:
        with scope:
            return await answer
        raise asyncio.CancelledError

    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12):  # most answers wait for nothing: they are there at once
        task = asyncio.Task(run(), loop=loop, eager_start=True)
    else:
        task = loop.create_task(run())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        scope.cancel()
        while not task.done():
            with suppress(asyncio.CancelledError):  # at a deadline, and then with the connection
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # nobody else asks for it
        raise


def unary_method(answer: Callable[[bytes], Coroutine[Any, Any, bytes]]) -> Method:
    """Return the method of a unary call, whose messages are encoded.

    What `answer` raises is the call's gRPC status.
    """

    async def call(stream: "Stream[bytes, bytes]") -> None:
        request = await stream.recv_message()
        try:
            reply = await answer_alone(answer(request or b""))
        except Exception as error:
            raise to_grpc_error(error) from error
        await stream.send_message(reply)

    return Method(call, Cardinality.UNARY_UNARY, bytes, bytes)


@asynccontextmanager
async def serve_grpc(
    path: Path,
    methods: Mapping[str, Method],
    calls: StreamingCalls,
    linger: float = TIMING.linger,
) -> AsyncIterator[Connections]:
    """Serve on a socket file that only root may open, until the block ends.

    The block gets the open connections.

    On leaving, in this order:

    1. The file is removed: no new connection comes.
    2. Unary calls have `linger` seconds to be answered, since a kubelet whose list ends reads no
       more answers.
    3. Streaming calls end with a status.
    4. Peers have `linger` seconds to close their connections, which shows that they saw the end.
    5. The other connections are aborted: their callers get an error instead of no answer. What
       still works for them has `linger` seconds to end.

    Raises:
        OSError: the socket cannot be bound; a path of more than 107 bytes cannot.
    """
    connections = Connections(methods)
    loop = asyncio.get_running_loop()

    with unix_listener(path, mode=0o600, backlog=_BACKLOG) as listener:
        identity = file_identity(path)
        server = await loop.create_unix_server(
            connections.new_connection, sock=listener, start_serving=False
        )
        try:
            # Within the block: a start that is cancelled leaves the listener with the event loop,
            # which then waits in vain at the next socket with that file descriptor.
            await server.start_serving()
            yield connections
        finally:
            remove_socket(path, identity)
            with anyio.CancelScope(shield=True):
                with anyio.move_on_after(linger):
                    await connections.wait_answered(calls)
                calls.cancel()
                await stop_accepting(listener)
                server.close()
                with anyio.move_on_after(linger):
                    await connections.wait_closed()
                connections.abort()
                await connections.wait_closed()
                with anyio.move_on_after(linger):
                    await connections.wait_answered(calls)


async def stop_accepting(listener: _HasFileno) -> None:
    """Stop accepting, and wait until the last connections reach their protocols.

    asyncio loses a connection, left open, that it accepted in the loop iteration in which its
    server closes; and it calls `connection_made` two iterations after accepting.
    """
    asyncio.get_running_loop().remove_reader(listener.fileno())
    for _ in range(3):
        await anyio.lowlevel.checkpoint()
