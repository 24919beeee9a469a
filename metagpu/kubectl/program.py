"""The program `kubectl-metagpu`, which kubectl runs as `kubectl metagpu`."""

import sys
from collections.abc import Sequence

from metagpu.cli.completion import complete_line, completions
from metagpu.cli.options import resolve_environment
from metagpu.cli.parser import run_command
from metagpu.core.errors import ClusterError, MetagpuError
from metagpu.kubectl.arguments import parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 done, 1 failed, 2 wrong arguments."""
    program = parser()
    if arguments is None and complete_line(program):
        return 0
    args = program.parse_args(arguments)
    resolve_environment(args)
    from metagpu.kubectl.commands import COMMANDS  # after `--help`, which needs none of it

    try:
        return run_command("kubectl metagpu", lambda: COMMANDS[args.command](args))
    except MetagpuError as error:
        text = error.message if isinstance(error, ClusterError) and error.message else str(error)
        print(f"kubectl metagpu: {text}", file=sys.stderr)  # noqa: T201 - a command line speaks so
        return 1
    except KeyboardInterrupt:
        return 130


def complete() -> int:
    """Print completions for `kubectl metagpu`, whose words kubectl gives as arguments."""
    for word in completions(parser(), sys.argv[1:]):
        print(word)  # noqa: T201 - as above
    print(":4")  # noqa: T201 - kubectl's mark: complete no names of files
    return 0


if __name__ == "__main__":
    sys.exit(main())
