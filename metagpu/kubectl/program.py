"""The program `kubectl-metagpu`, which kubectl runs as `kubectl metagpu`."""

import argparse
import sys
from collections.abc import Sequence

from metagpu.cli.options import resolve_environment
from metagpu.cli.parser import complete_line, completions, run_command, wants_file
from metagpu.kubectl.arguments import parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 done, 1 failed, 2 wrong arguments."""
    program = parser()
    if arguments is None and complete_line(program):
        return 0
    args = program.parse_args(arguments)
    return run_command("kubectl metagpu", args, lambda: _do(args))


def _do(args: argparse.Namespace) -> int:
    resolve_environment(args)
    from metagpu.kubectl.commands import COMMANDS  # after `--help`, which needs none of it

    return COMMANDS[args.command](args)


def complete() -> int:
    """Print completions for `kubectl metagpu`, whose words kubectl gives as arguments."""
    program, words = parser(), sys.argv[1:]
    for word in completions(program, words):
        print(word)  # noqa: T201 - as above
    # kubectl's marks: 0 completes names of files, 4 does not.
    print(":0" if wants_file(program, words) else ":4")  # noqa: T201 - as above
    return 0


if __name__ == "__main__":
    sys.exit(main())
