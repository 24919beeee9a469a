"""Completion of command lines in a shell, for all programs, by their own parsers.

bash runs the program itself for it (`complete -o default -C mgctl mgctl`), with the line in
COMP_LINE, and completes names of files where it prints nothing; zsh does so after `bashcompinit`.
"""

import argparse
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence

from metagpu.cli.parser import Parser


def complete_line(
    parser: argparse.ArgumentParser, environment: Mapping[str, str] = os.environ
) -> bool:
    """Print what completes the line of a shell; return whether there is a line."""
    if (line := environment.get("COMP_LINE")) is None:
        return False
    point = environment.get("COMP_POINT", "")
    before = line[: int(point)] if point.isdecimal() else line
    for word in completions(parser, _split(before)[1:]):
        print(word)  # noqa: T201 - a command line speaks so
    return True


def completions(parser: argparse.ArgumentParser, words: Sequence[str]) -> Sequence[str]:
    """Return what the last word may become; the words before it choose the command."""
    parser, value_of, current = _place(parser, words)
    if value_of is not None:
        found: Iterable[object] = value_of.choices or ()
    elif current.startswith("-"):
        found = (name for action in actions_of(parser) for name in action.option_strings)
    else:
        found = commands_of(parser) or (
            it
            for action in actions_of(parser)
            if not action.option_strings
            for it in action.choices or ()
        )
    return sorted(name for name in map(str, found) if name.startswith(current))


def wants_file(parser: argparse.ArgumentParser, words: Sequence[str]) -> bool:
    """Return whether the last word is the value of an option that names a file."""
    _, value_of, _ = _place(parser, words)
    return value_of is not None and value_of.metavar == "FILE"


def _place(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.ArgumentParser, argparse.Action | None, str]:
    """Return the command of the last word, its option if it is a value, and the word."""
    *before, current = words or [""]
    value_of: argparse.Action | None = None
    for word in before:
        inner = None if value_of else commands_of(parser).get(word)
        value_of = None if value_of else _option(parser, word)
        parser = inner or parser
    return parser, value_of, current


def actions_of(parser: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    """Return the arguments of a command, those too that it adds late."""
    if isinstance(parser, Parser) and parser.add_late is not None:
        add, parser.add_late = parser.add_late, None
        add(parser)
    return parser._actions  # noqa: SLF001 - argparse has no other way to list them


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the commands below a command, also under their other names."""
    for action in actions_of(parser):
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            found: Mapping[str, argparse.ArgumentParser] = action.choices
            return found
    return {}


def _option(parser: argparse.ArgumentParser, word: str) -> argparse.Action | None:
    """Return the option of a word, if a value follows it."""
    for action in actions_of(parser):
        if word in action.option_strings and action.nargs != 0:
            return action
    return None


def _split(line: str) -> list[str]:
    """Split a line into words; the last may be empty, or have an open quotation mark."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    return words if line[-1:].strip() else [*words, ""]
