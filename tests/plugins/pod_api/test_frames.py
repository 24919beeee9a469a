"""The frames between `mgctl` and the daemon."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.cli import mgctl
from metagpu.core.errors import MalformedRequest, MetagpuError
from metagpu.plugins.pod_api.frames import (
    LENGTH,
    REQUEST_LIMIT,
    PodRequest,
    ask_daemon,
    exit_frame,
    parse_length,
    parse_request,
    stderr_frame,
    stdout_frame,
)
from tests.rigs.mgctl import pack_request

FACTS = b"mgctl/1 tty=1 columns=120 rows=40 old=0\0"


def test_a_request() -> None:
    """A request has facts of the terminal, then arguments, also bytes that are not text."""
    assert parse_request(FACTS + b"get\0\0\xff\n\0") == PodRequest(
        ("get", "", "\N{REPLACEMENT CHARACTER}\n"), tty=True, columns=120, rows=40
    )


@pytest.mark.parametrize("size", [0, REQUEST_LIMIT + 1, 0x5052])
def test_a_length_that_is_none_of_ours(size: int) -> None:
    """Length zero, too much, and HTTP/2's first letters are refused before anything is read."""
    with pytest.raises(MalformedRequest, match=rf"its length would be {size} bytes$"):
        parse_length(LENGTH.pack(size))


@pytest.mark.parametrize(
    ("payload", "answer"),
    [
        (b"mgctl/2 tty=1\0get\0", "does not understand this mgctl; restart the container"),
        (b"", "does not understand this mgctl"),
        (FACTS[:-1], "does not understand this mgctl"),
        (b"mgctl/1 tty=2 columns=1 rows=1 old=0\0", "its first line is not well formed"),
        (b"mgctl/1 tty=1 columns=999999 rows=1 old=0\0", "its first line is not well formed"),
    ],
)
def test_invalid_requests(payload: bytes, answer: str) -> None:
    """Another version has its own error, different from a malformed request."""
    with pytest.raises(MalformedRequest) as caught:
        parse_request(payload)
    assert answer in str(caught.value)


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), max_size=20))
def test_arguments_arrive_unchanged(arguments: list[str]) -> None:
    """Any texts without zero bytes arrive unchanged."""
    data = pack_request(*arguments)

    assert parse_length(data[:2]) == len(data) - 2
    assert parse_request(data[2:]).arguments == tuple(arguments)


@given(
    st.one_of(
        st.binary(), st.binary().map(FACTS.__add__), st.binary().map(lambda b: b"mgctl/1 " + b)
    )
)
def test_garbage_is_refused_or_read(payload: bytes) -> None:
    """Any bytes are a request or are refused."""
    with suppress(MalformedRequest):
        assert parse_request(payload).columns < 100_000


def test_an_answer() -> None:
    """Each frame is a letter, a number, and as many bytes."""
    assert stdout_frame("é") == b"o\0\0\0\x02\xc3\xa9"
    assert stderr_frame("no") == b"e\0\0\0\x02no"
    assert exit_frame(2) == b"x\0\0\0\x02"


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
