"""Callers of the daemon's sockets: plain blocking sockets, from a thread beside the daemon."""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from metagpu.plugins.pod_api.frames import HEAD

PATIENCE_S = 30.0
"""Longer than any answer may take on the slowest machine."""
LISTENING_S = 3.0
"""Seconds after which an answer that still goes on is a watch, which has no end."""


@dataclass(frozen=True)
class Received:
    """The bytes that a caller received; `whole` if the daemon ended the answer in order."""

    data: bytes
    whole: bool


@contextmanager
def _connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(str(path))
        yield connection


def call_and_go(path: Path, data: bytes) -> None:
    """Send bytes and hang up without listening."""
    with suppress(OSError), _connected(path) as connection:
        connection.sendall(data)


def call(path: Path, data: bytes) -> Received:
    """Send bytes, then read until the daemon hangs up, or longer than any one answer takes.

    Raises:
        TimeoutError: if neither an answer nor an end comes.
    """
    received = b""
    with suppress(ConnectionError), _connected(path) as connection:
        connection.sendall(data)
        began = time.monotonic()
        while part := connection.recv(65536):
            received += part
            if time.monotonic() - began > LISTENING_S:
                break
        else:
            return Received(received, whole=True)
    return Received(received, whole=False)


def converse(path: Path, lines: Sequence[bytes]) -> list[bytes]:
    """Send lines on one connection, and read a line for each.

    Raises:
        TimeoutError: if an answer does not come.
    """
    with _connected(path) as connection, connection.makefile("rb") as answers:
        sent = []
        for line in lines:
            connection.sendall(line)
            sent.append(answers.readline())
        return sent


def frames(data: bytes) -> list[tuple[bytes, bytes]]:
    """Split an answer into frames; the status of its end is a text here.

    Raises:
        ValueError: if it is no sequence of whole frames.
    """
    found = []
    while data:
        if len(data) < HEAD.size:
            raise ValueError(f"half a frame: {data!r}")
        kind, number = HEAD.unpack(data[: HEAD.size])
        data = data[HEAD.size :]
        if kind == b"x":
            found.append((kind, str(number).encode()))
            continue
        if kind not in {b"o", b"e"} or len(data) < number:
            raise ValueError(f"no whole frame: {kind!r} of {number} bytes, {len(data)} are there")
        found.append((kind, data[:number]))
        data = data[number:]
    return found
