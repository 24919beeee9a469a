"""The argument parser of all programs, and the arguments that they share."""

import argparse
import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from textwrap import fill
from typing import Any, Final, NoReturn

from metagpu.core.config.suggestions import allowed_values, suggest
from metagpu.core.errors import ClusterError, MetagpuError

_INVALID_CHOICE: Final = re.compile(
    r"(?:argument )?(.*?): invalid choice: (.*) \(choose from (.*)\)"
)
"""argparse's message for a value that is not among an argument's choices."""
_INTERRUPTED: Final = 130
"""The exit status after an interrupt, as shells have it."""
_DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


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
            message = f"{choice[1]}: {given!r} is not known here; {allowed_values(given, known)}"
        see = " See" if message.endswith("?") else "; see"
        self.exit(2, f"{self.prog}: {message}{see} `{self.prog} --help`\n")

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
        if error.errno not in _DISK_ERRORS:
            raise
        _discard_output()
        print(f"{program}: cannot write: {error.strerror}", file=sys.stderr)  # noqa: T201 - a command line speaks so
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
