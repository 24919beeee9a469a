"""Command lines of `mgctl` in a container: untrusted input, simply parsed."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from metagpu.core.errors import MetagpuError
from metagpu.display.options import WIDE_FORMATS as FORMATS
from metagpu.display.usage import KINDS, TOP

HELP: Final = """\
usage: mgctl get devices|processes|pods [-o table|wide|json|yaml] [-w] [--sort-by FIELD]
       mgctl top [-o table|json|yaml] [-w] [--sort-by FIELD]
       mgctl version

Shows this pod's share of the node's GPUs and the pod's processes on them. All numbers are for this
pod alone, and pids are those of its containers.

  -o FORMAT, --output FORMAT   one of table, wide, json, yaml (default: table)
  -w, --watch                  repeat every second
  --sort-by FIELD              a field of -o json: texts from a to z, numbers from the largest
  -h, --help, --version        print this text, or the version
"""

WORDS: Final = ("get", "g", "top", "version", "help")
"""The commands. The program in containers has `HELP` and these for the time without a daemon."""
_KINDS: Final = {word: kind for kind, more in KINDS.items() for word in (kind, *more)}
_REPLACED: Final[Mapping[str, str]] = {
    "config": "the node's configuration decides how GPUs are shared",
    "doctor": "it checks the node, and runs on the node alone",
    "enforce": "the node's daemon enforces memory limits",
    "kill": "mgctl ends no processes; end your own with `kill`",
    "ping": "`mgctl version` shows whether metagpu answers",
    "web": "the page needs the Python package: `python3 -m metagpu.cli.mgctl web`",
}
"""Commands of MetaGPU's mgctl and of the node's mgctl, and what to do instead."""
_UNNEEDED: Final = ("-s", "--addr", "-t", "--token")
"""Options of MetaGPU's mgctl for a server's address and a token."""


class UsageError(MetagpuError):
    """Raised when a command line has an unknown command, option or argument."""


class PodCommand(msgspec.Struct, frozen=True):
    """A parsed command line."""

    name: Literal["get", "top", "version", "help"]
    kind: str = ""
    output_format: str = "table"
    watch: bool = False
    sort_by: str = ""


def parse_command(arguments: Sequence[str]) -> PodCommand:
    """Parse a command line.

    Raises:
        UsageError: the command line is invalid; the message says why.
    """
    words, output_format, watch, sort_by = [], "table", False, ""
    rest = list(arguments)

    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        if option in _UNNEEDED:
            raise UsageError(
                f"{option} is not needed: metagpu runs on this node and identifies the caller"
            )
        if word in {"-h", "--help", "--version"}:
            return PodCommand("version" if word == "--version" else "help")
        if word in {"-w", "--watch"}:
            watch = True
        elif option in {"-o", "--output"}:
            output_format = _parse_format(value if equals else rest.pop(0) if rest else "")
        elif word.startswith("-o"):
            output_format = _parse_format(word.removeprefix("-o"))
        elif option == "--sort-by":
            sort_by = _parse_field(value if equals else rest.pop(0) if rest else "")
        elif word.startswith("-"):
            raise UsageError(f"unknown option {_quoted(option)}; `mgctl --help` lists all options")
        else:
            words.append(word)
    command = _to_command(words)
    if command.name not in ("get", "top"):
        return command
    return replace(command, output_format=output_format, watch=watch, sort_by=sort_by)


def wants_json(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON; an invalid one asks for nothing."""
    try:
        return parse_command(arguments).output_format == "json"
    except UsageError:
        return False


def _to_command(words: Sequence[str]) -> PodCommand:
    match words:
        case ["get" | "g", word] if word in _KINDS:
            return PodCommand("get", _KINDS[word])
        case ["get" | "g", word]:
            raise UsageError(f"cannot get {_quoted(word)}; use one of: {', '.join(KINDS)}")
        case ["get" | "g"]:
            raise UsageError(f"`get` needs one of: {', '.join(KINDS)}")
        case [] | ["help"]:
            return PodCommand("help")
        case ["top"]:
            return PodCommand("top", TOP)
        case ["version"]:
            return PodCommand("version")
        case ["top" | "version" | "get" | "g" as name, *_, last]:
            raise UsageError(f"unexpected argument {_quoted(last)} of {name}")
        case [word, *_] if word in _REPLACED:
            raise UsageError(f"{_quoted(word)}: {_REPLACED[word]}")
    raise UsageError(f"unknown command {_quoted(words[0])}; use one of: get, top, version")


def _parse_format(word: str) -> str:
    if word not in FORMATS:
        raise UsageError(f"unknown format {_quoted(word)}; use one of: {', '.join(FORMATS)}")
    return word


def _parse_field(word: str) -> str:
    if not (word.isascii() and word.isidentifier()):
        raise UsageError(f"{_quoted(word)} is no field; `-o json` shows all fields")
    return word


def _quoted(word: str) -> str:
    """Quote a word of the caller, shortened, with control characters escaped."""
    return ascii(word) if len(word) <= 40 else f"{word[:40]!a}…"  # noqa: PLR2004 - a line
