"""The parser of all programs: shared arguments, one-line errors, completion.

bash runs the program itself to complete (`complete -o default -C mgctl mgctl`), with the line in
COMP_LINE, and completes names of files where it prints nothing; zsh does so after `bashcompinit`.
"""

import argparse
import errno
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from textwrap import fill
from typing import Any, Final, NoReturn

from metagpu.cli.options import resolve_environment
from metagpu.core.config.errors import allowed_values, suggest
from metagpu.core.errors import ClusterError, MetagpuError

_INVALID_CHOICE: Final = re.compile(
    r"(?:argument )?(.*?): invalid choice: (.*) \(choose from (.*)\)"
)
"""argparse's message for a value that is not among an argument's choices."""
_INTERRUPTED: Final = 130
"""The exit status after an interrupt, as shells have it."""
_DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def _unknown(argument: str, given: str, known: Sequence[str]) -> str:
    """Return the message for a wrong value; a command has its nearest name alone."""
    if not argument.isupper():
        return f"{argument}: {given!r} is unknown; {allowed_values(given, known)}"
    near = suggest(given, known).removeprefix("; did you mean ").removesuffix("?")
    rest = f". Did you mean {near!r}?" if near else f"; allowed: {', '.join(known)}"
    return f"unknown {argument.lower()} {given!r}{rest}"


class Parser(argparse.ArgumentParser):
    """A parser with errors of one line; argparse prints a page of usage first.

    Attributes:
        add_late: adds arguments when this parser is first used, so that other commands need not
            load the modules behind them.
    """

    add_late: Callable[["Parser"], None] | None = None

    def error(self, message: str) -> NoReturn:
        """Print in one line the error and the allowed values, and exit with status 2."""
        if choice := _INVALID_CHOICE.fullmatch(message):
            given, known = choice[2].strip("'"), choice[3].replace("'", "").split(", ")
            message = _unknown(choice[1], given, known)
        for action in self._actions:
            if message == f"the following arguments are required: {action.metavar}":
                names = commands_of(self) and dict.fromkeys(
                    parser.prog.split()[-1] for parser in commands_of(self).values()
                )
                message += f", one of {', '.join(names)}" if names else ""
        see = " See" if message.endswith("?") else "; see"
        self.exit(2, f"{self.prog}: {message}{see} `{self.prog} --help`\n")

    def parse_args(  # type: ignore[override]  # its overloads are about the namespace's type
        self,
        args: Sequence[str] | None = None,
        namespace: Any = None,  # noqa: ANN401 - argparse takes any object
    ) -> Any:  # noqa: ANN401 - as above
        """Parse the arguments of a program; without any, print its help and exit."""
        if not (sys.argv[1:] if args is None else args):
            self.print_help()
            self.exit()
        return super().parse_args(args, namespace)

    def parse_known_args(  # type: ignore[override]  # its overloads are about the namespace's type
        self,
        args: Sequence[str] | None = None,
        namespace: Any = None,  # noqa: ANN401 - argparse takes any object
    ) -> tuple[Any, list[str]]:
        """Parse arguments; refuse unknown ones here, where the options are known."""
        if self.add_late is not None:
            add, self.add_late = self.add_late, None
            add(self)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [name for action in self._actions for name in action.option_strings]
            near = suggest(unknown[0].partition("=")[0], options)
            self.error(f"unknown arguments: {' '.join(unknown)}{near}")
        return found, unknown


def add_command(
    commands: Any,  # noqa: ANN401 - argparse names the type of its sub-parsers privately
    name: str,
    summary: str,
    example: str,
    aliases: Sequence[str] = (),
) -> Parser:
    """Add a command; the list of commands has the first sentence of its summary."""
    command: Parser = commands.add_parser(
        name,
        aliases=aliases,
        help=summary.partition(". ")[0],
        description=fill(summary[:1].upper() + summary[1:] + ".", 78),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return command


def add_reason(parser: argparse.ArgumentParser) -> None:
    """Add the option for the reason of a cordon."""
    parser.add_argument(
        "--reason", default="", metavar="TEXT", help="a text for the refused pods' events"
    )


def run_command(program: str, args: argparse.Namespace, do: Callable[[], int]) -> int:
    """Run a command and flush its output; return its status, 1 for lost output.

    A `MetagpuError` is one line on stderr and the status 1: with `-o json` an object with the
    error's reason, and for a daemon whose log is JSON a line of the log.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # Latin-1 has no lines and bars
    try:
        status = do()
        if sys.stdout is not None:
            sys.stdout.flush()
    except (MetagpuError, BaseExceptionGroup) as error:
        known = _metagpu_error(error)
        if known is None:
            raise
        print(_failure(program, known, args), file=sys.stderr)  # noqa: T201 - a command line speaks so
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        _discard_output()
        return 1
    except OSError as error:
        if error.errno in _DISK_ERRORS:
            _discard_output()
            text = f"cannot write: {error.strerror}"
        elif error.filename:
            denied = error.errno in (errno.EACCES, errno.EPERM)
            text = f"{error.filename}: {error.strerror}{'; run it as root' if denied else ''}"
        else:
            raise
        print(f"{program}: {text}", file=sys.stderr)  # noqa: T201 - a command line speaks so
        return 1
    return status


def _metagpu_error(error: BaseException) -> MetagpuError | None:
    """Return a task group's `MetagpuError`, `None` if the group has another error."""
    if isinstance(error, BaseExceptionGroup):
        found = [_metagpu_error(inner) for inner in error.exceptions]
        return None if None in found else found[0]
    return error if isinstance(error, MetagpuError) else None


def _failure(program: str, error: MetagpuError, args: argparse.Namespace) -> str:
    """Return the line about an error: of one by the API server, its own text."""
    text = error.message if isinstance(error, ClusterError) and error.message else str(error)
    described = {"reason": error.reason, "error": text}
    if getattr(args, "output", "") == "json":
        return json.dumps(described)
    if getattr(args, "log_format", "") == "json":
        return json.dumps({**described, "event": "daemon failed", "level": "error"})
    return f"{program}: {text}"


def _discard_output() -> None:
    """Redirect stdout to /dev/null: Python flushes it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


SHELLS: Final[Mapping[str, str]] = {
    "bash": "complete -o default -C {program} {program}\n",
    "zsh": (
        "autoload -U +X compinit && compinit\n"
        "autoload -U +X bashcompinit && bashcompinit\n"
        "complete -o default -C {program} {program}\n"
    ),
    "fish": (
        "complete --command {program} --arguments "
        "'(env COMP_LINE=(commandline --cut-at-cursor) {program})'\n"
    ),
}
"""What a shell reads to have a program complete its own lines, by the shell's name."""


def add_completion(commands: Any, program: str, note: str = "") -> Parser:  # noqa: ANN401 - as above
    """Add the command that prints what a shell reads; `note` is a comment in it."""
    command = add_command(
        commands,
        "completion",
        "print what a shell reads to complete commands, options and the names of what is there",
        f"{program} completion bash >> ~/.bashrc",
    )
    command.add_argument("shell", metavar="SHELL", choices=tuple(SHELLS), help=", ".join(SHELLS))
    command.set_defaults(do=_print_completion, program=program.replace(" ", "-"), note=note)
    return command


def _print_completion(args: argparse.Namespace) -> int:
    note = f"# {args.note}\n" if args.note else ""
    print(note + SHELLS[args.shell].format(program=args.program), end="")  # noqa: T201
    return 0


Completer = Callable[[argparse.Namespace, str], Iterable[object]]
"""Finds the values of an argument by the word so far, and by the arguments that the line has.

`given` of these has all values of each, where an argument may be repeated.
"""


def completed_by(action: argparse.Action, complete: Completer) -> None:
    """Complete an argument by the pods, nodes or GPUs that are there."""
    action.complete = complete  # type: ignore[attr-defined] # as in the library argcomplete


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
    place = _Place(parser, words)
    if place.value_of is not None:
        found: Iterable[object] = place.values(place.value_of)
    elif place.word.startswith("-"):
        found = (name for action in actions_of(place.parser) for name in action.option_strings)
    else:
        found = commands_of(place.parser) or place.values(place.positional)
    return sorted(name for name in set(map(str, found)) if name.startswith(place.word))


def wants_file(parser: argparse.ArgumentParser, words: Sequence[str]) -> bool:
    """Return whether the last word is the value of an option that names a file."""
    value_of = _Place(parser, words).value_of
    return value_of is not None and value_of.metavar == "FILE"


class _Place:
    """The place of the last word of a line.

    Attributes:
        parser: of the word's command.
        value_of: the option whose value the word is, `None` for none.
        word: the word, as far as it is written.
    """

    def __init__(self, parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
        *before, self.word = words or [""]
        self.parser = parser
        self.value_of: argparse.Action | None = None
        self._given: dict[str, list[object]] = {}
        self._positionals = 0
        for word in before:
            if self.value_of is not None:
                self._give(self.value_of, word)
                self.value_of = None
            elif word.startswith("-"):
                name, equals, value = word.partition("=")
                self.value_of = _option(self.parser, name)
                if equals and self.value_of is not None:
                    self._give(self.value_of, value)
                    self.value_of = None
            elif (inner := commands_of(self.parser).get(word)) is not None:
                self.parser = inner
            else:
                if self.positional is not None:
                    self._give(self.positional, word)
                self._positionals += 1

    def _give(self, option: argparse.Action, text: str) -> None:
        with suppress(ValueError, argparse.ArgumentTypeError):
            convert: Any = option.type or str
            self._given.setdefault(option.dest, []).append(convert(text))

    @property
    def positional(self) -> argparse.Action | None:
        """The argument without an option's name that the word is, `None` for none."""
        found = [action for action in actions_of(self.parser) if not action.option_strings]
        if self._positionals < len(found):
            return found[self._positionals]
        return found[-1] if found and found[-1].nargs in ("*", "+") else None

    def values(self, action: argparse.Action | None) -> Iterable[object]:
        """Return the values of an argument: those allowed, or those that are there."""
        complete: Completer | None = getattr(action, "complete", None)
        if action is None or complete is None:
            return (action and action.choices) or ()
        defaults = {action.dest: action.default for action in actions_of(self.parser)}
        last = {name: values[-1] for name, values in self._given.items()}
        args = argparse.Namespace(**{**defaults, **self.parser._defaults, **last})  # noqa: SLF001 - as below
        args.given = self._given
        try:
            resolve_environment(args)
            with redirect_stderr(io.StringIO()):
                return list(complete(args, self.word))
        except Exception:  # noqa: BLE001 - a line that is being written has no errors yet
            return ()


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
