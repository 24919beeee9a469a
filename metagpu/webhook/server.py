"""The HTTPS server of reviews: its connections, and their limits.

A misbehaving client hurts only itself: connections are accepted at a limited rate, a handshake and
a body are limited in time, a body in size and all bodies together in memory. Of too many
connections the oldest of those that have had no answer is closed, of the source that has most: the
API server's own have had some.
"""

import asyncio
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, closing, suppress

import anyio
import structlog

from metagpu.core.errors import AddressUnusable
from metagpu.core.runtime.listener import accept
from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.plugins.http.address import ListenAddress
from metagpu.plugins.http.server import bind_address, bind_problem
from metagpu.webhook.connection import CLOSING, ReviewConnection
from metagpu.webhook.settings import WebhookLimits, WebhookTiming
from metagpu.webhook.translator import Outcome, ReviewAnswer

log = structlog.get_logger()


class _Tls(SSLProtocol):
    """TLS with a buffer of one record; asyncio's takes 256 KiB of each connection."""

    max_size = 16 * 1024


class ReviewServer:
    """Answers POST requests to `/mutate`; the answer is computed at once, from memory.

    Args:
        context: the context of TLS.
        answer: computes the answer to the body of a request.
        record: takes the outcome of each request, and its seconds.

    Attributes:
        port: the port that is bound now, 0 without one.
        reading: bytes that have come of large bodies that are not whole yet.
        ending: whether each answer is its connection's last.
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
        self.answer = answer
        self.record = record
        self.timing = timing
        self.limits = limits
        self.reading = 0
        self.ending = False
        self._open: dict[ReviewConnection, anyio.CancelScope] = {}
        """The connections, and their handshakes; those that are idle longest come first."""
        self._all_gone = anyio.Event()
        self._shaking: set[asyncio.Task[None]] = set()
        """The handshakes, which go on while the server is ending, as their connections do."""

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
            listener = bind_address(self._address, self.timing.handshake)
        except OSError as error:
            raise AddressUnusable(bind_problem(self._address, error, "--address")) from error
        with closing(listener):
            self.port = listener.getsockname()[1]
            log.info("reviews served", address=str(ListenAddress(self._address.host, self.port)))
            try:
                await self._accept(listener)
            finally:
                self.ending = True
                with anyio.CancelScope(shield=True):
                    with anyio.move_on_after(self.timing.drain):
                        await self._accept(listener)
                    await self._close_all()
                self.port = 0

    def on_answered(self, connection: ReviewConnection) -> None:
        """Put a connection behind those that are idle longer."""
        if connection in self._open:
            self._open[connection] = self._open.pop(connection)

    def on_lost(self, connection: ReviewConnection) -> None:
        """Forget a connection."""
        self._open.pop(connection, None)
        if not self._open:
            self._all_gone.set()

    async def _accept(self, listener: socket.socket) -> None:
        rate = TokenBucket(self.limits.burst, self.limits.rate)

        async with aclosing(accept(listener, rate)) as accepted:
            async for accepted_one, source in accepted:
                if len(self._open) >= self.limits.connections:
                    self._close(self._dispensable())
                connection = ReviewConnection(self, source)
                self._open[connection] = anyio.CancelScope()
                shaking = asyncio.create_task(self._shake_hands(accepted_one, connection))
                self._shaking.add(shaking)
                shaking.add_done_callback(self._shaking.discard)

    def _dispensable(self) -> ReviewConnection:
        """Return the connection to close for another one, of the source that has most.

        Those count that have had no answer: the API server's own wait for theirs a moment.
        """
        candidates = [it for it in self._open if not it.answered] or [*self._open]
        counts = Counter(it.source for it in candidates)
        return min(candidates, key=lambda it: (-counts[it.source], it.busy))

    async def _shake_hands(self, accepted: socket.socket, connection: ReviewConnection) -> None:
        """Start a connection, which goes on by itself."""
        loop = asyncio.get_running_loop()
        shaken: asyncio.Future[None] = loop.create_future()
        tls = _Tls(
            loop,
            connection,
            self._context,
            shaken,
            server_side=True,
            ssl_handshake_timeout=self.timing.handshake,
            ssl_shutdown_timeout=CLOSING,
        )
        try:
            with self._open[connection], suppress(OSError, TimeoutError):
                transport, _ = await loop.connect_accepted_socket(lambda: tls, accepted)
                try:
                    await shaken
                except BaseException:
                    transport.abort()
                    raise
        finally:
            if not connection.connected:
                self.on_lost(connection)
                accepted.close()

    def _close(self, connection: ReviewConnection) -> None:
        """End a connection at once, or its handshake."""
        self._open.pop(connection).cancel()
        connection.abort()

    async def _close_all(self) -> None:
        """End all connections; a body that is on its way gets a moment."""
        for connection in [it for it in self._open if not it.connected]:
            self._close(connection)
        for connection in [it for it in self._open if not it.busy]:
            connection.close()
        self._all_gone = anyio.Event()
        with anyio.move_on_after(CLOSING):
            if self._open:
                await self._all_gone.wait()
        for connection in [*self._open]:
            self._close(connection)
        if self._shaking:
            await asyncio.wait(self._shaking)
