"""The frames between `mgctl/mgctl.c`, which describes them, and the daemon."""

import re
import socket
import struct
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from metagpu.core.errors import DaemonRefusal, MalformedRequest, NoDaemon

REQUEST_LIMIT: Final = 4096
"""Bytes of a request, without its length field."""
LENGTH: Final = struct.Struct(">H")
HEAD: Final = struct.Struct(">cI")

_VERSION: Final = b"mgctl/1 "
_FACTS: Final = re.compile(rb"tty=([01]) columns=([0-9]{1,5}) rows=([0-9]{1,5}) old=([01])")


class PodRequest(msgspec.Struct, frozen=True):
    """A command line in a container, and where its output goes.

    Attributes:
        columns, rows: the terminal's size; 0 without a terminal, or where its size is unknown.
        has_metagpu_env: whether variables of MetaGPU's own mgctl are set.
    """

    arguments: tuple[str, ...]
    tty: bool = False
    columns: int = 0
    rows: int = 0
    has_metagpu_env: bool = False


def parse_length(length: bytes) -> int:
    """Return the size of a request in bytes, from its first two bytes.

    Raises:
        MalformedRequest: no request of ours is so long.
    """
    (size,) = LENGTH.unpack(length)
    if not 0 < size <= REQUEST_LIMIT:
        raise MalformedRequest(
            f"this is not a request of mgctl's: its length would be {size} bytes"
        )
    return int(size)


def parse_request(payload: bytes) -> PodRequest:
    """Decode a request, without its length field.

    Raises:
        MalformedRequest: the bytes are no request, or one of another protocol version.
    """
    facts, *arguments, rest = payload.split(b"\0") if payload.endswith(b"\0") else (b"", b"")
    if not facts.startswith(_VERSION):
        raise MalformedRequest(
            "this daemon does not understand this mgctl; restart the container to get "
            "the daemon's own mgctl"
        )
    matched = _FACTS.fullmatch(facts, len(_VERSION))
    if matched is None or rest:
        raise MalformedRequest(
            "this is not a request of mgctl's: its first line is not well formed"
        )

    tty, columns, rows, metagpu_env = (int(value) for value in matched.groups())
    texts = tuple(argument.decode(errors="replace") for argument in arguments)
    return PodRequest(texts, bool(tty), columns, rows, bool(metagpu_env))


def request_frame(*arguments: str) -> bytes:
    """Encode a command line, asked without a terminal."""
    facts = _VERSION.decode() + "tty=0 columns=0 rows=0 old=0"
    payload = b"".join(text.encode() + b"\0" for text in (facts, *arguments))
    return LENGTH.pack(len(payload)) + payload


def stdout_frame(text: str) -> bytes:
    """Encode text for standard output."""
    return _text(b"o", text)


def stderr_frame(text: str) -> bytes:
    """Encode text for the error output."""
    return _text(b"e", text)


def exit_frame(status: int) -> bytes:
    """Encode the end of the answer, with the exit status."""
    return HEAD.pack(b"x", status)


def _text(kind: bytes, text: str) -> bytes:
    data = text.encode(errors="replace")
    return HEAD.pack(kind, len(data)) + data


ANSWER_TIMEOUT: Final = 10.0
"""Seconds that the daemon may be silent."""


def ask_daemon(path: Path, *arguments: str, timeout: float = ANSWER_TIMEOUT) -> str:
    """Send a command line of this container to the daemon; return the output. Blocks.

    Raises:
        NoDaemon: no daemon answers, or breaks off.
        DaemonRefusal: it refuses; the text is the daemon's.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path))
            connection.sendall(request_frame(*arguments))
            with connection.makefile("rb") as file:
                return _read_answer(file, path)
    except FileNotFoundError as error:
        raise NoDaemon(
            f"there is no {path}: metagpu does not run on this node now, or not for containers, "
            "or this container holds no share"
        ) from error
    except TimeoutError as error:
        raise NoDaemon(f"metagpu on {path} sent nothing for {timeout:g} s") from error
    except OSError as error:
        raise NoDaemon(f"no daemon answers on {path}: {error.strerror or error}") from error


def _read_answer(file: BinaryIO, path: Path) -> str:
    texts = {b"o": b"", b"e": b""}
    while len(head := file.read(HEAD.size)) == HEAD.size:
        kind, number = HEAD.unpack(head)
        if kind == b"x":
            if number:
                raise _refusal(texts[b"e"].decode())
            return texts[b"o"].decode()
        if kind not in texts:
            raise NoDaemon(f"{path} is not metagpu's socket: its answer has an unknown format")
        texts[kind] += file.read(number)
    raise NoDaemon("metagpu broke off its answer; it may have been restarted")


class _Failure(msgspec.Struct):
    """An error as `mgctl` prints it with `-o json`."""

    reason: str
    error: str


def _refusal(line: str) -> DaemonRefusal:
    """Return the error of a line; a daemon of an earlier release sends a text."""
    try:
        found = msgspec.json.decode(line, type=_Failure)
    except msgspec.MsgspecError:
        return DaemonRefusal(line.removeprefix("mgctl: ").strip(), None)
    return DaemonRefusal(found.error, found.reason)
