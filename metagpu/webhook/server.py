"""The HTTPS server of reviews: its certificate, its connections, and their limits.

A misbehaving client hurts only itself: connections are accepted at a limited rate, a handshake and
a body are limited in time, a body in size and all bodies together in memory. Of too many
connections, one of the source that has most is closed: the oldest of those without an answer. The
source whose answers have taken the least time has the next answer.

The certificate is read from files whenever they change. A pair that cannot be used changes nothing:
the last good one stays in force.
"""

import asyncio
import socket
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing, closing, suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Final, NamedTuple

import anyio
import structlog
from anyio import to_thread

from metagpu.agent.config_watch import changes
from metagpu.core.errors import AddressUnusable, describe_error
from metagpu.core.runtime.listener import accept
from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.plugins.http.address import ListenAddress
from metagpu.plugins.http.server import bind_address, bind_problem
from metagpu.webhook.connection import CLOSING, ReviewConnection
from metagpu.webhook.settings import WebhookLimits, WebhookTiming
from metagpu.webhook.translator import Outcome, ReviewAnswer

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
_ROUNDS: Final = 8
"""Flights of a handshake, of which TLS has four at most."""
_MOST_SPENT: Final = 1024
"""Sources and namespaces, which clients may invent, whose times are remembered."""
_ANSWERING: Final = 0.005
"""Seconds of answers between two turns of the loop, which reads and accepts."""


Changes = Callable[[Sequence[Path]], AsyncGenerator[None, None]]


class _Loaded(NamedTuple):
    context: ssl.SSLContext
    expires: float


class ServingCertificate:
    """The certificate in force, and the context of TLS that presents it.

    Args:
        folder: the folder of `tls.crt` and `tls.key`.
        clock: the time, in seconds since the epoch.

    Attributes:
        context: the context to listen with; new connections get the certificate in force.
        error: why the files cannot be used, empty if they can.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.time,
        watch: Changes = changes,
    ) -> None:
        self.error = f"{folder} has not been read yet"
        self._files = folder / CERTIFICATE, folder / KEY
        self._clock = clock
        self._watch = watch
        self._loaded: _Loaded | None = None
        self.context = _server_context()
        self.context.sni_callback = self._choose

    @property
    def expires(self) -> float:
        """The end of the certificate in force, in seconds since the epoch; 0 without one."""
        return self._loaded.expires if self._loaded else 0.0

    @property
    def problem(self) -> str:
        """The reason for which no client can trust the webhook now, empty for none."""
        if self._loaded is None:
            return f"no certificate: {self.error}"
        if self._loaded.expires <= self._clock():
            return f"the certificate has expired, and there is no other in {self._files[0].parent}"
        return ""

    async def run(self) -> None:
        """Read the files whenever they change, until cancelled."""
        async with aclosing(self._watch(self._files)) as changed:
            async for _ in changed:
                await self.reload()

    async def reload(self) -> None:
        """Put the files in force, or log why they cannot be used."""
        before = self._loaded
        try:
            self._loaded = await to_thread.run_sync(_load, *self._files)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            problem = f"{self._files[0].parent}: {describe_error(error)}"
            if problem != self.error:
                effect = "the last valid one stays in force" if before else "reviews are refused"
                log.error("certificate rejected", error=problem, effect=effect)
            self.error = problem
            return
        self.error = ""
        if before is None or before.expires != self._loaded.expires:
            log.info("certificate in force", expires=_date(self._loaded.expires))

    def _choose(self, connection: Any, *_: object) -> int | None:  # noqa: ANN401 - the ssl module's own
        """Choose the context of the certificate in force for a new connection."""
        if self._loaded is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._loaded.context
        return None


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # the API server resumes no session
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load(certificate: Path, key: Path) -> _Loaded:
    """Load a pair and check it as a client would; blocks.

    Raises:
        OSError: a file cannot be read, the key is not the certificate's, or a client would not
            accept it.
        ValueError: as the latter.
    """
    context = _server_context()
    context.load_cert_chain(certificate, key, password=_no_password)
    return _Loaded(context, _expiry(context, certificate))


def _no_password() -> str:
    raise ValueError("the key is encrypted, and nobody is here to type a password")


def _expiry(context: ssl.SSLContext, certificate: Path) -> float:
    """Return the certificate's end, by a handshake in memory that trusts it.

    Python reads the dates of a certificate in no other way.

    Raises:
        ssl.SSLError: it has expired, is not valid yet, or is none of a server.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = trusting.wrap_bio(to_client, to_server)

    for _ in range(_ROUNDS):
        for side in (client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
        if found := client.getpeercert() if client.version() else None:
            return float(ssl.cert_time_to_seconds(str(found["notAfter"])))
    raise ValueError("no handshake with this certificate comes to an end")


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


log = structlog.get_logger()


class _Tls(SSLProtocol):
    """TLS with buffers of one record, where asyncio reads 256 KiB ahead."""

    max_size = 16 * 1024

    def _set_read_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        super()._set_read_buffer_limits(high or self.max_size, low)  # type: ignore[misc] # not in typeshed


class _Turns:
    """Connections whose requests are whole, by source and namespace.

    The source whose answers have taken the least time is next, and of it such a namespace: a crowd
    with the most expensive pods delays itself, also the pods of a tenant behind the API server. Who
    comes later has no more credit than those that wait.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, bytes], deque[ReviewConnection]] = {}
        self._spent: defaultdict[object, float] = defaultdict(float)

    def add(self, connection: ReviewConnection, namespace: bytes) -> None:
        """Put a connection behind those of its source and namespace."""
        if not self._waiting:
            self._spent.clear()
            asyncio.get_running_loop().call_soon(self._answer)
        source, turn = connection.source, (connection.source, namespace)
        self._join(source, {other for other, _ in self._waiting})
        self._join(turn, {other for other in self._waiting if other[0] == source})
        self._waiting.setdefault(turn, deque()).append(connection)

    def _join(self, one: object, others: Collection[object]) -> None:
        if one not in others:
            least = min((self._spent[other] for other in others), default=0.0)
            self._spent[one] = max(self._spent[one], least)

    def _answer(self) -> None:
        """Answer for a few milliseconds; then others of the loop have their turn."""
        began = now = perf_counter()
        while self._waiting and now <= began + _ANSWERING:
            turn = min(self._waiting, key=lambda one: (self._spent[one[0]], self._spent[one]))
            self._waiting[turn].popleft().answer()
            took = -now + (now := perf_counter())
            if len(self._spent) > _MOST_SPENT:
                self._spent.clear()
            for one in (turn[0], turn):
                self._spent[one] += took
            if not self._waiting[turn]:
                del self._waiting[turn]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._answer)


class ReviewServer:
    """Answers POST requests to `/mutate`; the answer is computed from memory.

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
        self._turns = _Turns()
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
        return sum(connection.busy for connection in self._open)

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

    def on_whole(self, connection: ReviewConnection, namespace: bytes) -> None:
        """Put a connection behind others of its source and namespace."""
        self._turns.add(connection, namespace)

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

        An answer proves nothing: every client can have one.
        """
        counts = Counter(connection.source for connection in self._open)
        return min(self._open, key=lambda one: (-counts[one.source], one.answered, one.busy))

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
        for connection in [one for one in self._open if not one.connected]:
            self._close(connection)
        for connection in [one for one in self._open if not one.busy]:
            connection.close()
        self._all_gone = anyio.Event()
        with anyio.move_on_after(CLOSING):
            if self._open:
                await self._all_gone.wait()
        for connection in [*self._open]:
            self._close(connection)
        if self._shaking:
            await asyncio.wait(self._shaking)
