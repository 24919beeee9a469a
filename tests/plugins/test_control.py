"""The daemon's own socket: one JSON object a line in, one out."""

import asyncio
import errno
import json
import socket
import stat
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from metagpu.core.errors import MetagpuError
from metagpu.plugins.control import LOCK_NAME, SOCKET_NAME, Handler, ask, controlled


async def echo(request: Mapping[str, Any]) -> object:
    """Give back what was asked."""
    return dict(request)


async def refuse(request: Mapping[str, Any]) -> object:
    """Refuse as a command does."""
    raise MetagpuError(f"there is no GPU {request['gpu']}")


async def fail(_: Mapping[str, Any]) -> object:
    """Fail as a command should not."""
    raise ZeroDivisionError("division by zero")


async def odd(_: Mapping[str, Any]) -> object:
    """Answer what no JSON can say."""
    return object()


HANDLERS: Mapping[str, Handler] = {"echo": echo, "refuse": refuse, "fail": fail, "odd": odd}


async def asked(run_dir: Path, **request: object) -> Any:  # noqa: ANN401 - JSON
    """Ask as a command line does, from a thread of its own."""
    return await anyio.to_thread.run_sync(ask, run_dir, request)


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Speak to the socket by hand."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def said(path: Path, *lines: bytes) -> list[Any]:
    """Say lines on one connection and read an answer to each."""
    async with connected(path) as (reader, writer):
        answers = []
        for line in lines:
            writer.write(line + b"\n")
            answers.append(json.loads(await reader.readline()))
        return answers


async def test_a_request_is_answered(tmp_path: Path) -> None:
    """A command's handler gets the whole request; what it gives is the answer."""
    async with controlled(tmp_path, HANDLERS):
        assert await asked(tmp_path, command="echo", gpu=3) == {"command": "echo", "gpu": 3}


async def test_several_requests_on_one_connection(tmp_path: Path) -> None:
    """A connection is a conversation: each line is answered in turn, errors included."""
    async with controlled(tmp_path, HANDLERS) as path:
        answers = await said(path, b'{"command":"echo"}', b"nonsense", b'{"command":"echo","n":2}')

    assert [list(answer) for answer in answers] == [["ok"], ["error"], ["ok"]]
    assert answers[2] == {"ok": {"command": "echo", "n": 2}}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"command":"dance"}', "no command 'dance'; there are: echo, refuse, fail, odd"),
        (b"{}", "no command None; there are: echo, refuse, fail, odd"),
        (b'{"command":["echo"]}', "no command ['echo']; there are: echo, refuse, fail, odd"),
        (b"{", "Input data was truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"\xff", "JSON is malformed: invalid character (byte 0)"),
        (b'{"\x80":1}', "'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte"),
        (b'{"command":"refuse","gpu":7}', "there is no GPU 7"),
        (
            b'{"command":"fail"}',
            "the daemon failed (ZeroDivisionError('division by zero')); its log has the details",
        ),
        (
            b'{"command":"refuse"}',
            "the daemon failed (KeyError('gpu')); its log has the details",
        ),
    ],
)
async def test_what_cannot_be_done_is_an_error(tmp_path: Path, line: bytes, text: str) -> None:
    """Unknown commands, lines that are no request and failing handlers are each told."""
    async with controlled(tmp_path, HANDLERS) as path:
        assert await said(path, line) == [{"error": text}]


async def test_an_answer_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    """A handler's fault is answered, and the connection goes on."""
    async with controlled(tmp_path, HANDLERS) as path:
        first, second = await said(path, b'{"command":"odd"}', b'{"command":"echo"}')

    assert first["error"].startswith("the daemon failed (TypeError(")
    assert second == {"ok": {"command": "echo"}}


async def test_an_error_reaches_the_command_line(tmp_path: Path) -> None:
    """A client raises what the daemon answers."""
    async with controlled(tmp_path, HANDLERS):
        with pytest.raises(MetagpuError, match=r"^there is no GPU 7$"):
            await asked(tmp_path, command="refuse", gpu=7)


async def test_a_caller_that_hangs_up_disturbs_nobody(tmp_path: Path) -> None:
    """Half a request, or one whose answer nobody reads, leaves the daemon as it was."""
    async with controlled(tmp_path, HANDLERS) as path:
        for half in (b"", b'{"command":', b'{"command":"echo"}\n' * 100):
            async with connected(path) as (_, writer):
                writer.write(half)
        assert await asked(tmp_path, command="echo") == {"command": "echo"}


async def test_a_line_without_end_is_not_listened_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line longer than any of ours ends the conversation, not the daemon."""
    monkeypatch.setattr("metagpu.plugins.control._LINE_LIMIT", 64)
    async with controlled(tmp_path, HANDLERS) as path:
        async with connected(path) as (reader, writer):
            writer.write(b"x" * 1000 + b"\n")
            assert await reader.read() == b""
        assert await asked(tmp_path, command="echo") == {"command": "echo"}


def is_there(path: Path) -> bool:
    """Say whether there is such a file."""
    return path.exists()


def mode_of(path: Path) -> int:
    """Say what a file is and who may open it."""
    return path.stat().st_mode


# --- the socket -----------------------------------------------------------------------------------


async def test_only_root_may_open_the_socket(tmp_path: Path) -> None:
    """The socket is for its owner alone, in a folder that is made for it."""
    async with controlled(tmp_path / "run" / "metagpu", HANDLERS) as path:
        assert path == tmp_path / "run" / "metagpu" / SOCKET_NAME
        assert stat.filemode(mode_of(path)) == "srw-------"


async def test_the_socket_goes_with_the_block(tmp_path: Path) -> None:
    """After the block nobody answers, and nothing is left behind."""
    async with controlled(tmp_path, HANDLERS) as path:
        pass

    assert not is_there(path)
    with pytest.raises(MetagpuError, match="no daemon answers"):
        await asked(tmp_path, command="echo")


async def test_a_conversation_goes_with_the_block(tmp_path: Path) -> None:
    """Whoever is still connected when the block ends hears that it has, and is answered no more."""
    async with AsyncExitStack() as later:
        async with controlled(tmp_path, HANDLERS) as path:
            reader, writer = await later.enter_async_context(connected(path))
            writer.write(b'{"command":"echo"}\n')
            assert await reader.readline() == b'{"ok":{"command":"echo"}}\n'
        assert await reader.read() == b""


async def test_a_dead_daemons_socket_is_replaced(tmp_path: Path) -> None:
    """A socket on which nobody answers is in nobody's way."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / SOCKET_NAME))

    async with controlled(tmp_path, HANDLERS):
        assert await asked(tmp_path, command="echo") == {"command": "echo"}


async def test_a_file_in_the_sockets_place_is_replaced(tmp_path: Path) -> None:
    """What is no socket does not answer either."""
    (tmp_path / SOCKET_NAME).write_text("", encoding="utf-8")

    async with controlled(tmp_path, HANDLERS):
        assert await asked(tmp_path, command="echo") == {"command": "echo"}


async def test_a_second_daemon_is_refused(tmp_path: Path) -> None:
    """Two daemons would offer every share twice; the first one stays and goes on answering."""
    async with controlled(tmp_path, HANDLERS):
        with pytest.raises(MetagpuError) as caught:
            async with controlled(tmp_path, {}):
                pass
        assert str(caught.value) == (
            f"another metagpu runs here already: it holds {tmp_path / LOCK_NAME}"
        )
        assert await asked(tmp_path, command="echo") == {"command": "echo"}


async def test_a_daemon_that_still_starts_keeps_others_out(tmp_path: Path) -> None:
    """The lock decides, not the socket: of two that start together one runs."""
    async with controlled(tmp_path, HANDLERS) as path:
        await anyio.Path(path).unlink()
        with pytest.raises(MetagpuError, match="another metagpu runs here already"):
            async with controlled(tmp_path, HANDLERS):
                pass

    async with controlled(tmp_path, HANDLERS):
        assert await asked(tmp_path, command="echo") == {"command": "echo"}


async def test_what_others_put_in_the_sockets_place_stays(tmp_path: Path) -> None:
    """The end of the block removes the socket that its beginning made, and no other file."""
    async with controlled(tmp_path, HANDLERS) as path:
        await anyio.Path(path).unlink()
        await anyio.Path(path).write_text("theirs")

    assert is_there(path)


async def test_a_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    """The operator reads one line that says which file, why, and what to do."""
    await anyio.Path(tmp_path / "file").touch()

    with pytest.raises(MetagpuError) as caught:
        async with controlled(tmp_path / "file" / "run", HANDLERS):
            pass
    assert str(caught.value) == (
        f"cannot make {tmp_path}/file/run: Not a directory; name another folder with --run-dir"
    )


async def test_a_socket_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    """A run directory whose name leaves no room for a socket's path is told so."""
    with pytest.raises(MetagpuError) as caught:
        async with controlled(tmp_path / ("x" * 120), HANDLERS):
            pass
    assert str(caught.value) == (
        f"cannot make {tmp_path / ('x' * 120) / SOCKET_NAME}: AF_UNIX path too long; name a "
        "shorter folder with --run-dir"
    )


async def test_a_folder_of_others_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may not write the run directory is told to be root, or to take another."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/run/metagpu")

    monkeypatch.setattr(Path, "mkdir", refuse)

    with pytest.raises(MetagpuError) as caught:
        async with controlled(tmp_path, HANDLERS):
            pass
    assert str(caught.value) == (
        "cannot make /run/metagpu: Permission denied; run as root, or name another folder with "
        "--run-dir"
    )


def test_a_client_without_the_right_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may not open the socket is not sent to start a daemon that runs."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(MetagpuError) as caught:
        ask(tmp_path, {"command": "status"})
    assert str(caught.value) == f"only root may ask the daemon on {tmp_path / SOCKET_NAME}"


def test_a_client_waits_for_a_silent_daemon_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that takes the request and hangs is told as such."""
    monkeypatch.setattr("metagpu.plugins.control._ANSWER_DEADLINE", 0.05)

    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / SOCKET_NAME))
        silent.listen()
        with pytest.raises(MetagpuError) as caught:
            ask(tmp_path, {"command": "status"})
    assert str(caught.value) == (
        f"the daemon on {tmp_path / SOCKET_NAME} did not answer within 0.05 s"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [("", "No such file or directory"), ("x" * 120, "AF_UNIX path too long")],
    ids=["no socket", "no path"],
)
def test_a_client_that_nobody_answers_says_what_to_do(
    tmp_path: Path, name: str, reason: str
) -> None:
    """Without a daemon the command line names the socket and the way out."""
    with pytest.raises(MetagpuError) as caught:
        ask(tmp_path / name, {"command": "status"})
    assert str(caught.value) == (
        f"no daemon answers on {tmp_path / name / SOCKET_NAME} ({reason}); start `metagpu run`, or "
        "name its directory with --run-dir"
    )


async def test_a_daemon_that_hangs_up_gives_no_answer(tmp_path: Path) -> None:
    """A daemon that ends in the middle of a request is told as such."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    async with await asyncio.start_unix_server(hang_up, tmp_path / SOCKET_NAME):
        with pytest.raises(MetagpuError, match=r"^no answer$"):
            await asked(tmp_path, command="status")
