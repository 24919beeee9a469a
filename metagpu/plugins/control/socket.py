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
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from metagpu.core.errors import MetagpuError
from metagpu.core.runtime.listener import unix_listener
from metagpu.plugins.control.client import SOCKET_NAME

LOCK_NAME: Final = "metagpu.lock"
LINE_LIMIT: Final = 16 * 1024 * 1024
"""Bytes of one request."""
_BACKLOG: Final = 100
_REFUSAL: Final = b'{"error":"only root may ask the daemon"}\n'
_CREDENTIALS: Final = struct.Struct("3i")
"""`struct ucred`: pid, uid and gid (unix(7))."""

CommandHandler = Callable[[Mapping[str, Any]], Awaitable[object]]
"""Executes one request, given as a JSON object; returns a value that JSON can hold."""

log = structlog.get_logger()


@asynccontextmanager
async def control_server(
    run_dir: Path, handlers: Mapping[str, CommandHandler], line_limit: int = LINE_LIMIT
) -> AsyncIterator[Path]:
    """Answer requests `{"command": NAME, …}` by their handlers, while the block lasts.

    An answer is `{"ok": VALUE}` or `{"error": TEXT}`. The socket of a daemon that has ended is
    replaced.

    Args:
        run_dir: the folder of the socket and of the lock that keeps a second daemon out.
        handlers: the commands, by their names.
        line_limit: bytes of one request; a longer one ends the connection.

    Raises:
        MetagpuError: another daemon runs on this folder, or the socket cannot be created.
    """
    connections: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        try:
            while line := await reader.readline():
                writer.write(await _answer(line, handlers) + b"\n")
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
        server = await asyncio.start_unix_server(accept, sock=listener, limit=line_limit)
        try:
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
        return msgspec.json.encode({"ok": await handler(request)})
    except (MetagpuError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        text = str(error)
    except Exception as error:
        log.exception("control command failed")
        text = f"the daemon failed ({error!r}); its log has the details"
    return msgspec.json.encode({"error": text})


def _find_handler(
    request: Mapping[str, Any], handlers: Mapping[str, CommandHandler]
) -> CommandHandler:
    handler = handlers.get(str(request.get("command")))
    if handler is None:
        known = ", ".join(handlers)
        raise MetagpuError(f"no command {request.get('command')!r}; there are: {known}")
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
            raise MetagpuError(
                f"cannot make {error.filename or path}: {error.strerror or error}; {_fix(error)}"
            ) from error
        yield path, listener


def _fix(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "run as root, or name another folder with --run-dir"
    return f"name {'another' if error.errno else 'a shorter'} folder with --run-dir"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock file while the block lasts; the kernel releases it at any end.

    The file stays: removed, it would let a second daemon lock a new file beside the first's.

    Raises:
        MetagpuError: another daemon holds the lock.
        OSError: the file cannot be created.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MetagpuError(f"another metagpu runs here already: it holds {path}") from None
        yield
    finally:
        os.close(lock)
