"""The client of the socket that containers see, as `mgctl/mgctl.c` is, for Python."""

import socket
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from metagpu.core.errors import DaemonRefusal, NoDaemon
from metagpu.plugins.pod_api.frames import HEAD, request_frame

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
