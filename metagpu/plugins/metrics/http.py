"""A few pages over HTTP: h11 knows the protocol, the limits are here.

Whatever a client does costs the client: it is accepted when its turn comes, has little time and
room for its request, one request for each connection, and when there are too many connections the
oldest has to go. So who asks and reads is served, whatever others do.
"""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing, suppress
from http import HTTPStatus
from typing import Final

import anyio
import h11
import msgspec
import structlog

from metagpu.core.allowance import Allowance
from metagpu.core.errors import why
from metagpu.plugins.metrics.address import Address

CONNECTIONS: Final = 32
REQUEST_LIMIT: Final = 16 * 1024
"""Bytes of a request's line and headers."""
REQUEST_TIME: Final = 5.0
"""Seconds a client has for its request."""
READING_TIME: Final = 10.0
"""Seconds it has to read the answer: Prometheus gives up after as many."""
RETRY: Final = 5.0
"""Seconds between two tries to have the port."""
PLAIN: Final = "text/plain; charset=utf-8"

_ACCEPTED_AT_ONCE: Final = 50
_ACCEPTED_A_SECOND: Final = 200.0
"""Of everybody: the others wait in the kernel, and cost nothing there."""
_AFTER_FAILURE: Final = 1.0
_LINGER: Final = 1.0
"""Seconds a client has to hang up once it is answered."""
_CHUNK: Final = 16 * 1024

log = structlog.get_logger()


class Response(msgspec.Struct, frozen=True):
    """An answer; `content` is its type."""

    status: HTTPStatus
    body: bytes
    content: str = PLAIN


Page = Callable[[], Awaitable[Response]]


class PageServer:
    """Serves pages by their paths, to GET and HEAD alone.

    Attributes:
        port: where it listens now, 0 while it does not.
    """

    def __init__(self, address: Address, pages: Mapping[str, Page]) -> None:
        self.port = 0
        self._address = address
        self._pages = pages
        self._open: dict[socket.socket, anyio.CancelScope] = {}

    async def run(self) -> None:
        """Serve until cancelled; a port that cannot be had is tried again."""
        told = ""

        while True:
            try:
                listener = _bound(self._address)
            except OSError as error:
                if (why := _hindrance(self._address, error)) != told:
                    told = why
                    log.error("metrics are not served; trying again", why=why, every=f"{RETRY:g}s")
                await anyio.sleep(RETRY)
                continue

            with closing(listener):
                self.port = listener.getsockname()[1]
                log.info("metrics are served", address=str(Address(self._address.host, self.port)))
                try:
                    await self._accept(listener)
                finally:
                    self.port = 0

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        turns = Allowance(_ACCEPTED_AT_ONCE, _ACCEPTED_A_SECOND)

        async with anyio.create_task_group() as group:
            while True:
                await anyio.sleep(turns.reserve(loop.time()))
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:
                    # We have no descriptor left, or the client no patience. Neither is an end.
                    log.warning("a connection was not taken", error=why(error))
                    await anyio.sleep(_AFTER_FAILURE)
                    continue
                if len(self._open) >= CONNECTIONS:
                    oldest = next(iter(self._open))
                    self._open.pop(oldest).cancel()
                scope = self._open[connection] = anyio.CancelScope()
                group.start_soon(self._converse, connection, scope)

    async def _converse(self, connection: socket.socket, scope: anyio.CancelScope) -> None:
        """Answer one request; whatever goes wrong is the client's matter, or a line in the log."""
        with closing(connection):
            try:
                with scope:
                    await self._answer(connection)
            except (OSError, EOFError, TimeoutError):
                pass  # it has gone, or does not read
            except Exception:
                log.exception("a request over HTTP failed")
            finally:
                self._open.pop(connection, None)

    async def _answer(self, connection: socket.socket) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_LIMIT)
        head = False

        try:
            with anyio.fail_after(REQUEST_TIME):
                request = await _request(http, connection)
            head = request.method == b"HEAD"
            response = await self._response(request)
        except h11.RemoteProtocolError as error:
            response = _plain(HTTPStatus(error.error_status_hint), str(error))
        except TimeoutError:
            text = f"no request came within {REQUEST_TIME:g} s"
            response = _plain(HTTPStatus.REQUEST_TIMEOUT, text)

        with anyio.fail_after(READING_TIME):
            data = _packed(http, response, head=head)
            await asyncio.get_running_loop().sock_sendall(connection, data)
        await _hang_up(connection)

    async def _response(self, request: h11.Request) -> Response:
        path = request.target.partition(b"?")[0].decode("ascii")
        page = self._pages.get(path)

        if request.method not in (b"GET", b"HEAD"):
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered")
        if page is None:
            known = ", ".join(self._pages)
            return _plain(HTTPStatus.NOT_FOUND, f"no such page; there are: {known}")
        try:
            return await page()
        except Exception:
            log.exception("a page could not be made", page=path)
            text = "metagpu failed; its log has the details"
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR, text)


async def _request(http: h11.Connection, connection: socket.socket) -> h11.Request:
    """Read a request's line and headers; a body is not looked at.

    Raises:
        h11.RemoteProtocolError: if it is none, or too long.
        EOFError: if the client hangs up.
    """
    while True:
        event = http.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            raise EOFError
        http.receive_data(await asyncio.get_running_loop().sock_recv(connection, _CHUNK))


def _packed(http: h11.Connection, response: Response, *, head: bool) -> bytes:
    headers = [
        ("content-type", response.content),
        ("content-length", str(len(response.body))),
        ("connection", "close"),
    ]
    if response.status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append(("allow", "GET, HEAD"))
    status = response.status

    parts = [
        http.send(h11.Response(status_code=status, headers=headers, reason=status.phrase.encode()))
    ]
    if not head:
        parts.append(http.send(h11.Data(data=response.body)))
    parts.append(http.send(h11.EndOfMessage()))
    return b"".join(part for part in parts if part)


async def _hang_up(connection: socket.socket) -> None:
    """Say that nothing follows, and read what is left: closed with that, our answer is lost."""
    loop = asyncio.get_running_loop()

    with suppress(OSError), anyio.move_on_after(_LINGER):
        connection.shutdown(socket.SHUT_WR)
        while await loop.sock_recv(connection, _CHUNK):
            pass


def _plain(status: HTTPStatus, text: str) -> Response:
    return Response(status, f"{text}\n".encode())


def _bound(address: Address) -> socket.socket:
    """Listen on an address; on all of both protocols, or of the older where that is all there is.

    Raises:
        OSError: if it cannot be had.
    """
    try:
        return _listening(address.host, address.port, v6=address.is_v6)
    except OSError as error:
        if address.host or error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        return _listening("", address.port, v6=False)


def _listening(host: str, port: int, *, v6: bool) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_STREAM)

    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if v6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, bool(host))
        listener.bind((host, port))
        listener.listen(CONNECTIONS)
        listener.setblocking(False)  # noqa: FBT003 - the socket module's signature
    except OSError:
        listener.close()
        raise
    return listener


def _hindrance(address: Address, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            why = "another program has this port; stop it, or give --metrics another port"
        case errno.EADDRNOTAVAIL:
            why = "this machine has no such address; give --metrics one that it has"
        case errno.EACCES:
            why = "only root may have this port; give --metrics one above 1023"
        case _:
            why = error.strerror or str(error)
    return f"{address}: {why}"
