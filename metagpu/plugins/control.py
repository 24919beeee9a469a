"""The daemon's own socket: one JSON object a line in, one out. Only root may open it.

`metagpu status`, `metagpu acknowledge` and `metagpu sim` speak to it.
"""

import asyncio
import fcntl
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from metagpu.core.errors import MetagpuError
from metagpu.plugins.serving import identity_of

SOCKET_NAME: Final = "metagpu.sock"
LOCK_NAME: Final = "metagpu.lock"
DEFAULT_RUN_DIR: Final = Path("/run/metagpu")
_LINE_LIMIT: Final = 16 * 1024 * 1024
_ANSWER_DEADLINE: Final = 30.0

Handler = Callable[[Mapping[str, Any]], Awaitable[object]]
"""Takes the request's object, gives something that can be JSON."""

log = structlog.get_logger()


@asynccontextmanager
async def controlled(run_dir: Path, handlers: Mapping[str, Handler]) -> AsyncIterator[Path]:
    """Answer requests `{"command": NAME, …}` by the handler of that name, while the block lasts.

    An answer is `{"ok": VALUE}` or `{"error": TEXT}`. A socket left by a daemon that is gone is
    replaced.

    Raises:
        MetagpuError: if another daemon runs on this folder, or the socket cannot be made.
    """
    callers: set[asyncio.StreamWriter] = set()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.add(writer)
        try:
            while line := await reader.readline():
                writer.write(await _answer(line, handlers) + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):
            pass  # the caller hung up, or sent a line longer than any of ours
        finally:
            callers.discard(writer)
            writer.close()

    with _listener(run_dir) as (path, listener):
        server = await asyncio.start_unix_server(converse, sock=listener, limit=_LINE_LIMIT)
        try:
            yield path
        finally:
            server.close()
            for caller in callers:
                caller.close()


async def _answer(line: bytes, handlers: Mapping[str, Handler]) -> bytes:
    try:
        request = msgspec.json.decode(line, type=dict[str, Any])
        handler = _handler(request, handlers)
        return msgspec.json.encode({"ok": await handler(request)})
    except (MetagpuError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        text = str(error)
    except Exception as error:
        log.exception("a control command failed")
        text = f"the daemon failed ({error!r}); its log has the details"
    return msgspec.json.encode({"error": text})


def _handler(request: Mapping[str, Any], handlers: Mapping[str, Handler]) -> Handler:
    handler = handlers.get(str(request.get("command")))
    if handler is None:
        known = ", ".join(handlers)
        raise MetagpuError(f"no command {request.get('command')!r}; there are: {known}")
    return handler


def ask(run_dir: Path, request: Mapping[str, object]) -> Any:  # noqa: ANN401 - JSON
    """Send one request to the daemon and give its answer. Blocks: for command lines only.

    Raises:
        MetagpuError: if no daemon answers, we may not ask it, or it answers with an error.
    """
    path = run_dir / SOCKET_NAME

    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWER_DEADLINE)
            connection.connect(str(path))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            line = connection.makefile("rb").readline()
    except OSError as error:
        raise MetagpuError(_unanswered(path, error)) from error

    answer = msgspec.json.decode(line, type=dict[str, Any]) if line else {"error": "no answer"}
    if "error" in answer:
        raise MetagpuError(answer["error"])
    return answer["ok"]


def _unanswered(path: Path, error: OSError) -> str:
    match error:
        case PermissionError():
            return f"only root may ask the daemon on {path}"
        case TimeoutError():
            return f"the daemon on {path} did not answer within {_ANSWER_DEADLINE:g} s"
        case _:
            return (
                f"no daemon answers on {path} ({error.strerror or error}); start `metagpu run`, or "
                "name its directory with --run-dir"
            )


@contextmanager
def _listener(run_dir: Path) -> Iterator[tuple[Path, socket.socket]]:
    """Be the only daemon of a folder, with a bound socket in it, while the block lasts."""
    path = run_dir / SOCKET_NAME

    with ExitStack() as held:
        try:
            run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
            held.enter_context(_locked(run_dir / LOCK_NAME))
            path.unlink(missing_ok=True)  # the lock is ours: whoever made it is gone
            listener = held.enter_context(_bound(path))
        except OSError as error:
            raise MetagpuError(
                f"cannot make {error.filename or path}: {error.strerror or error}; {_mend(error)}"
            ) from error

        identity = identity_of(path)
        try:
            yield path, listener
        finally:
            if identity_of(path) == identity:  # what somebody else put there stays
                path.unlink(missing_ok=True)


def _mend(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "run as root, or name another folder with --run-dir"
    return f"name {'another' if error.errno else 'a shorter'} folder with --run-dir"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file while the block lasts; the kernel lets go of it however we end.

    The file stays: removed, it would let a second daemon lock a new file beside the first's.
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


def _bound(path: Path) -> socket.socket:
    """Give a socket that nobody but root can reach: it listens only after its mode is set."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    try:
        listener.bind(str(path))
        path.chmod(0o600)
    except OSError:
        listener.close()
        raise
    return listener
