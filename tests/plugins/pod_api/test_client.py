"""The socket that containers see, asked from Python."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from metagpu.cli import mgctl
from metagpu.core.errors import MetagpuError
from metagpu.plugins.pod_api.client import ask_daemon
from metagpu.plugins.pod_api.frames import (
    PodRequest,
    exit_frame,
    parse_length,
    parse_request,
    stderr_frame,
    stdout_frame,
)


def ask(path: Path, answer: bytes | None) -> tuple[PodRequest, str]:
    """Ask a daemon that answers so, or not at all; return its request, and what is returned."""
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(path))
        listener.listen()
        asked = pool.submit(ask_daemon, path, "get", "pods", timeout=60 if answer else 0.05)
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as file:
            request = parse_request(file.read(parse_length(file.read(2))))
            if answer is None:
                asked.exception()
            else:
                connection.sendall(answer)
        return request, asked.result()


def test_a_command_line_is_answered(tmp_path: Path) -> None:
    """The daemon reads the words; all parts of its output are one text."""
    answer = stdout_frame('{"a"') + stderr_frame("mgctl: by the way\n") + stdout_frame(": 1}")
    request, text = ask(tmp_path / "s", answer + exit_frame(0))
    assert (request, text) == (PodRequest(("get", "pods")), '{"a": 1}')


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (stderr_frame("mgctl: this pod asks too often\n") + exit_frame(1), "^this pod asks too of"),
        (stderr_frame('{"reason":"x","error":"not now"}\n') + exit_frame(1), "^not now$"),
        (stdout_frame("half")[:-1], "broke off its answer"),
        (b"HTTP/1.1 400", "is not metagpu's socket"),
        (None, "sent nothing for 0.05 s$"),
    ],
    ids=["refused", "refused with a reason", "restarted", "another program", "silent"],
)
def test_no_answer_is_one_line(tmp_path: Path, answer: bytes | None, text: str) -> None:
    """A refusal has the text of the daemon; any other failure says what is wrong."""
    with pytest.raises(MetagpuError, match=text):
        ask(tmp_path / "s", answer)


def test_the_page_of_a_pod_needs_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Outside a container with shares there is one line, and no page."""
    path = tmp_path / "s"
    monkeypatch.setenv("METAGPU_SOCKET", str(path))
    assert mgctl.main(["web", "--address", "127.0.0.1:0"]) == 1
    text = f"mgctl: there is no {path}: metagpu does not run on this node now, or not for "
    assert capsys.readouterr().err == f"{text}containers, or this container holds no share\n"

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    with pytest.raises(MetagpuError, match=r"^no daemon answers on .*: Connection refused$"):
        ask_daemon(path, "version")
