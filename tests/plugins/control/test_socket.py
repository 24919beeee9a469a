"""The daemon's control socket: one JSON object a line in, one out."""

import asyncio
import errno
import fcntl
import json
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from metagpu.core.errors import DaemonRefusal, MetagpuError, UnknownGpu
from metagpu.plugins.control.client import SOCKET_NAME, send_request
from metagpu.plugins.control.socket import LOCK_NAME, CommandHandler, control_server


async def echo(request: Mapping[str, Any]) -> object:
    """Return the request."""
    return dict(request)


async def refuse(request: Mapping[str, Any]) -> object:
    """Refuse the request as a command does."""
    raise UnknownGpu(f"there is no GPU {request['gpu']}")


async def fail(_: Mapping[str, Any]) -> object:
    """Fail with an unexpected error."""
    raise ZeroDivisionError("division by zero")


async def odd(_: Mapping[str, Any]) -> object:
    """Return an answer that JSON cannot encode."""
    return object()


HANDLERS: Mapping[str, CommandHandler] = {"echo": echo, "refuse": refuse, "fail": fail, "odd": odd}


async def asked(run_dir: Path, **request: object) -> Any:  # noqa: ANN401 - JSON
    """Ask as a command line does, in a thread of its own."""
    return await anyio.to_thread.run_sync(send_request, run_dir, request)


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection to the socket."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def converse(path: Path, *lines: bytes) -> list[Any]:
    """Send lines on one connection and read an answer to each."""
    async with connected(path) as (reader, writer):
        answers = []
        for line in lines:
            writer.write(line + b"\n")
            answers.append(json.loads(await reader.readline()))
        return answers


async def test_a_request_is_answered(tmp_path: Path) -> None:
    """A command's handler gets the whole request, and its return value is the answer."""
    async with control_server(tmp_path, HANDLERS):
        assert await asked(tmp_path, command="echo", gpu=3) == {"command": "echo", "gpu": 3}


async def test_several_requests_on_one_connection(tmp_path: Path) -> None:
    """Each line of a connection is answered in order, errors included."""
    async with control_server(tmp_path, HANDLERS) as path:
        answers = await converse(
            path, b'{"command":"echo"}', b"nonsense", b'{"command":"echo","n":2}'
        )

    assert [list(answer) for answer in answers] == [["ok"], ["error", "reason"], ["ok"]]
    assert answers[2] == {"ok": {"command": "echo", "n": 2}}


@pytest.mark.parametrize(
    ("line", "text", "reason"),
    [
        (
            b'{"command":"dance"}',
            "no command 'dance'; there are: echo, refuse, fail, odd",
            "unknown_command",
        ),
        (b"{}", "no command None; there are: echo, refuse, fail, odd", "unknown_command"),
        (
            b'{"command":["echo"]}',
            "no command ['echo']; there are: echo, refuse, fail, odd",
            "unknown_command",
        ),
        (b"{", "Input data was truncated", "malformed_request"),
        (b"[]", "Expected `object`, got `array`", "malformed_request"),
        (b"\xff", "JSON is malformed: invalid character (byte 0)", "malformed_request"),
        (
            b'{"\x80":1}',
            "'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte",
            "malformed_request",
        ),
        (b'{"command":"refuse","gpu":7}', "there is no GPU 7", "unknown_gpu"),
        (
            b'{"command":"fail"}',
            "the daemon failed (ZeroDivisionError('division by zero')); its log has the details",
            "internal_error",
        ),
        (
            b'{"command":"refuse"}',
            "the daemon failed (KeyError('gpu')); its log has the details",
            "internal_error",
        ),
    ],
)
async def test_a_failed_request_is_an_error(
    tmp_path: Path, line: bytes, text: str, reason: str
) -> None:
    """Unknown commands, invalid requests and failing handlers each have an error as answer."""
    async with control_server(tmp_path, HANDLERS) as path:
        assert await converse(path, line) == [{"error": text, "reason": reason}]


async def test_an_answer_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    """A handler's wrong answer becomes an error, and the connection continues."""
    async with control_server(tmp_path, HANDLERS) as path:
        first, second = await converse(path, b'{"command":"odd"}', b'{"command":"echo"}')

    assert first["error"].startswith("the daemon failed (TypeError(")
    assert second == {"ok": {"command": "echo"}}


async def test_an_error_reaches_the_command_line(tmp_path: Path) -> None:
    """A client raises the daemon's error, with the daemon's reason."""
    async with control_server(tmp_path, HANDLERS):
        with pytest.raises(DaemonRefusal, match=r"^there is no GPU 7$") as caught:
            await asked(tmp_path, command="refuse", gpu=7)
    assert caught.value.reason == "unknown_gpu"


async def test_a_caller_that_hangs_up_costs_nothing(tmp_path: Path) -> None:
    """After half a request, or an unread answer, the daemon serves as before."""
    async with control_server(tmp_path, HANDLERS) as path:
        for half in (b"", b'{"command":', b'{"command":"echo"}\n' * 100):
            async with connected(path) as (_, writer):
                writer.write(half)
        assert await asked(tmp_path, command="echo") == {"command": "echo"}


async def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    """A line longer than the limit ends the connection, and not the daemon."""
    async with control_server(tmp_path, HANDLERS, line_limit=64) as path:
        async with connected(path) as (reader, writer):
            writer.write(b"x" * 1000 + b"\n")
            assert await reader.read() == b""
        assert await asked(tmp_path, command="echo") == {"command": "echo"}


def is_there(path: Path) -> bool:
    """Return whether there is such a file."""
    return path.exists()


def mode_of(path: Path) -> int:
    """Return a file's type and permissions."""
    return path.stat().st_mode


# --- the socket -----------------------------------------------------------------------------------


async def test_only_root_may_open_the_socket(tmp_path: Path) -> None:
    """The socket is for its owner alone, in a folder that the daemon creates."""
    async with control_server(tmp_path / "run" / "metagpu", HANDLERS) as path:
        assert path == tmp_path / "run" / "metagpu" / SOCKET_NAME
        assert stat.filemode(mode_of(path)) == "srw-------"


ASK_AS_NOBODY = """
import os, socket, sys
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
caller = socket.socket(socket.AF_UNIX)
caller.connect(sys.argv[1])
try:
    caller.sendall(b'{"command":"echo"}\\n' * 2)
except BrokenPipeError:
    pass  # refused already
os.write(1, caller.recv(1000))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused_before_a_byte_is_read(tmp_path: Path) -> None:
    """Another user, whom the file's mode lets in, is kept out by the kernel's word."""
    asked = list[Mapping[str, Any]]()

    async def record(request: Mapping[str, Any]) -> object:
        asked.append(request)
        return None

    await anyio.Path(tmp_path).chmod(0o755)
    async with control_server(tmp_path, {"echo": record}) as path:
        await anyio.Path(path).chmod(0o666)
        done = await anyio.run_process([sys.executable, "-S", "-c", ASK_AS_NOBODY, path])

    assert done.stdout == b'{"error":"only root may ask the daemon","reason":"not_permitted"}\n'
    assert asked == []


async def test_the_socket_goes_with_the_block(tmp_path: Path) -> None:
    """After the block no socket is left, and a client gets an error."""
    async with control_server(tmp_path, HANDLERS) as path:
        pass

    assert not is_there(path)
    with pytest.raises(MetagpuError, match="no daemon answers"):
        await asked(tmp_path, command="echo")


async def test_after_a_cancelled_start_the_next_one_answers(tmp_path: Path) -> None:
    """The next listener has the file descriptor of the cancelled one, and accepts connections."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with control_server(tmp_path, HANDLERS):
            pass
    assert scope.cancelled_caught

    async with control_server(tmp_path, HANDLERS):
        with anyio.fail_after(30):
            assert await asked(tmp_path, command="echo") == {"command": "echo"}


async def test_a_conversation_goes_with_the_block(tmp_path: Path) -> None:
    """Open connections end with the block, and get no more answers."""
    async with AsyncExitStack() as later:
        async with control_server(tmp_path, HANDLERS) as path:
            reader, writer = await later.enter_async_context(connected(path))
            writer.write(b'{"command":"echo"}\n')
            assert await reader.readline() == b'{"ok":{"command":"echo"}}\n'
        assert await reader.read() == b""


async def test_a_dead_daemons_socket_is_replaced(tmp_path: Path) -> None:
    """A socket without a listener is replaced."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / SOCKET_NAME))

    async with control_server(tmp_path, HANDLERS):
        assert await asked(tmp_path, command="echo") == {"command": "echo"}


async def test_a_file_in_the_sockets_place_is_replaced(tmp_path: Path) -> None:
    """A file that is not a socket is replaced."""
    (tmp_path / SOCKET_NAME).write_text("", encoding="utf-8")

    async with control_server(tmp_path, HANDLERS):
        assert await asked(tmp_path, command="echo") == {"command": "echo"}


async def test_a_second_daemon_is_refused(tmp_path: Path) -> None:
    """A second daemon is refused, and the first one continues to answer."""
    async with control_server(tmp_path, HANDLERS):
        with pytest.raises(MetagpuError) as caught:
            async with control_server(tmp_path, {}):
                pass
        assert str(caught.value) == (
            f"another metagpu runs here already: it holds {tmp_path / LOCK_NAME}"
        )
        assert await asked(tmp_path, command="echo") == {"command": "echo"}


async def test_a_daemon_that_still_starts_keeps_others_out(tmp_path: Path) -> None:
    """The lock decides, and not the socket: of two daemons that start together one runs."""
    async with control_server(tmp_path, HANDLERS) as path:
        await anyio.Path(path).unlink()
        with pytest.raises(MetagpuError, match="another metagpu runs here already"):
            async with control_server(tmp_path, HANDLERS):
                pass

    async with control_server(tmp_path, HANDLERS):
        assert await asked(tmp_path, command="echo") == {"command": "echo"}


async def test_a_lock_on_a_removed_file_counts_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file goes between its opening and its lock, as by an uninstallation that ends."""
    locked = fcntl.flock

    def remove_first(file: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", locked)
        (tmp_path / LOCK_NAME).unlink()
        locked(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    async with control_server(tmp_path, HANDLERS):
        with pytest.raises(MetagpuError, match="another metagpu runs here already"):
            async with control_server(tmp_path, HANDLERS):
                pass


async def test_a_foreign_file_in_the_sockets_place_stays(tmp_path: Path) -> None:
    """The end of the block removes the daemon's own socket, and no other file."""
    async with control_server(tmp_path, HANDLERS) as path:
        await anyio.Path(path).unlink()
        await anyio.Path(path).write_text("theirs")

    assert is_there(path)


async def test_a_folder_that_cannot_be_created_is_one_error(tmp_path: Path) -> None:
    """The error is one line with the path, the reason and the fix."""
    await anyio.Path(tmp_path / "file").touch()

    with pytest.raises(MetagpuError) as caught:
        async with control_server(tmp_path / "file" / "run", HANDLERS):
            pass
    assert str(caught.value) == (
        f"cannot make {tmp_path}/file/run: Not a directory; name another folder with --run-dir"
    )


async def test_a_socket_that_cannot_be_created_is_one_error(tmp_path: Path) -> None:
    """A run directory whose path is too long for a socket is one clear error."""
    with pytest.raises(MetagpuError) as caught:
        async with control_server(tmp_path / ("x" * 120), HANDLERS):
            pass
    assert str(caught.value) == (
        f"cannot make {tmp_path / ('x' * 120) / SOCKET_NAME}: AF_UNIX path too long; name a "
        "shorter folder with --run-dir"
    )


async def test_a_folder_without_permission_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run directory without write permission is an error that advises root or another folder."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/run/metagpu")

    monkeypatch.setattr(Path, "mkdir", refuse)

    with pytest.raises(MetagpuError) as caught:
        async with control_server(tmp_path, HANDLERS):
            pass
    assert str(caught.value) == (
        "cannot make /run/metagpu: Permission denied; run as root, or name another folder with "
        "--run-dir"
    )


def test_a_client_without_permission_gets_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client without permission is not advised to start a daemon."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(MetagpuError) as caught:
        send_request(tmp_path, {"command": "status"})
    assert str(caught.value) == f"only root may ask the daemon on {tmp_path / SOCKET_NAME}"


def test_a_client_waits_for_a_silent_daemon_so_long(tmp_path: Path) -> None:
    """A daemon that takes the request and hangs is an error after the timeout."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / SOCKET_NAME))
        silent.listen()
        with pytest.raises(MetagpuError) as caught:
            send_request(tmp_path, {"command": "status"}, timeout=0.05)
    assert str(caught.value) == (
        f"the daemon on {tmp_path / SOCKET_NAME} did not answer within 0.05 s"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [("", "No such file or directory"), ("x" * 120, "AF_UNIX path too long")],
    ids=["no socket", "no path"],
)
def test_a_client_without_a_daemon_gets_advice(tmp_path: Path, name: str, reason: str) -> None:
    """Without a daemon the error names the socket and the fix."""
    with pytest.raises(MetagpuError) as caught:
        send_request(tmp_path / name, {"command": "status"})
    assert str(caught.value) == (
        f"no daemon answers on {tmp_path / name / SOCKET_NAME} ({reason}); start `metagpu run`, or "
        "name its directory with --run-dir"
    )


async def test_a_daemon_that_hangs_up_gives_no_answer(tmp_path: Path) -> None:
    """A daemon that ends in the middle of a request is an error of the client."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    async with await asyncio.start_unix_server(hang_up, tmp_path / SOCKET_NAME):
        with pytest.raises(MetagpuError, match=r"^no answer$"):
            await asked(tmp_path, command="status")
