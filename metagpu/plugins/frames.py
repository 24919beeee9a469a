"""What `mgctl/mgctl.c` and the daemon say to each other; that file describes it."""

import re
import struct
from typing import Final

import msgspec

from metagpu.core.errors import MetagpuError

REQUEST_LIMIT: Final = 4096
"""Bytes of a request behind its length."""
LENGTH: Final = struct.Struct(">H")
HEAD: Final = struct.Struct(">cI")

_VERSION: Final = b"mgctl/1 "
_FACTS: Final = re.compile(rb"tty=([01]) columns=([0-9]{1,5}) rows=([0-9]{1,5}) old=([01])")


class NotUnderstood(MetagpuError):
    """Raised when a request is not one of our `mgctl`'s."""


class Request(msgspec.Struct, frozen=True):
    """A command line in a container, and where its output goes.

    Attributes:
        columns, rows: of the terminal; 0 where there is none, or it does not say.
        old: variables of MetaGPU's own mgctl are set.
    """

    arguments: tuple[str, ...]
    tty: bool = False
    columns: int = 0
    rows: int = 0
    old: bool = False


def size_of(length: bytes) -> int:
    """Read how long a request is, from its first two bytes.

    Raises:
        NotUnderstood: if it is longer than any of ours.
    """
    (size,) = LENGTH.unpack(length)
    if not 0 < size <= REQUEST_LIMIT:
        raise NotUnderstood(f"this is no request of mgctl's: its length would be {size} bytes")
    return int(size)


def request_of(payload: bytes) -> Request:
    """Read a request, behind its length.

    Raises:
        NotUnderstood: if it is none, or one of another version.
    """
    facts, *arguments, rest = payload.split(b"\0") if payload.endswith(b"\0") else (b"", b"")
    if not facts.startswith(_VERSION):
        raise NotUnderstood(
            "this daemon does not understand this mgctl; start the container anew to have the "
            "daemon's own"
        )
    told = _FACTS.fullmatch(facts, len(_VERSION))
    if told is None or rest:
        raise NotUnderstood("this is no request of mgctl's: its first line is not well formed")

    tty, columns, rows, old = (int(value) for value in told.groups())
    texts = tuple(argument.decode(errors="replace") for argument in arguments)
    return Request(texts, bool(tty), columns, rows, bool(old))


def output(text: str) -> bytes:
    """Write text for stdout."""
    return _text(b"o", text)


def complaint(text: str) -> bytes:
    """Write text for stderr."""
    return _text(b"e", text)


def end(status: int) -> bytes:
    """Write that this was all."""
    return HEAD.pack(b"x", status)


def _text(kind: bytes, text: str) -> bytes:
    data = text.encode(errors="replace")
    return HEAD.pack(kind, len(data)) + data
