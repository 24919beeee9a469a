"""A small HTTP server: h11 implements the protocol, this module the limits.

A misbehaving client hurts only itself: connections are accepted at a limited rate, one of each
address in turn; a request is limited in time and size, a connection has one request, and at too
many connections the oldest one of the address that has most is closed. So a client that sends its
request and reads the response is always served. Responses without an end are counted apart: the
oldest of them stays, and one too many is refused. Requests of about the same time share one
computation (`SingleFlight`).
"""

import asyncio
import errno
import math
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, closing, suppress
from http import HTTPStatus
from typing import Final, Generic, NamedTuple, TypeVar

import anyio
import h11
import structlog

from metagpu.core.errors import AddressUnusable
from metagpu.core.runtime.listener import accept
from metagpu.core.runtime.rate_limit import LogOnce, TokenBucket
from metagpu.plugins.http.address import HttpTiming, ListenAddress
from metagpu.plugins.http.messages import (
    Headers,
    HttpRequest,
    HttpResponse,
    HttpStream,
    encode_head,
    encode_response,
    plain,
)

CONNECTIONS: Final = 32
BACKLOG: Final = 1024
"""Connections that wait in the kernel: the system drops more, and their clients try a second later.
"""
REQUEST_LIMIT: Final = 16 * 1024
"""Bytes of a request's line and headers."""
STREAMS: Final = 16
"""Responses without an end at a time."""

_ACCEPT_BURST: Final = 50
_ACCEPT_RATE: Final = 200.0
"""Connections a second, of all clients: the others wait in the kernel, where they cost nothing."""
_LINGER: Final = 1.0
"""Seconds for a client to close the connection after its response."""
_CHUNK: Final = 16 * 1024
_DEAD_AFTER: Final = 30_000
"""Milliseconds after which the kernel closes a stream whose client confirms nothing."""

log = structlog.get_logger()


Page = Callable[[HttpRequest], Awaitable[HttpResponse | HttpStream]]


class _Open(NamedTuple):
    """A connection that is open: its client's address, and the scope that ends it."""

    source: str
    scope: anyio.CancelScope


class PageServer:
    """Serves pages by their paths, for GET and HEAD.

    Args:
        name: what is served, for messages; `--NAME` is the option that gives the address.
        headers: the headers of all responses, beside those of HTTP itself.

    Attributes:
        port: the port that is bound now, 0 without one.
    """

    def __init__(
        self,
        address: ListenAddress,
        pages: Mapping[str, Page],
        timing: HttpTiming = HttpTiming(),  # noqa: B008 - frozen
        *,
        name: str = "metrics",
        headers: Headers = (),
    ) -> None:
        self.port = 0
        self._name = name
        self._address = address
        self._pages = pages
        self._timing = timing
        self._headers = headers
        self._open: dict[socket.socket, _Open] = {}
        self._streams = 0
        self._listener: socket.socket | None = None

    def bind(self, option: str) -> None:
        """Bind the port for `run`, which would wait for one that is taken.

        Raises:
            MetagpuError: the port cannot be bound; `option` gives another one.
        """
        try:
            self._listener = bind_address(self._address, self._timing.silence)
        except OSError as error:
            raise AddressUnusable(bind_problem(self._address, error, option)) from error
        self.port = self._listener.getsockname()[1]

    async def run(self) -> None:
        """Serve until cancelled; a port that cannot be bound is tried again."""
        logged, retry = LogOnce(), self._timing.retry_period
        served = f"{self._name} served"

        while True:
            try:
                listener = self._listener or bind_address(self._address, self._timing.silence)
            except OSError as error:
                problem = bind_problem(self._address, error, f"--{self._name}")
                if logged.is_new(self, problem):
                    log.error(
                        "http port unavailable",
                        server=self._name,
                        error=problem,
                        retry=f"{retry:g}s",
                    )
                await anyio.sleep(retry)
                continue

            self._listener = None
            with closing(listener):
                address = ListenAddress(self._address.host, listener.getsockname()[1])
                log.info(served, address=str(address))
                await self._serve(listener)

    async def _serve(self, listener: socket.socket) -> None:
        self.port = listener.getsockname()[1]
        try:
            await self._accept(listener)
        finally:
            self.port = 0

    async def _accept(self, listener: socket.socket) -> None:
        rate = TokenBucket(_ACCEPT_BURST, _ACCEPT_RATE)

        async with anyio.create_task_group() as group, aclosing(accept(listener, rate)) as accepted:
            async for connection, source in accepted:
                if len(self._open) >= CONNECTIONS:
                    counts = Counter(entry.source for entry in self._open.values())
                    oldest = max(self._open, key=lambda key: counts[self._open[key].source])
                    self._open.pop(oldest).scope.cancel()
                scope = anyio.CancelScope()
                self._open[connection] = _Open(source, scope)
                group.start_soon(self._handle, connection, source, scope)

    async def _handle(
        self, connection: socket.socket, source: str, scope: anyio.CancelScope
    ) -> None:
        """Answer one request; an error of ours is logged, and ends nothing else."""
        with closing(connection):
            try:
                with scope:
                    await self._answer(connection, source)
            except (OSError, EOFError, TimeoutError):
                pass  # the client has gone, or does not read
            except Exception:
                log.exception("http request failed")
            finally:
                self._open.pop(connection, None)

    async def _answer(self, connection: socket.socket, source: str) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_LIMIT)
        request: h11.Request | None = None

        try:
            with anyio.fail_after(self._timing.request_timeout):
                request = await _read_request(http, connection)
            response = await self._response(request, source)
        except h11.RemoteProtocolError as error:
            response = plain(HTTPStatus(error.error_status_hint), str(error))
        except TimeoutError:
            text = f"no request arrived within {self._timing.request_timeout:g} s"
            response = plain(HTTPStatus.REQUEST_TIMEOUT, text)

        if isinstance(response, HttpStream):
            await self._stream(http, connection, response)
            return
        await self._send(connection, encode_response(http, response, request, self._headers))
        await _close(connection)

    async def _send(self, connection: socket.socket, data: bytes) -> None:
        """Send all of it; a client that does not read it in time raises a `TimeoutError`."""
        with anyio.fail_after(self._timing.response_timeout):
            await asyncio.get_running_loop().sock_sendall(connection, data)

    async def _stream(
        self, http: h11.Connection, connection: socket.socket, stream: HttpStream
    ) -> None:
        """Send parts until the client closes the connection, or does not read them."""
        self._open.pop(connection, None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER)
        self._streams += 1
        try:
            await self._send(connection, encode_head(http, stream, self._headers))
            async with anyio.create_task_group() as group:
                group.start_soon(self._send_parts, http, connection, stream, group.cancel_scope)
                with suppress(OSError):
                    # A client has nothing to say here: what comes, or the end, ends the stream.
                    await asyncio.get_running_loop().sock_recv(connection, 1)
                group.cancel_scope.cancel()
        finally:
            self._streams -= 1

    async def _send_parts(
        self,
        http: h11.Connection,
        connection: socket.socket,
        stream: HttpStream,
        scope: anyio.CancelScope,
    ) -> None:
        with suppress(OSError, TimeoutError):
            async with aclosing(stream.parts()) as parts:
                async for part in parts:
                    await self._send(connection, http.send(h11.Data(data=part)) or b"")
        scope.cancel()

    async def _response(self, request: h11.Request, source: str) -> HttpResponse | HttpStream:
        path = request.target.partition(b"?")[0].decode("ascii")
        page = self._pages.get(path)

        if request.method not in (b"GET", b"HEAD"):
            return plain(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are allowed")
        if page is None:
            known = ", ".join(self._pages)
            return plain(HTTPStatus.NOT_FOUND, f"no such page; the pages are: {known}")
        try:
            response = await page(HttpRequest.of(request, source))
        except Exception:
            log.exception("page failed", page=path)
            text = "metagpu failed; its log has the details"
            return plain(HTTPStatus.INTERNAL_SERVER_ERROR, text)
        if isinstance(response, HttpStream) and self._streams >= STREAMS:
            text = f"{STREAMS} clients follow the changes already; try again later"
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, text)
        if isinstance(response, HttpStream) and request.method == b"HEAD":
            return HttpResponse(HTTPStatus.OK, b"", response.content)
        return response


async def _read_request(http: h11.Connection, connection: socket.socket) -> h11.Request:
    """Read the line and the headers of a request; its body is ignored.

    Raises:
        h11.RemoteProtocolError: the data are no request, or too long.
        EOFError: the client closes the connection.
    """
    while True:
        event = http.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            raise EOFError
        http.receive_data(await asyncio.get_running_loop().sock_recv(connection, _CHUNK))


async def _close(connection: socket.socket) -> None:
    """Shut down, then read the rest: unread data would lose our response."""
    loop = asyncio.get_running_loop()

    with suppress(OSError), anyio.move_on_after(_LINGER):
        connection.shutdown(socket.SHUT_WR)
        while await loop.sock_recv(connection, _CHUNK):
            pass


def bind_address(address: ListenAddress, silence: int) -> socket.socket:
    """Listen on an address; "all" means IPv6 and IPv4, or IPv4 alone.

    A client that sends nothing waits in the kernel for about `silence` seconds, out of the way of
    clients that send a request.

    Raises:
        OSError: the address cannot be bound.
    """
    try:
        return _listen(address.host, address.port, silence, v6=address.is_v6)
    except OSError as error:
        if address.host or error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        return _listen("", address.port, silence, v6=False)


def _listen(host: str, port: int, silence: int, *, v6: bool) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_STREAM)

    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if v6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, bool(host))
        listener.bind((host, port))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, silence)
        listener.listen(BACKLOG)
        listener.setblocking(False)  # noqa: FBT003 - the socket module's signature
    except OSError:
        listener.close()
        raise
    return listener


def bind_problem(address: ListenAddress, error: OSError, option: str) -> str:
    """Return why an address cannot be bound, and the fix: another one by `option`."""
    match error.errno:
        case errno.EADDRINUSE:
            reason = f"another program has this port; stop it, or give {option} another port"
        case errno.EADDRNOTAVAIL:
            reason = f"this machine has no such address; give {option} one that it has"
        case errno.EACCES:
            reason = f"only root may bind this port; give {option} one above 1023"
        case _:
            reason = error.strerror or str(error)
    return f"{address}: {reason}"


ValueT = TypeVar("ValueT")
_NOTHING: Final = -1


class SingleFlight(Generic[ValueT]):
    """Computes a value on request, in a task of its own, one computation at a time.

    A caller may go away meanwhile: the computation goes on for the others. Frequent callers share
    a value, so that the work does not grow with their number.

    Args:
        name: the name of the value in log messages.
        compute: computes the value; a failure is logged, and clears the value.
        age: seconds during which callers share a value.
    """

    def __init__(self, name: str, compute: Callable[[], Awaitable[ValueT]], age: float) -> None:
        self._name = name
        self._compute = compute
        self._age = age
        self._value: ValueT | None = None
        self._at = -math.inf
        self._version = 0
        self._computing = self._done = _NOTHING
        self._requested = anyio.Event()
        self._computed = anyio.Event()

    async def run(self) -> None:
        """Compute values on request, until cancelled."""
        while True:
            await self._requested.wait()
            self._requested, version = anyio.Event(), self._version
            self._computing = version
            try:
                self._value = await self._compute()
            except Exception:
                log.exception("computation failed", value=self._name)
                self._value = None
            finally:
                self._computing = _NOTHING
            self._done, self._at = version, anyio.current_time()
            self._computed.set()
            self._computed = anyio.Event()

    def invalidate(self) -> None:
        """Make callers from now on wait for a value that is computed from now on."""
        self._version += 1

    async def get(self, max_wait: float = math.inf) -> ValueT | None:
        """Return a fresh value, or after `max_wait` seconds an older one, or `None`."""
        wanted = self._version
        if anyio.current_time() - self._at >= self._age or self._done < wanted:
            with anyio.move_on_after(max_wait):
                await self._next(wanted)
        return self._value

    async def _next(self, version: int) -> None:
        """Wait for the next value of a version, or of a later one."""
        while True:
            if self._computing < version:
                self._requested.set()
            await self._computed.wait()
            if self._done >= version:
                return
