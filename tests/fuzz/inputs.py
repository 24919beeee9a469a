"""Input of a malicious caller: nonsense, partial requests, and nearly valid ones."""

import json
from typing import Any, Final

from hypothesis import strategies as st

from metagpu.plugins.pod_api.command import HELP
from metagpu.plugins.pod_api.frames import LENGTH, REQUEST_LIMIT
from tests.rigs.mgctl import pack_request

_FACTS: Final = "mgctl/1 tty=0 columns=0 rows=0 old=0"

_WORDS: Final = sorted({word.strip("[]|,.") for word in HELP.split()} - {""})
_OTHERS: Final = ("bob", "--pod=bob", "default/bob", "-A", "--all", "--token", "../../proc/1/root")
_MARKS: Final = ("\0", "\x1b[2J", "%s%n", "￿", "'; --", "\r\n", "a" * 300)

words = st.one_of(st.sampled_from(_WORDS + list(_OTHERS + _MARKS)), st.text(max_size=20))

facts = st.one_of(
    st.just(_FACTS),
    st.builds(
        "mgctl/{} tty={} columns={} rows={} old={}".format,
        st.sampled_from(["1", "0", "2", "1 "]),
        st.sampled_from(["0", "1", "2", ""]),
        st.integers(-1, 10**6),
        st.integers(-1, 10**6),
        st.sampled_from(["0", "1", "x"]),
    ),
    st.text(max_size=60),
)


def _framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


@st.composite
def _mutated(draw: st.DrawFn, good: st.SearchStrategy[bytes]) -> bytes:
    """Cut a valid request short, insert bytes, or change a byte."""
    data = bytearray(draw(good))

    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["cut", "insert", "change", "repeat"])):
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(max_size=8))
            case "change" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case _:
                data += data[:at]
    return bytes(data)


_honest = st.builds(pack_request, words, words, words)
_nearly = st.builds(
    lambda first, rest: pack_request(*rest, facts=first),
    facts.filter(str.isprintable),
    st.lists(words, max_size=6),
)

pod_requests = st.one_of(
    _honest,
    _nearly,
    _mutated(_nearly),
    st.binary(max_size=REQUEST_LIMIT).map(_framed),
    st.binary(max_size=300),
)
"""Bytes for the socket that containers call."""

_COMMANDS: Final = ("status", "plan", "usage", "acknowledge", "cordon", "uncordon")
_FIELDS: Final = ("gpu", "reason", "text", "file", "command")

_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=40)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
_texts = st.one_of(
    st.sampled_from(
        [
            "version: metagpu/v1\npools: []\n",
            "version: metagpu/v1\npools: [{name: a, backends: [{backend: fraction}]}]\n",
            "version: v1\nsharing: {timeSlicing: {resources: [{name: a/b, replicas: 2}]}}",
            "&a [*a]",
            "a: &a [1]\nb: [*a, *a]\n",
            "? : : -",
        ]
    ),
    st.text(max_size=200),
)


def _line(request: Any) -> bytes:  # noqa: ANN401 - JSON
    return json.dumps(request).encode() + b"\n"


_commands = st.builds(
    lambda command, fields: {**fields, "command": command},
    st.sampled_from(_COMMANDS),
    st.dictionaries(
        st.sampled_from(_FIELDS), st.one_of(st.sampled_from(["0", "1", "9"]), _texts, _values)
    ),
).map(_line)

control_requests = st.one_of(
    _commands,
    _values.map(_line),
    _mutated(_commands).map(lambda data: data.replace(b"\n", b" ") + b"\n"),
    st.binary(max_size=300).map(lambda data: data.replace(b"\n", b" ") + b"\n"),
)
"""Lines for the daemon's own socket."""
