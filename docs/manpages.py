"""Writes the manual pages of all programs, from their argument parsers, by `make man`.

Commands, options and variables are those of the parsers; `PAGES` has what no parser knows.
"""

import argparse
import os
import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from metagpu import __version__
from metagpu.agent import paths
from metagpu.cli import arguments, mgctl
from metagpu.cli.options import Variable
from metagpu.cli.parser import actions_of, commands_of
from metagpu.host.service import SETTINGS
from metagpu.kubectl import program as kubectl
from metagpu.plugins.pod_api.command import HELP

FOLDER: Final = Path(__file__).parents[1] / "dist" / "man" / "man1"
SHARED: Final = 3
"""Commands from which on an option that means the same in all of them is listed once."""
_WIDTH: Final = 70
_DONE: Final = {0: "done, or the help was printed", 1: "failed; the reason is on stderr"}
_ENDED: Final = {2: "wrong arguments", 130: "ended by an interrupt"}
_OPTIONS_FIRST: Final = (
    "An option that is given goes before its variables, and of these the first that is set. A flag "
    "is true or false."
)
_NO_COLOR: Final = {"NO_COLOR": "no colours, whatever the value; there are none in a pipe either"}


class Command(NamedTuple):
    """One command of a program, as it is typed, with the other names of its last word."""

    words: str
    parser: argparse.ArgumentParser
    aliases: Sequence[str]


class Page(NamedTuple):
    """One program's page.

    Attributes:
        name: the name of the page.
        parser: the program's parser.
        statuses: the exit statuses, with their meaning.
        variables: variables that set no option.
        files: files and folders, with their meaning.
        sections: more sections; an indented paragraph stays as it is.
    """

    name: str
    parser: argparse.ArgumentParser
    statuses: Mapping[int, str]
    variables: Mapping[str, str]
    files: Mapping[str, str]
    sections: Mapping[str, str] = {}


def pages() -> Sequence[Page]:
    """Return the pages of all programs."""
    settings = Path("/") / SETTINGS
    unfinished = "a wrong configuration (validate), or something left (uninstall --yes)"
    return (
        Page(
            "metagpu",
            arguments.parser(),
            {**_DONE, 1: f"{_DONE[1]}; also {unfinished}", **_ENDED},
            {
                "MIG_PARTED_CONFIG_FILE": "also sets --config, beside CONFIG_FILE",
                "NOTIFY_SOCKET, WATCHDOG_USEC": "systemd's: run reports its start and its life",
                **_NO_COLOR,
            },
            {
                f"{settings}/metagpu.yaml": "the configuration of the service of this host",
                f"{settings}/metagpu.env": "the service's options, as variables",
                f"{paths.RUN_DIR}": "the daemon's control socket and lock, root's alone",
                f"{paths.POD_DIR}": "what is mounted into containers: mgctl and its socket",
                f"{paths.CDI_DIR}": "the folder of the CDI specification",
                f"{paths.KUBELET_DIR}": "the kubelet's sockets for device plugins",
            },
        ),
        Page(
            "mgctl",
            mgctl.parser(),
            {**_DONE, 1: f"{_DONE[1]}; also an error that doctor finds", **_ENDED},
            {
                "METAGPU_SOCKET": "in containers: the daemon's socket",
                **_NO_COLOR,
            },
            {
                f"{paths.RUN_DIR}": "the daemon's control socket",
                "/run/metagpu/mgctl.sock": "in containers: the daemon's socket",
                "/run/metagpu/mgctl, /usr/local/bin/mgctl": "in containers: the program",
            },
            {
                "IN CONTAINERS": "Containers with shares have a program of the same name, without "
                "dependencies, that asks the node's daemon. It has fewer commands:\n\n"
                + textwrap.indent(HELP, "  ")
            },
        ),
        Page(
            "kubectl-metagpu",
            kubectl.parser(),
            {
                **_DONE,
                1: f"{_DONE[1]}; also a pod that does not fit, or that no node could serve, "
                "or a doctor's error",
                **_ENDED,
            },
            _NO_COLOR,
            {"~/.kube/config": "address and credentials of the API server"},
        ),
    )


def commands(parser: argparse.ArgumentParser, words: str = "") -> Iterator[Command]:
    """Yield the commands that do something, each with all its words."""
    words = words or parser.prog
    names: dict[int, list[str]] = defaultdict(list)
    inner = commands_of(parser)
    for name, command in inner.items():
        names[id(command)].append(name)
    for name, *aliases in names.values():
        command = inner[name]
        if commands_of(command):
            yield from commands(command, f"{words} {name}")
        else:
            yield Command(f"{words} {name}", command, aliases)


def render(page: Page, all_names: Iterable[str]) -> str:
    """Return a page in the language of man(7)."""
    at = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH") or 0) or _now(), UTC)
    version = f"metagpu {__version__}"
    found = list(commands(page.parser))
    summary = (page.parser.description or "").rstrip(".")
    counts = Counter(entry for other in found for entry in set(_options(other.parser)))
    shared = {
        option: None
        for each in found
        for option in _options(each.parser)
        if counts[option] >= SHARED
    }
    lines = [
        f'.TH {page.name.upper()} 1 {at:%Y-%m-%d} "{version}" "metagpu"',
        *(".nh", ".ad l"),  # options are not hyphenated
        ".SH NAME",
        rf"{page.name} \- {_escape(summary[:1].lower() + summary[1:])}",
        ".SH SYNOPSIS",
        rf"\fB{_escape(page.parser.prog)}\fR \fICOMMAND\fR [\fIARGUMENT\fR ...]",
        ".SH DESCRIPTION",
        *_text(f"{page.parser.description} Each command has --help."),
        *(line for title, text in page.sections.items() for line in _section(title, text)),
        ".SH COMMANDS",
    ]
    for command in found:
        lines += _command(command, shared)
    lines += [".SH OPTIONS OF SEVERAL COMMANDS", *_entries(shared)]
    lines += [".SH ENVIRONMENT", *_text(_OPTIONS_FIRST)]
    lines += [*_entries([*_variables(found).items(), *page.variables.items()])]
    lines += [".SH FILES", *_entries(page.files.items())]
    lines += [
        ".SH EXIT STATUS",
        *_entries((str(number), text) for number, text in page.statuses.items()),
    ]
    examples = [
        line
        for other in (page.parser, *(other.parser for other in found))
        for line in _examples(other)
    ]
    lines += [".SH EXAMPLES", ".nf", *map(_escape, dict.fromkeys(examples)), ".fi"]
    others = [rf"\fB{_escape(name)}\fR(1)" for name in sorted(all_names) if name != page.name]
    return "\n".join([*lines, ".SH SEE ALSO", ", ".join([*others, r"\fBkubectl\fR(1)"]), ""])


def write(folder: Path = FOLDER) -> None:
    """Write all pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    found = pages()
    for page in found:
        text = render(page, [other.name for other in found])
        (folder / f"{page.name}.1").write_text(text, encoding="utf-8")


def _command(command: Command, shared: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f'.SS "{_escape(command.words)}"'
    yield from _synopsis(command)
    yield ".PP"
    yield from _text(command.parser.description or "")
    if command.aliases:
        yield from _text(f"Also: {', '.join(command.aliases)}.")
    listed = frozenset(shared)
    yield from _entries(option for option in _options(command.parser) if option not in listed)


def _synopsis(command: Command) -> Iterator[str]:
    yield rf"\fB{_escape(command.words)}\fR"
    for action in _arguments(command.parser):
        text = _escape(_invocation(action, action.option_strings[-1:]))
        many = action.nargs in {"+", "*"}
        optional = (action.option_strings and not action.required) or action.nargs in {"?", "*"}
        text = text.replace(" ", r"\ ")  # a line ends between two options
        text += " ..." * many
        yield f"[{text}]" if optional else text


def _arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield arguments and options, but for `--help` and the commands below."""
    for action in actions_of(parser):
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction):  # noqa: SLF001 - argparse has no other way to tell
            yield action


def _invocation(action: argparse.Action, names: Sequence[str]) -> str:
    value = action.metavar if isinstance(action.metavar, str) else ""
    if not value and action.nargs != 0:
        value = "|".join(map(str, action.choices or [action.dest.upper()]))
    return ", ".join(f"{name} {value}".strip() for name in names) or value


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield the arguments as the page lists them: how each is written, and its meaning."""
    expand = parser._get_formatter()._expand_help  # noqa: SLF001 - the text that --help prints
    for action in _arguments(parser):
        yield _invocation(action, action.option_strings), expand(action) if action.help else ""


def _variables(found: Iterable[Command]) -> Mapping[str, str]:
    """Return the variables of options; the first of several counts."""
    options: dict[str, dict[str, None]] = defaultdict(dict)
    for command in found:
        for action in _arguments(command.parser):
            if isinstance(action.default, Variable):
                options[", ".join(action.default.names)][action.option_strings[-1]] = None
    return {names: f"sets {', '.join(its)}" for names, its in sorted(options.items())}


def _examples(parser: argparse.ArgumentParser) -> Sequence[str]:
    head, separator, text = (parser.epilog or "").partition(":")
    if not separator or head not in {"example", "examples"}:
        return ()
    return [line.strip() for line in text.strip().splitlines()]


def _section(title: str, text: str) -> Iterator[str]:
    yield f".SH {title}"
    first, _, rest = text.partition("\n\n")
    yield from _text(first)
    yield from (".PP", ".nf", *(_escape(line) for line in rest.rstrip().splitlines()), ".fi")


def _entries(entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, text in entries:
        yield ".TP"
        yield rf"\fB{_escape(name)}\fR"
        yield from _text(text)


def _text(text: str) -> list[str]:
    plain = " ".join(text.replace("`", "").split())
    return [_escape(name) for name in textwrap.wrap(plain, _WIDTH, break_on_hyphens=False)]


def _escape(text: str) -> str:
    r"""Escape what roff reads as its own: `\`, a hyphen of options, a request at a line's start."""
    return re.sub(r"^(?=[.'])", r"\\&", text.replace("\\", r"\e").replace("-", r"\-"))


def _now() -> float:
    return datetime.now(UTC).timestamp()


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:]))
