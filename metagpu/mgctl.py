"""`mgctl`: who uses what of this node's GPUs, as the running daemon knows it.

Every answer comes from the daemon; here it is asked, and drawn or printed.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import sleep
from typing import Any, Final

from msgspec.structs import asdict

from metagpu import __version__
from metagpu.command_line import Parser, finished
from metagpu.core import doctor
from metagpu.core.errors import MetagpuError
from metagpu.host.survey import Where, survey
from metagpu.plugins import control, kubelet_directory, podresources
from metagpu.plugins.pod_folder import usual_folder
from metagpu.sheets import PLAIN, Cell, Terminal, afresh, drawn
from metagpu.usage_tables import Answer
from metagpu.usage_text import FORMATS, KINDS, Top, written

PERIOD: Final = 1.0
"""Seconds between two looks of `-w` and `top`."""
ENTER: Final = "\x1b[?1049h\x1b[?25l"
LEAVE: Final = "\x1b[?25h\x1b[?1049l"
"""A terminal's words for a screen of our own without a cursor, and for the end of it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; give the exit status: 0 done, 1 failed, 2 not understood."""
    args = _parser().parse_args(arguments)

    try:
        return finished("mgctl", lambda: int(args.do(args)))
    except MetagpuError as error:
        print(f"mgctl: {error}", file=sys.stderr)  # noqa: T201 - a command line speaks so
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mgctl",
        description="Says who uses what of this node's GPUs.",
        epilog="examples:\n  mgctl get processes -w\n  mgctl get pods -o json\n  mgctl top",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    get = _command(
        commands, "get", "show devices, processes or pods", "mgctl get processes", aliases=["g"]
    )
    kinds = get.add_subparsers(title="what to show", required=True, metavar="WHAT")
    for name, summary in (
        ("devices", "the GPUs, and how large a share of each is"),
        ("processes", "the processes on GPUs, and whose they are"),
        ("pods", "the containers that hold shares, and what they use"),
    ):
        kind = _command(kinds, name, summary, f"mgctl get {name} -o wide", aliases=KINDS[name])
        kind.set_defaults(do=_get, kind=name)
        _add_output(kind)
        kind.add_argument("-w", "--watch", action="store_true", help="again every second")
        _add_run_dir(kind)

    top = _command(commands, "top", "how busy and how full the GPUs are, live", "mgctl top")
    top.set_defaults(do=_top)
    _add_run_dir(top)

    examine = _command(
        commands,
        "doctor",
        "what of this node keeps metagpu from working, and how to mend it",
        "mgctl doctor -o json",
    )
    examine.set_defaults(do=_doctor)
    examine.add_argument(
        "-o",
        "--output",
        choices=("table", "json"),
        default="table",
        help="table (the default) or json",
    )
    _add_run_dir(examine)
    examine.add_argument(
        "--pod-dir", metavar="DIR", type=Path, help="the pods' folder, as given to `metagpu run`"
    )
    examine.add_argument(
        "--kubelet-dir",
        metavar="DIR",
        type=Path,
        default=kubelet_directory.DEFAULT_DIRECTORY,
        help="as given to `metagpu run` (default: %(default)s)",
    )
    examine.add_argument(
        "--pod-resources",
        metavar="PATH",
        type=Path,
        default=podresources.DEFAULT_SOCKET,
        help="as given to `metagpu run` (default: %(default)s)",
    )
    examine.add_argument(
        "--root", type=Path, default=Path("/"), help="where the host's root stands, as seen here"
    )

    version = _command(
        commands, "version", "the versions of mgctl and of the daemon", "mgctl version"
    )
    version.set_defaults(do=_version)
    _add_run_dir(version)
    return parser


def _command(
    commands: Any,  # noqa: ANN401 - argparse's type for it is private
    name: str,
    summary: str,
    example: str,
    *,
    aliases: Sequence[str] = (),
) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(
        name,
        aliases=aliases,
        help=summary,
        description=summary[:1].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return made


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        choices=FORMATS,
        default="table",
        metavar="FORMAT",
        help=f"one of {', '.join(FORMATS)} (default: %(default)s)",
    )


def _add_run_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        type=Path,
        default=control.DEFAULT_RUN_DIR,
        help="where the daemon's control socket stands (default: %(default)s)",
    )


# --- what the commands do -------------------------------------------------------------------------


def _get(args: argparse.Namespace) -> int:
    form = args.output
    if not args.watch:
        answer = _usage(args)
        for hint in answer["hints"]:
            print(f"mgctl: {hint}", file=sys.stderr)  # noqa: T201
        _say(written(answer, args.kind, form, _terminal()))
        return 0

    if form in {"json", "yaml"}:
        return _again(lambda: _say(written(_usage(args), args.kind, form, PLAIN, compact=True)))
    return _live(lambda screen: written(_usage(args), args.kind, form, screen))


def _top(args: argparse.Namespace) -> int:
    top = Top()
    return _live(lambda screen: top.screen(_usage(args), screen))


def _version(args: argparse.Namespace) -> int:
    print(f"mgctl {__version__}")  # noqa: T201
    try:
        print(f"metagpu {_usage(args)['version']}")  # noqa: T201
    except MetagpuError as error:
        print(f"mgctl: {error}", file=sys.stderr)  # noqa: T201
    return 0


def _doctor(args: argparse.Namespace) -> int:
    """Examine this node; status 1 if anything is bad."""
    status, no_status = None, ""
    try:
        status = control.ask(args.run_dir, {"command": "status"})
    except MetagpuError as error:
        no_status = str(error)

    pods = args.pod_dir or usual_folder(args.run_dir)
    where = Where(args.root, args.kubelet_dir, args.pod_resources, pods)
    found = doctor.examine(survey(where, status, no_status))
    if args.output == "json":
        _say(json.dumps([asdict(diagnosis) for diagnosis in found], indent=2) + "\n")
    else:
        _say("".join(drawn([line], _terminal()) for line in _diagnoses(found)))
    return int(any(diagnosis.verdict is doctor.Verdict.BAD for diagnosis in found))


def _diagnoses(found: Sequence[doctor.Diagnosis]) -> Sequence[Cell]:
    styles = {"good": "green", "note": "yellow", "bad": "bold red"}
    lines = []
    for it in found:
        lines.append(Cell(f"{it.code}  {it.verdict:4}  {it.finding}", styles[it.verdict]))
        if it.mend:
            lines.append(Cell(f"             {it.mend}"))
    return lines


def _usage(args: argparse.Namespace) -> Answer:
    answer: Answer = control.ask(args.run_dir, {"command": "usage"})
    return answer


# --- how it is shown ------------------------------------------------------------------------------


def _terminal() -> Terminal:
    """Say who reads; colours only where a terminal does, and wants them."""
    if not sys.stdout.isatty():
        return PLAIN
    size = shutil.get_terminal_size()
    return Terminal(size.columns, size.lines, colours="NO_COLOR" not in os.environ)


def _live(draw: Callable[[Terminal], str]) -> int:
    """Draw in place every second until interrupted; once, where no terminal listens."""
    screen = _terminal()
    if screen is PLAIN:
        _say(draw(screen))
        return 0

    _say(ENTER)
    try:
        return _again(lambda: _say(afresh(draw(screen := _terminal()), screen)))
    finally:
        _say(LEAVE)


def _again(show: Callable[[], None]) -> int:
    """Do something every second until interrupted: that is how it ends, and no failure."""
    try:
        while True:
            show()
            sleep(PERIOD)
    except KeyboardInterrupt:
        return 0


def _say(text: str) -> None:
    print(text, end="", flush=True)  # noqa: T201 - a command line speaks so


if __name__ == "__main__":
    sys.exit(main())
