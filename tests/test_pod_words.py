"""What may be said to `mgctl` in a container."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.pod_words import Command, Misuse, understood
from metagpu.usage_text import FORMATS, KINDS

WORDS = st.sampled_from(
    [
        "get",
        "g",
        "top",
        "version",
        "help",
        *KINDS,
        "p",
        "-o",
        "-w",
        "-ojson",
        "--output=yaml",
        "kill",
    ]
)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("", Command("help")),
        ("get p --help", Command("help")),
        ("get devices", Command("get", "devices")),
        ("g d", Command("get", "devices")),
        ("get process -w", Command("get", "processes", watch=True)),
        ("-o wide get pod", Command("get", "pods", "wide")),
        ("get pods -ojson", Command("get", "pods", "json")),
        ("get pods --output=yaml --watch", Command("get", "pods", "yaml", watch=True)),
        ("top", Command("top")),
        ("version", Command("version")),
    ],
)
def test_what_is_understood(line: str, command: Command) -> None:
    """MetaGPU's words and short forms, options anywhere."""
    assert understood(line.split()) == command


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("get", "say what to get: devices, processes, pods"),
        ("get cakes", "there is no 'cakes' to get; there are: devices, processes, pods"),
        ("get pods bob", "get does not know what to do with 'bob'"),
        ("top -x", "there is no option '-x'; `mgctl --help` names all"),
        ("top 3", "top does not know what to do with '3'"),
        ("get pods -o xml", "there is no format 'xml'; there are: table, wide, json, yaml"),
        ("get pods -o", "there is no format ''; there are: table, wide, json, yaml"),
        ("dance", "there is no command 'dance'; there are: get, top, version"),
        ("doctor", "'doctor': it looks at the node, and runs there alone"),
        ("ping", "'ping': `mgctl version` says whether metagpu answers"),
        ("kill 7", "'kill': end processes of your own as any other; mgctl does not"),
        (
            "--addr=1.2.3.4:50052 get p",
            "--addr is not needed: metagpu is on this node, and knows who asks",
        ),
    ],
)
def test_what_is_not(line: str, answer: str) -> None:
    """A mistake is one line that says what there is; MetaGPU's other commands have their own."""
    with pytest.raises(Misuse) as caught:
        understood(line.split())
    assert str(caught.value) == answer


@given(st.lists(st.one_of(WORDS, st.text())))
def test_whatever_is_said_is_understood_or_refused(arguments: list[str]) -> None:
    """No command line does anything else, and no refusal can steer a terminal."""
    try:
        command = understood(arguments)
    except Misuse as error:
        refusal = str(error)
    else:
        refusal = ""
        assert command.form in FORMATS
        assert (command.kind in KINDS) == (command.name == "get")
    assert refusal.isprintable()
