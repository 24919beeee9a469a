"""What may be said to `mgctl` in a container: from strangers, so nothing clever reads it."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from metagpu.core.errors import MetagpuError
from metagpu.usage_text import FORMATS, KINDS

HELP: Final = """\
usage: mgctl get devices|processes|pods [-o table|wide|json|yaml] [-w]
       mgctl top
       mgctl version

Says what this pod has of the node's GPUs, and who in it uses them. All numbers are this pod's own,
and pids are those of its containers.

  -o FORMAT, --output FORMAT   one of table, wide, json, yaml (default: table)
  -w, --watch                  again every second
  -h, --help                   this text
"""

_KINDS: Final = {word: kind for kind, more in KINDS.items() for word in (kind, *more)}
_GONE: Final[Mapping[str, str]] = {
    "config": "how GPUs are cut is said in the node's configuration",
    "doctor": "it looks at the node, and runs there alone",
    "enforce": "memory is enforced by the node's daemon",
    "kill": "end processes of your own as any other; mgctl does not",
    "ping": "`mgctl version` says whether metagpu answers",
}
"""Commands of other places and times, and what to do instead."""
_NEEDLESS: Final = ("-s", "--addr", "-t", "--token")
"""Options of MetaGPU's mgctl that say whom to ask, and as whom."""


class Misuse(MetagpuError):
    """Raised when a command line says nothing that we know."""


class Command(msgspec.Struct, frozen=True):
    """A command line that was understood."""

    name: Literal["get", "top", "version", "help"]
    kind: str = ""
    form: str = "table"
    watch: bool = False


def understood(arguments: Sequence[str]) -> Command:
    """Read a command line.

    Raises:
        Misuse: if it cannot be read; says why.
    """
    words, form, watch = [], "table", False
    rest = list(arguments)

    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        if option in _NEEDLESS:
            raise Misuse(f"{option} is not needed: metagpu is on this node, and knows who asks")
        if word in {"-h", "--help"}:
            return Command("help")
        if word in {"-w", "--watch"}:
            watch = True
        elif option in {"-o", "--output"}:
            form = _form(value if equals else rest.pop(0) if rest else "")
        elif word.startswith("-o"):
            form = _form(word.removeprefix("-o"))
        elif word.startswith("-"):
            raise Misuse(f"there is no option {_quoted(option)}; `mgctl --help` names all")
        else:
            words.append(word)
    return _command(words, form, watch=watch)


def _command(words: Sequence[str], form: str, *, watch: bool) -> Command:
    match words:
        case ["get" | "g", word] if word in _KINDS:
            return Command("get", _KINDS[word], form, watch)
        case ["get" | "g", word]:
            raise Misuse(f"there is no {_quoted(word)} to get; there are: {', '.join(KINDS)}")
        case ["get" | "g"]:
            raise Misuse(f"say what to get: {', '.join(KINDS)}")
        case [] | ["help"]:
            return Command("help")
        case ["top" | "version" as name]:
            return Command(name)
        case ["top" | "version" | "get" | "g" as name, *_, last]:
            raise Misuse(f"{name} does not know what to do with {_quoted(last)}")
        case [word, *_] if word in _GONE:
            raise Misuse(f"{_quoted(word)}: {_GONE[word]}")
    raise Misuse(f"there is no command {_quoted(words[0])}; there are: get, top, version")


def _form(word: str) -> str:
    if word not in FORMATS:
        raise Misuse(f"there is no format {_quoted(word)}; there are: {', '.join(FORMATS)}")
    return word


def _quoted(word: str) -> str:
    """Repeat what was said, if it is short, and so that a terminal does not obey it."""
    return ascii(word) if len(word) <= 40 else f"{word[:40]!a}…"  # noqa: PLR2004 - a line
