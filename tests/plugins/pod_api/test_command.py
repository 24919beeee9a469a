"""The command lines of `mgctl` in a container."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.display.options import WIDE_FORMATS as FORMATS
from metagpu.display.usage import KINDS
from metagpu.plugins.pod_api.command import PodCommand, UsageError, parse_command

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
        ("", PodCommand("help")),
        ("get p --help", PodCommand("help")),
        ("get devices", PodCommand("get", "devices")),
        ("g d", PodCommand("get", "devices")),
        ("get process -w", PodCommand("get", "processes", watch=True)),
        ("-o wide get pod", PodCommand("get", "pods", "wide")),
        ("get pods -ojson", PodCommand("get", "pods", "json")),
        ("get pods --output=yaml --watch", PodCommand("get", "pods", "yaml", watch=True)),
        ("get pods --sort-by usedMiB", PodCommand("get", "pods", sort_by="usedMiB")),
        ("get pods --sort-by=pod", PodCommand("get", "pods", sort_by="pod")),
        ("top", PodCommand("top", "top")),
        ("top -w -o json", PodCommand("top", "top", "json", watch=True)),
        ("top --sort-by cpuSeconds", PodCommand("top", "top", sort_by="cpuSeconds")),
        ("version", PodCommand("version")),
        ("--version", PodCommand("version")),
    ],
)
def test_valid_command_lines(line: str, command: PodCommand) -> None:
    """MetaGPU's words and short forms are understood, with options anywhere."""
    assert parse_command(line.split()) == command


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("get", "`get` needs one of: devices, processes, pods"),
        ("get cakes", "cannot get 'cakes'; use one of: devices, processes, pods"),
        ("get pods bob", "unexpected argument 'bob' of get"),
        ("top -x", "unknown option '-x'; `mgctl --help` lists all options"),
        ("top 3", "unexpected argument '3' of top"),
        ("get pods -o xml", "unknown format 'xml'; use one of: table, wide, json, yaml"),
        ("get pods -o", "unknown format ''; use one of: table, wide, json, yaml"),
        ("dance", "unknown command 'dance'; use one of: get, top, version"),
        ("doctor", "'doctor': it checks the node, and runs on the node alone"),
        ("ping", "'ping': `mgctl version` shows whether metagpu answers"),
        (
            "web",
            "'web': the page needs the Python package: `python3 -m metagpu.cli.mgctl web`",
        ),
        ("kill 7", "'kill': mgctl ends no processes; end your own with `kill`"),
        (
            "--addr=1.2.3.4:50052 get p",
            "--addr is not needed: metagpu runs on this node and identifies the caller",
        ),
    ],
)
def test_mistakes_have_one_line(line: str, answer: str) -> None:
    """A mistake is one line with the possible values; MetaGPU's other commands have their own."""
    with pytest.raises(UsageError) as caught:
        parse_command(line.split())
    assert str(caught.value) == answer


@given(st.lists(st.one_of(WORDS, st.text())))
def test_any_command_line_is_understood_or_refused(arguments: list[str]) -> None:
    """Any command line is parsed or refused, and no refusal can control a terminal."""
    try:
        command = parse_command(arguments)
    except UsageError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert command.output_format in FORMATS
        assert (command.kind in KINDS) == (command.name == "get")
    assert refusal.isprintable()
