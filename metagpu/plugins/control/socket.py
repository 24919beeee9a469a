"""The daemon's control socket, for root: one JSON object a line in, one out.

`metagpu status`, `metagpu cordon` and the other commands for operators use it. The socket's mode
keeps other users from calling; the kernel is asked for the caller's user besides, before a byte of
the caller is read.
"""

import asyncio
import fcntl
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from metagpu.core.errors import (
    AnotherDaemon,
    FileNotWritten,
    InternalError,
    MalformedRequest,
    MetagpuError,
    UnknownCommand,
)
from metagpu.core.runtime.listener import unix_listener
from metagpu.plugins.control.client import SOCKET_NAME

LOCK_NAME: Final = "metagpu.lock"
LINE_LIMIT: Final = 16 * 1024 * 1024
"""Bytes of one request."""
_BACKLOG: Final = 100
_REFUSAL: Final = b'{"error":"only root may ask the daemon","reason":"not_permitted"}\n'
_CREDENTIALS: Final = struct.Struct("3i")
"""`struct ucred`: pid, uid and gid (unix(7))."""

CommandHandler = Callable[[Mapping[str, Any]], Awaitable[object]]
"""Executes one request, given as a JSON object; returns a value that JSON can hold."""

log = structlog.get_logger()


@asynccontextmanager
async def control_server(
    run_dir: Path,
    handlers: Mapping[str, CommandHandler],
    line_limit: int = LINE_LIMIT,
) -> AsyncIterator[Path]:
    """Answer requests `{"command": NAME, …}` by their handlers, while the block lasts.

    An answer is `{"ok": VALUE}` or `{"error": TEXT, "reason": KIND}`. The socket of a
    daemon that has ended is replaced.

    Args:
        run_dir: the folder of the socket and of the lock that keeps a second daemon out.
        handlers: the commands, by their names.
        line_limit: bytes of one request; a longer one ends the connection.

    Raises:
        AnotherDaemon: another daemon runs on this folder.
        FileNotWritten: the socket cannot be created.
    """
    connections: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        try:
            while line := await reader.readline():
                writer.write(await _answer(line, handlers))
                await writer.drain()
        except (ConnectionError, ValueError):
            pass  # the client hung up, or sent a line longer than any of ours
        finally:
            connections.discard(writer)
            writer.close()

    def accept(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Coroutine[None, None, None] | None:
        """Serve root; the transport of others is closed before it begins to read."""
        if _user_of(writer) in {0, os.geteuid()}:
            return serve(reader, writer)
        writer.write(_REFUSAL)
        writer.close()
        return None

    with _listener(run_dir) as (path, listener):
        server = await asyncio.start_unix_server(
            accept, sock=listener, limit=line_limit, start_serving=False
        )
        try:
            await server.start_serving()  # within the block, as in `serve_grpc`
            yield path
        finally:
            server.close()
            for connection in connections:
                connection.close()


def _user_of(writer: asyncio.StreamWriter) -> int:
    """Return the user that opened the other end of a connection."""
    connection = writer.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


async def _answer(line: bytes, handlers: Mapping[str, CommandHandler]) -> bytes:
    try:
        request = msgspec.json.decode(line, type=dict[str, Any])
        handler = _find_handler(request, handlers)
        return msgspec.json.encode({"ok": await handler(request)}) + b"\n"
    except Exception as error:  # noqa: BLE001 - the caller gets it
        return _error_line(error)


def _error_line(error: Exception) -> bytes:
    match error:
        case MetagpuError():
            text, reason = str(error), error.reason
        case msgspec.MsgspecError() | UnicodeDecodeError():
            text, reason = str(error), MalformedRequest.reason
        case _:
            log.error("control command failed", exc_info=error)
            text = f"the daemon failed ({error!r}); its log has the details"
            reason = InternalError.reason
    return msgspec.json.encode({"error": text, "reason": reason}) + b"\n"


def _find_handler(
    request: Mapping[str, Any], handlers: Mapping[str, CommandHandler]
) -> CommandHandler:
    handler = handlers.get(str(request.get("command")))
    if handler is None:
        known = ", ".join(handlers)
        raise UnknownCommand(f"no command {request.get('command')!r}; there are: {known}")
    return handler


@contextmanager
def _listener(run_dir: Path) -> Iterator[tuple[Path, socket.socket]]:
    """Lock a folder for this daemon and listen in it, while the block lasts."""
    path = run_dir / SOCKET_NAME

    with ExitStack() as stack:
        try:
            run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
            stack.enter_context(_lock(run_dir / LOCK_NAME))
            path.unlink(missing_ok=True)  # the lock is ours: the socket's daemon has ended
            listener = stack.enter_context(unix_listener(path, mode=0o600, backlog=_BACKLOG))
        except OSError as error:
            raise FileNotWritten(
                f"cannot make {error.filename or path}: {error.strerror or error}; {_fix(error)}"
            ) from error
        yield path, listener


def _fix(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "run as root, or name another folder with --run-dir"
    return f"name {'another' if error.errno else 'a shorter'} folder with --run-dir"


@contextmanager
def lock_of(run_dir: Path) -> Iterator[None]:
    """Keep a daemon out of a run folder; a missing folder is not created.

    Raises:
        AnotherDaemon: a daemon runs there.
        OSError: the lock's file cannot be opened.
    """
    path = run_dir / LOCK_NAME
    with _lock(path) if path.exists() else nullcontext():
        yield


def is_locked(run_dir: Path) -> bool:
    """Return whether a daemon has the lock of a run folder."""
    try:
        file = os.open(run_dir / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock file while the block lasts; the kernel releases it at any end.

    Only an uninstallation removes the file, and it holds the lock. A lock on a removed file
    is taken again, on the file at the path: two files would let two daemons run.

    Raises:
        AnotherDaemon: another daemon holds the lock.
        OSError: the file cannot be created.
    """
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AnotherDaemon(f"another metagpu runs here already: it holds {path}") from None
            if _is_at(path, lock):
                yield
                return
        finally:
            os.close(lock)


def _is_at(path: Path, file: int) -> bool:
    """Return whether an open file is the one at a path."""
    try:
        there, here = path.stat(), os.fstat(file)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
