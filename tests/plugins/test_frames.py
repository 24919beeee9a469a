"""What `mgctl` and the daemon say to each other."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.plugins.frames import (
    LENGTH,
    REQUEST_LIMIT,
    NotUnderstood,
    Request,
    complaint,
    end,
    output,
    request_of,
    size_of,
)
from tests.mgctl_rig import packed

FACTS = b"mgctl/1 tty=1 columns=120 rows=40 old=0\0"


def test_a_request() -> None:
    """Facts of the terminal, then arguments, bytes that are no text among them."""
    assert request_of(FACTS + b"get\0\0\xff\n\0") == Request(
        ("get", "", "\N{REPLACEMENT CHARACTER}\n"), tty=True, columns=120, rows=40
    )


@pytest.mark.parametrize("size", [0, REQUEST_LIMIT + 1, 0x5052])
def test_a_length_that_is_none_of_ours(size: int) -> None:
    """Nothing, too much, and HTTP/2's first letters are refused before anything is read."""
    with pytest.raises(NotUnderstood, match=rf"its length would be {size} bytes$"):
        size_of(LENGTH.pack(size))


@pytest.mark.parametrize(
    ("payload", "answer"),
    [
        (b"mgctl/2 tty=1\0get\0", "does not understand this mgctl; start the container anew"),
        (b"", "does not understand this mgctl"),
        (FACTS[:-1], "does not understand this mgctl"),
        (b"mgctl/1 tty=2 columns=1 rows=1 old=0\0", "its first line is not well formed"),
        (b"mgctl/1 tty=1 columns=999999 rows=1 old=0\0", "its first line is not well formed"),
    ],
)
def test_what_is_no_request(payload: bytes, answer: str) -> None:
    """Another version is told apart from what is not well formed."""
    with pytest.raises(NotUnderstood) as caught:
        request_of(payload)
    assert answer in str(caught.value)


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), max_size=20))
def test_arguments_arrive_as_they_were_said(arguments: list[str]) -> None:
    """Any texts without zeros arrive."""
    data = packed(*arguments)

    assert size_of(data[:2]) == len(data) - 2
    assert request_of(data[2:]).arguments == tuple(arguments)


@given(
    st.one_of(
        st.binary(), st.binary().map(FACTS.__add__), st.binary().map(lambda b: b"mgctl/1 " + b)
    )
)
def test_garbage_is_refused_or_read(payload: bytes) -> None:
    """Whatever comes is a request or refused as none."""
    with suppress(NotUnderstood):
        assert request_of(payload).columns < 100_000


def test_an_answer() -> None:
    """Each frame is a letter, a number, and what it counts."""
    assert output("é") == b"o\0\0\0\x02\xc3\xa9"
    assert complaint("no") == b"e\0\0\0\x02no"
    assert end(2) == b"x\0\0\0\x02"
