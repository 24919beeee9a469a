"""Requests of reviews as they come over HTTP, and the bytes of their answers."""

from http import HTTPStatus
from time import perf_counter
from typing import Final, NamedTuple

from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.streams import StreamReader

from metagpu.webhook.settings import WebhookLimits

PATH: Final = "/mutate"
_REVIEW: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n"
)
_TEXT: Final = (
    b"HTTP/1.1 %d %s\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\n%s\r\n"
)
_LAST: Final = b"Connection: close\r\n"
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
        self.last = message.should_close or message.version < HttpVersion11
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
