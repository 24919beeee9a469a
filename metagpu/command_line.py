"""What every program of ours does with its command line: mistakes are told in one line."""

import argparse
import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from metagpu.core.spelling import allowed, hint

_CHOICE: Final = re.compile(r"(?:argument )?(.*?): invalid choice: (.*) \(choose from (.*)\)")
"""How argparse says that an argument is none of those that there are."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class Parser(argparse.ArgumentParser):
    """Reads a command line; argparse's own would print a page of usage before what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Say in a line what is wrong and what is allowed, and end with status 2."""
        if choice := _CHOICE.fullmatch(message):
            given, known = choice[2].strip("'"), choice[3].replace("'", "").split(", ")
            message = f"{choice[1]}: {given!r} is not known here; {allowed(given, known)}"
        see = " See" if message.endswith("?") else "; see"
        self.exit(2, f"{self.prog}: {message}{see} `{self.prog} --help`\n")

    def parse_known_args(  # type: ignore[override]  # its overloads are about the namespace's type
        self,
        args: Sequence[str] | None = None,
        namespace: Any = None,  # noqa: ANN401 - argparse takes any object
    ) -> tuple[Any, list[str]]:
        """Read what this command knows, and refuse the rest here, where its name is known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [name for action in self._actions for name in action.option_strings]
            near = hint(unknown[0].partition("=")[0], options)
            self.error(f"unknown arguments: {' '.join(unknown)}{near}")
        return found, unknown


def finished(program: str, do: Callable[[], int]) -> int:
    """Run a command to its last written letter; give its status, 1 if nobody can read it."""
    try:
        status = do()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # who read us has had enough
        _write_no_more()
        return 1
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _write_no_more()
        print(f"{program}: cannot write: {error.strerror}", file=sys.stderr)  # noqa: T201 - as any
        return 1
    return status


def _write_no_more() -> None:
    """What is still to be flushed at exit must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
