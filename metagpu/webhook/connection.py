"""One connection of a client: requests over HTTP/1.1, one after the other.

A request whose body is there is answered in its source's turn, and nothing more is read before: no
task runs for it. aiohttp's parser reads the requests, as it does for aiohttp's own server.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from time import perf_counter
from typing import Any, Final, NamedTuple, Protocol, cast

import structlog
from aiohttp.http import HttpRequestParser, HttpVersion11, RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader

from metagpu.webhook.settings import WebhookLimits, WebhookTiming
from metagpu.webhook.translator import Outcome, ReviewAnswer

PATH: Final = "/mutate"
_REVIEW: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n"
)
_TEXT: Final = (
    b"HTTP/1.1 %d %s\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\n%s\r\n"
)
_LAST: Final = b"Connection: close\r\n"
_NAMESPACE: Final = re.compile(rb'"namespace":\s*"([^"]*)"')
"""Of a review: an API server writes it before the pod."""
_BEFORE_THE_POD: Final = 4096
_DIGITS: Final = 20
"""Of a length: Python refuses to read thousands, and zeros may lead."""


class RequestRefusal(NamedTuple):
    """The answer to a request whose body is not read."""

    status: HTTPStatus
    text: str


class IncomingRequest:
    """A request whose head has come; the body may be on its way.

    Attributes:
        content: what has come of the body, and was not taken yet.
        began: the time when the head came.
        body: what was taken.
        counted: whether its bytes count among those of all large bodies.
        last: whether the client wants no other on this connection.
    """

    def __init__(self, message: RawRequestMessage, content: StreamReader) -> None:
        self.content = content
        self.began = perf_counter()
        self.body: bytes | bytearray = bytearray()
        self.counted = False
        self.last = message.should_close or message.upgrade or message.version < HttpVersion11
        self._message = message

    def judge(self, limits: WebhookLimits) -> RequestRefusal | None:
        """Return why the body is not read, `None` where it is."""
        message = self._message
        if message.url.path != PATH:
            text = f"no such page; reviews are sent to {PATH}"
            return RequestRefusal(HTTPStatus.NOT_FOUND, text)
        if message.method != "POST":
            return RequestRefusal(HTTPStatus.METHOD_NOT_ALLOWED, "only POST is allowed")
        length = message.headers.get("Content-Length")
        if length is None:
            return RequestRefusal(
                HTTPStatus.LENGTH_REQUIRED, "the header Content-Length is missing"
            )
        if len(length) > _DIGITS or int(length) > limits.body:
            text = f"{length[:_DIGITS]} bytes are too many; {limits.body} are allowed"
            return RequestRefusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        self.counted = int(length) > limits.small
        return None


def encode_review(body: bytes, *, last: bool) -> bytes:
    """Return the answer with a review."""
    return _REVIEW % (len(body), _LAST if last else b"") + body


def encode_text(status: HTTPStatus, text: str, *, last: bool) -> bytes:
    """Return the answer to what is no review."""
    body = f"{text}\n".encode()
    return _TEXT % (status, status.phrase.encode(), len(body), _LAST if last else b"") + body


CLOSING: Final = 1.0
"""Seconds for a client to read its last answer, and to be gone."""
_CHUNK: Final = 2**20
"""Bytes of a body that aiohttp would keep before it stops reading: each is taken as it comes."""
_AHEAD: Final = 8
"""Requests that a client may send before it has its answer: an API server sends none."""
_UNREAD: Final = 64 * 1024
"""Bytes of answers that may wait for their client, beyond those that wait for the network."""

log = structlog.get_logger()


class Reviewing(Protocol):
    """The part of the server that its connections use.

    Attributes:
        answer: computes the answer to a body.
        record: takes the outcome of each review, and its seconds.
        reading: bytes that have come of large bodies that are not whole yet.
        ending: whether each answer is its connection's last.
    """

    limits: WebhookLimits
    timing: WebhookTiming
    answer: Callable[[bytes], ReviewAnswer]
    record: Callable[[Outcome, float], None]
    reading: int
    ending: bool

    def on_whole(self, connection: "ReviewConnection", namespace: bytes) -> None:
        """Put a connection behind others of its source and namespace."""

    def on_answered(self, connection: "ReviewConnection") -> None:
        """Note that a connection is idle from now on."""

    def on_lost(self, connection: "ReviewConnection") -> None:
        """Note that a connection has ended."""


class ReviewConnection(asyncio.Protocol):
    """Answers the requests of one client.

    Attributes:
        source: the client's address.
        answered: whether the client has had an answer to a review.
    """

    def __init__(self, reviewing: Reviewing, source: str) -> None:
        self.source = source
        self.answered = False
        self._of = reviewing
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        flow = cast("Any", self)  # of aiohttp's protocol, a body wants the two methods below alone
        self._parser = HttpRequestParser(flow, self._loop, _CHUNK, auto_decompress=False)
        self._requests: deque[IncomingRequest] = deque()
        self._last = False
        self._idle_since = 0.0
        self._idle: asyncio.TimerHandle | None = None
        self._late: asyncio.TimerHandle | None = None
        self._gone: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """True if a request has come, and not all of its body is there."""
        return bool(self._requests)

    @property
    def connected(self) -> bool:
        """True from the end of the handshake to the end of the connection."""
        return self._transport is not None

    def close(self) -> None:
        """End the connection, whatever the client does."""
        self._last = True
        # At a second `close` asyncio's transport forgets what `abort` needs.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()

    def abort(self) -> None:
        """End the connection without a word."""
        self._last = True
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's side ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to read."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(_UNREAD)
        self._idle_since = self._loop.time()
        self._idle = self._loop.call_later(self._of.timing.keep_alive, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a body that has not come."""
        del exc
        self._transport = None
        for timer in (self._idle, self._late, self._gone):
            if timer is not None:
                timer.cancel()
        if self._requests:
            self._count_back(self._requests[0])
            self._of.record(Outcome.MALFORMED, perf_counter() - self._requests[0].began)
            self._requests.clear()
        self._of.on_lost(self)

    def data_received(self, data: bytes) -> None:
        """Answer what is there; an error of ours ends this connection alone."""
        if self._last:
            return
        try:
            self._receive(data)
        except Exception:
            log.exception("connection failed")
            self.abort()

    def pause_writing(self) -> None:
        """End the connection of a client that sends requests, and reads no answers."""
        self.abort()

    def resume_writing(self) -> None:
        """Do nothing: the connection has ended."""

    def pause_reading(self) -> None:
        """Do nothing, for aiohttp: bodies are limited here."""

    def resume_reading(self, *, resume_parser: bool = True) -> None:
        """Do nothing, as above."""

    # --- requests ---------------------------------------------------------------------------------

    def _receive(self, data: bytes) -> None:
        try:
            messages, _, _ = self._parser.feed_data(data)
        except HttpProcessingError as error:
            self._refuse_malformed(error)
            return
        self._requests += (IncomingRequest(message, content) for message, content in messages)
        if len(self._requests) > _AHEAD:
            self.abort()
            return
        self._proceed_all()

    def answer(self) -> None:
        """Answer the request whose body is there, and go on with what came after it."""
        if self._transport is None or self._last:
            return
        try:
            self._transport.resume_reading()
            self._review(self._requests[0])
            self._proceed_all()
        except Exception:
            log.exception("connection failed")
            self.abort()

    def _proceed_all(self) -> None:
        while self._requests and not self._last and self._proceed(self._requests[0]):
            pass

    def _proceed(self, request: IncomingRequest) -> bool:
        """Take what has come of a body; return whether its request is answered."""
        began = self._late is not None
        refusal = None if began else request.judge(self._of.limits)
        refusal = refusal or self._take(request)
        whole = request.content.is_eof()
        if refusal:
            # The answer to another method may have no body: nothing shall follow it.
            head = refusal.status is HTTPStatus.METHOD_NOT_ALLOWED
            self._send_text(request, *refusal, last=head or not whole)
            return True
        if whole:
            self._end_wait()
            if self._transport is not None:
                self._transport.pause_reading()
            namespace = _NAMESPACE.search(request.body, 0, _BEFORE_THE_POD)
            self._of.on_whole(self, namespace[1] if namespace else b"")
        elif not began:
            self._late = self._loop.call_later(self._of.timing.request, self._give_up)
        return False

    def _take(self, request: IncomingRequest) -> RequestRefusal | None:
        """Take what has come, unless that and others have too many bytes already."""
        came = request.content.read_nowait()
        if request.content.is_eof() and not request.body:
            request.body = came  # nearly all: the whole one
        else:
            request.body += came
        if request.counted:
            self._of.reading += len(came)
            if self._of.reading > self._of.limits.bodies:
                text = "too much is being read already"
                return RequestRefusal(HTTPStatus.SERVICE_UNAVAILABLE, text)
        return None

    def _review(self, request: IncomingRequest) -> None:
        try:
            found = self._of.answer(bytes(request.body))
        except Exception:
            log.exception("review failed")
            self._of.record(Outcome.FAILED, perf_counter() - request.began)
            text = "metagpu failed; its log says how"
            self._send_text(request, HTTPStatus.INTERNAL_SERVER_ERROR, text)
            return
        self._of.record(found.outcome, perf_counter() - request.began)
        if not found.body:
            self._send_text(request, HTTPStatus.BAD_REQUEST, found.problem)
            return
        self.answered = True
        last = request.last or self._of.ending
        self._send(request, encode_review(found.body, last=last), last=last)

    # --- answers ----------------------------------------------------------------------------------

    def _send_text(
        self, request: IncomingRequest, status: HTTPStatus, text: str, *, last: bool = False
    ) -> None:
        last = last or request.last or self._of.ending
        self._send(request, encode_text(status, text, last=last), last=last)

    def _send(self, request: IncomingRequest, answer: bytes, *, last: bool) -> None:
        """Send the answer to the oldest request."""
        self._requests.popleft()
        self._end_wait()
        self._count_back(request)
        self._idle_since = self._loop.time()
        self._of.on_answered(self)
        if self._transport is None:
            return
        self._transport.write(answer)
        if last:
            self._end(whole=request.content.is_eof())

    def _refuse_malformed(self, error: HttpProcessingError) -> None:
        """Answer bytes that are no request, or no body of one."""
        if self._requests:
            self._give_up()
            return
        text = str(error.message).splitlines()[0]
        if self._transport is not None:
            self._transport.write(encode_text(HTTPStatus.BAD_REQUEST, text, last=True))
            self._end(whole=False)

    def _give_up(self) -> None:
        """Answer a request whose body does not come."""
        request = self._requests[0]
        self._of.record(Outcome.MALFORMED, perf_counter() - request.began)
        text = "the body did not arrive as announced"
        self._send_text(request, HTTPStatus.BAD_REQUEST, text, last=True)

    def _end(self, *, whole: bool) -> None:
        """End the connection; a client that still sends gets the time to read its answer."""
        self._last = True
        self._requests.clear()
        if whole:
            self.close()
        else:
            self._gone = self._loop.call_later(CLOSING, self.close)

    def _end_wait(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _count_back(self, request: IncomingRequest) -> None:
        if request.counted:
            self._of.reading -= len(request.body)

    def _close_if_idle(self) -> None:
        left = self._idle_since + self._of.timing.keep_alive - self._loop.time()
        if left <= 0 and not self._requests:
            self.close()
        else:
            self._idle = self._loop.call_later(max(left, CLOSING), self._close_if_idle)
