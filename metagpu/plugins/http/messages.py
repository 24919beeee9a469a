"""Requests and responses as values, and responses as bytes of HTTP/1.1."""

import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Final

import h11
import msgspec

PLAIN: Final = "text/plain; charset=utf-8"

_NO_WEIGHT: Final = re.compile(r"0(\.0*)?")
_ACCEPT: Final = b"accept-encoding"

Headers = Sequence[tuple[str, str]]


class HttpResponse(msgspec.Struct, frozen=True):
    """A response; `content` is its content type.

    Attributes:
        compressed: the body under gzip, for clients that take it; `None` where there is none.
    """

    status: HTTPStatus
    body: bytes
    content: str = PLAIN
    compressed: bytes | None = None

    def encoded_for(self, request: h11.Request | None) -> tuple[bytes, str]:
        """Return the body for a request, and its content encoding, empty for none."""
        accepted = b",".join(
            value for name, value in (request.headers if request else ()) if name == _ACCEPT
        )
        if self.compressed is not None and _takes_gzip(accepted.decode("latin-1")):
            return self.compressed, "gzip"
        return self.body, ""


class HttpStream(msgspec.Struct, frozen=True):
    """A response without an end; `parts` is closed with its connection."""

    parts: Callable[[], AsyncGenerator[bytes, None]]
    content: str


class HttpRequest(msgspec.Struct, frozen=True):
    """A request from an address; `headers` have their names in lower case."""

    headers: Mapping[str, str]
    source: str = ""

    @classmethod
    def of(cls, request: h11.Request, source: str) -> "HttpRequest":
        """Return a request as a value."""
        headers = {key.decode(): value.decode("latin-1") for key, value in request.headers}
        return cls(headers, source)


def plain(status: HTTPStatus, text: str) -> HttpResponse:
    """Return a response of one line of text."""
    return HttpResponse(status, f"{text}\n".encode())


def encode_response(
    http: h11.Connection, response: HttpResponse, request: h11.Request | None, common: Headers = ()
) -> bytes:
    """Return a whole response; `common` are headers of all responses of the server."""
    body, encoding = response.encoded_for(request)
    headers = [("content-length", str(len(body)))]
    if response.compressed is not None:
        headers.append(("vary", "accept-encoding"))
    if encoding:
        headers.append(("content-encoding", encoding))
    if response.status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append(("allow", "GET, HEAD"))

    parts = [_head(http, response.status, response.content, [*headers, *common])]
    if request is None or request.method != b"HEAD":
        parts.append(http.send(h11.Data(data=body)))
    parts.append(http.send(h11.EndOfMessage()))
    return b"".join(part for part in parts if part)


def encode_head(http: h11.Connection, stream: HttpStream, common: Headers = ()) -> bytes:
    """Return the line and the headers of a response without an end."""
    return _head(http, HTTPStatus.OK, stream.content, common)


def _head(http: h11.Connection, status: HTTPStatus, content: str, headers: Headers) -> bytes:
    all_headers = [("content-type", content), ("connection", "close"), *headers]
    reason = status.phrase.encode()
    return http.send(h11.Response(status_code=status, headers=all_headers, reason=reason)) or b""


def _takes_gzip(accepted: str) -> bool:
    """Return whether a header Accept-Encoding has gzip, and not with the weight 0."""
    for part in accepted.lower().split(","):
        name, _, weight = part.replace(" ", "").partition(";q=")
        if name in ("gzip", "*"):
            return _NO_WEIGHT.fullmatch(weight) is None
    return False
