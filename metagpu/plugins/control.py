"""The daemon's own socket: one JSON object a line in, one out. Only root may open it.

`metagpu status`, `metagpu acknowledge` and `metagpu sim` speak to it.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from metagpu.core.errors import MetagpuError

SOCKET_NAME: Final = "metagpu.sock"
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
        MetagpuError: if another daemon answers on the socket.
        OSError: if the socket cannot be made.
    """
    path = _free_path(run_dir)
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

    server = await asyncio.start_unix_server(converse, path, limit=_LINE_LIMIT)
    path.chmod(0o600)

    try:
        yield path
    finally:
        server.close()
        for caller in callers:
            caller.close()
        path.unlink(missing_ok=True)


async def _answer(line: bytes, handlers: Mapping[str, Handler]) -> bytes:
    try:
        request = msgspec.json.decode(line, type=dict[str, Any])
        handler = _handler(request, handlers)
        return msgspec.json.encode({"ok": await handler(request)})
    except (MetagpuError, msgspec.MsgspecError) as error:
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
        MetagpuError: if no daemon answers, or it answers with an error.
    """
    path = run_dir / SOCKET_NAME

    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWER_DEADLINE)
            connection.connect(str(path))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            line = connection.makefile("rb").readline()
    except OSError as error:
        raise MetagpuError(
            f"no daemon answers on {path} ({error.strerror or error}); start `metagpu run`, or "
            "name its directory with --run-dir"
        ) from error

    answer = msgspec.json.decode(line, type=dict[str, Any]) if line else {"error": "no answer"}
    if "error" in answer:
        raise MetagpuError(answer["error"])
    return answer["ok"]


def _free_path(run_dir: Path) -> Path:
    run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = run_dir / SOCKET_NAME

    if _answers(path):
        raise MetagpuError(f"another metagpu runs here already: it answers on {path}")
    path.unlink(missing_ok=True)
    return path


def _answers(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(path))
    except OSError:
        return False
    return True
