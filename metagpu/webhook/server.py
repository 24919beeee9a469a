"""The HTTPS server of reviews: aiohttp has the protocol, this module the limits.

A misbehaving client hurts only itself: connections are accepted at a limited rate, a handshake and
a body are limited in time, a body in size and all bodies together in memory. Of too many
connections the oldest that has had no answer is closed: the API server's own have had some.
"""

import asyncio
import logging
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from contextlib import aclosing, closing, suppress
from http import HTTPStatus
from time import perf_counter
from typing import Any, Final, cast

import anyio
import structlog
from aiohttp import StreamReader, web

from metagpu.core.errors import MetagpuError
from metagpu.core.runtime.listener import accept
from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.plugins.http.address import ListenAddress
from metagpu.plugins.http.server import bind_address, bind_problem
from metagpu.webhook.settings import WebhookLimits, WebhookTiming
from metagpu.webhook.translator import Outcome, ReviewAnswer

PATH: Final = "/mutate"
_JSON: Final = "application/json"
_CLOSING: Final = 1.0
"""Seconds for a request that is being answered, or a client that is to be gone, at an end."""
_SILENT: Final = logging.getLogger("metagpu.webhook.aiohttp")
_SILENT.disabled = True  # aiohttp logs a line for each malformed request

log = structlog.get_logger()


class _Tls(SSLProtocol):
    """TLS with a buffer of one record; asyncio's takes 256 KiB of each connection."""

    max_size = 16 * 1024


class _Client:
    """A connection from the start of its handshake to its end.

    Attributes:
        busy: whether a request has come, and not all of its answer is there.
        answered: whether it has had an answer to a review.
    """

    def __init__(self) -> None:
        self.busy = False
        self.answered = False
        self.scope = anyio.CancelScope()
        self.handler: _ClientHandler | None = None

    def close(self) -> None:
        """End the connection, whatever it does."""
        self.scope.cancel()
        if self.handler is not None:
            self.handler.force_close()


class _ClientHandler(web.RequestHandler):
    """The requests of a connection; its end ends the client."""

    __slots__ = ("_ended", "client")

    def __init__(
        self,
        client: _Client,
        ended: Callable[[_Client], None],
        *args: Any,  # noqa: ANN401 - aiohttp's own
        **options: Any,  # noqa: ANN401 - aiohttp's own
    ) -> None:
        super().__init__(*args, **options)
        self.client = client
        self._ended = ended

    def connection_lost(self, exc: BaseException | None) -> None:
        """Note the end of the connection."""
        self._ended(self.client)
        super().connection_lost(exc)


class ReviewServer:
    """Answers POST requests to `/mutate`; the answer is computed at once, from memory.

    Args:
        context: the context of TLS.
        answer: computes the answer to the body of a request.
        record: takes the outcome of each request, and its seconds.

    Attributes:
        port: the port that is bound now, 0 without one.
        reading: bytes that have come of large bodies that are not whole yet.
    """

    def __init__(
        self,
        address: ListenAddress,
        context: ssl.SSLContext,
        answer: Callable[[bytes], ReviewAnswer],
        *,
        record: Callable[[Outcome, float], None] = lambda *_: None,
        timing: WebhookTiming = WebhookTiming(),  # noqa: B008 - frozen
        limits: WebhookLimits = WebhookLimits(),  # noqa: B008 - frozen
    ) -> None:
        self.port = 0
        self._address = address
        self._context = context
        self._answer = answer
        self._record = record
        self._timing = timing
        self._limits = limits
        self.reading = 0
        self._ending = False
        self._open: dict[_Client, None] = {}
        """The connections; those that are idle longest come first."""

    @property
    def connections(self) -> int:
        """The number of open connections, handshakes included."""
        return len(self._open)

    @property
    def busy(self) -> int:
        """The number of requests that have come and are not answered yet."""
        return sum(it.busy for it in self._open)

    async def run(self) -> None:
        """Serve until cancelled, and for the time of the drain after that.

        Raises:
            MetagpuError: the port cannot be bound.
        """
        try:
            listener = bind_address(self._address, self._timing.handshake)
        except OSError as error:
            raise MetagpuError(bind_problem(self._address, error, "--address")) from error
        server = web.Server(self._handle, request_factory=_request, access_log=None)
        with closing(listener):
            self.port = listener.getsockname()[1]
            log.info("reviews served", address=str(ListenAddress(self._address.host, self.port)))
            try:
                await self._accept(listener, server)
            finally:
                self._ending = True
                with anyio.CancelScope(shield=True):
                    with anyio.move_on_after(self._timing.drain):
                        await self._accept(listener, server)
                    await server.shutdown(_CLOSING)
                self.port = 0

    async def _accept(self, listener: socket.socket, server: web.Server) -> None:
        rate = TokenBucket(self._limits.burst, self._limits.rate)

        async with anyio.create_task_group() as group, aclosing(accept(listener, rate)) as accepted:
            async for connection in accepted:
                if len(self._open) >= self._limits.connections:
                    least = min(self._open, key=lambda it: (it.busy, it.answered))
                    self._forget(least)
                    least.close()
                client = _Client()
                self._open[client] = None
                group.start_soon(self._shake_hands, connection, server, client)

    async def _shake_hands(
        self, connection: socket.socket, server: web.Server, client: _Client
    ) -> None:
        """Start a connection; aiohttp has it from then on."""
        loop = asyncio.get_running_loop()
        shaken: asyncio.Future[None] = loop.create_future()
        handler = self._handler(server, client)
        tls = _Tls(
            loop,
            handler,
            self._context,
            shaken,
            server_side=True,
            ssl_handshake_timeout=self._timing.handshake,
            ssl_shutdown_timeout=_CLOSING,
        )
        with client.scope, suppress(OSError, TimeoutError):
            transport, _ = await loop.connect_accepted_socket(lambda: tls, connection)
            try:
                await shaken
            except BaseException:
                transport.abort()
                raise
            if handler.transport is not None:
                return
        self._forget(client)
        connection.close()

    def _handler(self, server: web.Server, client: _Client) -> _ClientHandler:
        client.handler = _ClientHandler(
            client,
            self._forget,
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=self._timing.keep_alive,
            lingering_time=_CLOSING,
            auto_decompress=False,
            logger=_SILENT,
            access_log=None,
        )
        return client.handler

    def _forget(self, client: _Client) -> None:
        self._open.pop(client, None)

    # --- requests ---------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        """Answer a request; an error of ours is logged, and ends nothing else."""
        began, client = perf_counter(), cast("_ClientHandler", request.protocol).client
        client.busy = True
        try:
            found = await self._respond(request)
        except (OSError, TimeoutError, web.HTTPException, web.RequestPayloadError):
            found = ReviewAnswer(Outcome.MALFORMED, b"", "the body did not arrive as announced")
        except Exception:
            log.exception("review failed")
            self._record(Outcome.FAILED, perf_counter() - began)
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR, "metagpu failed; its log says how")
        finally:
            client.busy = False
            if client in self._open:  # behind those that are idle longer
                self._open[client] = self._open.pop(client)
        if isinstance(found, web.Response):
            return found
        self._record(found.outcome, perf_counter() - began)
        if not found.body:
            return _plain(HTTPStatus.BAD_REQUEST, found.problem)
        client.answered = True
        response = web.Response(body=found.body, content_type=_JSON)
        if self._ending:
            response.force_close()  # no request shall meet the end of its connection
        return response

    async def _respond(self, request: web.BaseRequest) -> ReviewAnswer | web.Response:
        length, limits = request.content_length, self._limits
        if request.path != PATH:
            return _plain(HTTPStatus.NOT_FOUND, f"no such page; reviews are sent to {PATH}")
        if request.method != "POST":
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED, "only POST is allowed")
        if length is None:
            return _plain(HTTPStatus.LENGTH_REQUIRED, "the header Content-Length is missing")
        if length > limits.body:
            text = f"{length} bytes are too many; {limits.body} are allowed"
            return _plain(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        with anyio.fail_after(self._timing.request):
            body = await self._read(request.content, counted=length > limits.small)
        if body is None:
            return _plain(HTTPStatus.SERVICE_UNAVAILABLE, "too much is being read already")
        return self._answer(body)

    async def _read(self, content: StreamReader, *, counted: bool) -> bytes | None:
        """Return a body, `None` where that and others have too many bytes already."""
        body = bytearray()
        try:
            while chunk := await content.readany():
                body += chunk
                if counted:
                    self.reading += len(chunk)
                    if self.reading > self._limits.bodies:
                        return None
            return bytes(body)
        finally:
            if counted:
                self.reading -= len(body)


def _request(*parts: Any) -> web.BaseRequest:  # noqa: ANN401 - aiohttp's own
    message, payload, protocol, writer, task = parts
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop)


def _plain(status: HTTPStatus, text: str) -> web.Response:
    return web.Response(status=status, text=f"{text}\n")
