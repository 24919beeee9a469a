"""One habit for all programs: what has one name means one thing, in each of them."""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
import structlog

from metagpu.cli import arguments, metagpu, mgctl
from metagpu.cli.loading import configure_log
from metagpu.cli.parser import actions_of, commands_of
from metagpu.core.reports.reading import read_report
from metagpu.core.reports.schema.usage import UsageReport
from metagpu.core.usage.report import without_processes
from metagpu.display.table import TextTable
from metagpu.display.usage import devices_table, pods_table, processes_table
from metagpu.kubectl import program as kubectl_program
from metagpu.kubectl.program import main as kubectl_main
from metagpu.kubectl.tables import KINDS as TABLE_KINDS
from metagpu.kubectl.tables import draw_items, draw_top, read_rows
from metagpu.kubectl.viewer import NodeAnswer
from tests.cli.test_mgctl import answer

PROGRAMS = {
    "metagpu": arguments.parser(),
    "mgctl": mgctl.parser(),
    "kubectl metagpu": kubectl_program.parser(),
}
SHARED = {
    "cordon": {"--reason"},
    "uncordon": set(),
    "explain": {"--output", "--topology"},
    "doctor": {"--output"},
    "get": {"--output", "--watch", "--sort-by", "--namespace", "--all-namespaces"},
    "top": {"--output", "--watch", "--sort-by"},
    "web": {"--address"},
}
"""Commands of several programs -> the options that each of them has."""
MANIFESTS = "kubectl metagpu translate"
"""The command whose output is a manifest."""


def commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.Action]]:
    """Yield all options of a program and its commands, each with its command."""
    for action in actions_of(parser):
        if action.option_strings:
            yield name, action
    for word, command in commands_of(parser).items():
        yield from commands(command, f"{name} {word}")


OPTIONS = [command for name, parser in PROGRAMS.items() for command in commands(parser, name)]


def test_a_short_option_has_one_long_name() -> None:
    """`-o` is `--output` everywhere, `-n` `--namespace`, and so on; and the reverse."""
    longs, shorts = defaultdict(set), defaultdict(set)
    for _, action in OPTIONS:
        short = [string for string in action.option_strings if not string.startswith("--")]
        for long in set(action.option_strings) - set(short):
            shorts[long].add(tuple(short))
            for name in short:
                longs[name].add(long)

    assert {text: names for text, names in longs.items() if len(names) > 1} == {}
    assert {text: names for text, names in shorts.items() if len(names) > 1} == {}
    assert {"-o", "-w", "-n", "-l", "-A"} <= longs.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_shows_an_example(name: str) -> None:
    """Each command's help ends with an example that begins with the command."""
    found = {
        f"{name} {word}": command.format_help()
        for word, command in commands_of(PROGRAMS[name]).items()
    }

    assert len(found) > 3
    assert [each for each, text in found.items() if f"example:\n  {each}" not in text] == []


@pytest.mark.parametrize("option", ["--watch", "--sort-by"])
def test_an_option_has_one_meaning(option: str) -> None:
    """Options of several programs have one help."""
    meanings = {action.help for _, action in OPTIONS if option in action.option_strings}
    assert len(meanings) == 1


def test_each_object_takes_all_namespaces() -> None:
    """`-A` is no error where objects are of the cluster, as kubectl takes it."""
    for command in ("get", "top"):
        parser = kubectl_program.parser()
        for kind in kubectl_program.OBJECTS:
            assert parser.parse_args([command, kind, "-A"]).all_namespaces


def test_every_output_has_the_same_forms() -> None:
    """A table for people is the default; JSON and YAML are for programs; `--json` is short.

    Only a manifest is YAML to begin with.
    """
    forms = {
        (
            tuple(
                choice for choice in action.choices or () if choice not in ("wide", "name", "csv")
            ),
            action.default,
        )
        for name, action in OPTIONS
        if "--output" in action.option_strings and name != MANIFESTS
    }
    with_output = {name for name, action in OPTIONS if "--output" in action.option_strings}
    with_json = {name for name, action in OPTIONS if "--json" in action.option_strings}

    assert forms == {(("table", "json", "yaml"), "table")}
    assert with_json <= with_output


@pytest.mark.parametrize(("command", "expected"), SHARED.items(), ids=SHARED)
def test_a_command_of_several_programs_has_the_same_options(
    command: str, expected: set[str]
) -> None:
    """The same command takes the same options, beside those that say where."""
    having = [other for other in PROGRAMS.values() if command in commands_of(other)]
    assert len(having) == 2
    for program in having:
        options = {
            option
            for _, action in commands(commands_of(program)[command], command)
            for option in action.option_strings
        }
        assert expected <= options


NUMBER = r"(\d+|\?|-)"
MEANINGS = {
    "GPU": r"\d+",
    "GPUS": r"\d+",
    "BUSY": r"(\d+%|-)",
    "LOAD": r"(\d+%|-)",
    "MEMORY": rf"({NUMBER}/)?{NUMBER} MiB",
    "USED": rf"{NUMBER}/{NUMBER} MiB",
    "LIMIT": r"(\d+ MiB|-)",
    "CAPACITY": r"(\d+|-)",
    "GPUS HELD": r"[\d.]+(/\d+)?",
    "SHARES": r"(\d+|-|(\d+(/\d+)? [-./\w]+(, )?)+)",
    "NAMESPACE": r"(team|-)",
    "NODE": "gpu-7",
    "PROCESSES": r"\d+",
}
"""The form of the cells below a header, in the tables of all programs."""


def test_a_header_has_one_meaning() -> None:
    """GPU is an index in each table, BUSY a load, SHARES a number of shares, and so on."""
    report = answer()
    read = read_report(report, UsageReport)
    tables = [
        drawn[0]
        for kind in (devices_table, processes_table, pods_table)
        for drawn in (kind(read), kind(read, wide=True))
    ]
    for kind in TABLE_KINDS:
        rows, _ = read_rows(kind, [NodeAnswer("gpu-7", without_processes(read))])
        tables += draw_items(kind, rows, wide=True)
        tables += draw_top(kind, rows)
    seen = set()
    for table in tables:
        assert isinstance(table, TextTable)
        for place, head in enumerate(table.columns):
            for row in table.rows:
                text = " ".join(cell.text for cell in row[place])
                meaning = MEANINGS.get(head, ".*")
                assert re.fullmatch(meaning, text), (table.columns, head, text)
                seen.add(head)
    assert seen >= MEANINGS.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_says_its_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints name and version."""
    with pytest.raises(SystemExit) as end:
        PROGRAMS[name].parse_args(["--version"])
    assert (end.value.code, capsys.readouterr().out.split()[0]) == (0, name.replace(" ", "-"))


@pytest.mark.parametrize(
    ("run", "line", "reason"),
    [
        (metagpu.main, "status --run-dir ABSENT", "no_daemon"),
        (metagpu.main, "plan --config ABSENT", "unreadable"),
        (mgctl.main, "get pods --run-dir ABSENT", "no_daemon"),
        (kubectl_main, "get nodes", "no_kubeconfig"),
        (kubectl_main, "translate -f ABSENT --nodes ABSENT", "unreadable"),
    ],
)
def test_with_json_a_failure_has_a_reason(  # noqa: PLR0917 - the rows of a table
    run: Callable[[list[str]], int],
    line: str,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `-o json` a failure is one object on stderr; else it is one line for people."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    words = [str(tmp_path / "absent") if part == "ABSENT" else part for part in line.split()]

    assert run([*words, "-o", "json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(err)
    assert (out, err.count("\n"), list(found)) == ("", 1, ["reason", "error"])
    assert found["reason"] == reason

    assert run(words) == 1
    assert capsys.readouterr().err.partition(": ")[2] == f"{found['error']}\n"


@pytest.mark.parametrize("command", ["run --cluster dance", "webhook --order dance"])
def test_a_daemon_that_fails_ends_its_log_with_the_reason(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error that ends a daemon is the last line of its log, also as JSON."""
    assert metagpu.main([*command.split(), "--log-format", "json"]) == 1
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["level"], line["reason"]) == (
        "daemon failed",
        "error",
        "unknown_value",
    )
    assert "'dance' " in line["error"]


@pytest.mark.parametrize(("terminal", "no_color"), [(True, False), (True, True), (False, False)])
def test_the_log_has_colours_on_terminals_alone(
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,  # noqa: FBT001 - a parameter of the test
    no_color: bool,  # noqa: FBT001 - as above
) -> None:
    """The log for people has colours on a terminal, unless NO_COLOR is set, as tables have."""
    stderr, before = StringIO(), structlog.get_config()
    monkeypatch.setattr(stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    try:
        configure_log("info", "console")
        structlog.get_logger("habits").warning("fan stopped")
    finally:
        structlog.configure(**before)

    assert "fan stopped" in stderr.getvalue()
    assert ("\x1b" in stderr.getvalue()) == (terminal and not no_color)
