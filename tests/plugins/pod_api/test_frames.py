"""The frames between `mgctl` and the daemon."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.core.errors import MalformedRequest
from metagpu.plugins.pod_api.frames import (
    LENGTH,
    REQUEST_LIMIT,
    PodRequest,
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
