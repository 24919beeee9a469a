"""`mgctl`: who uses what of this node's GPUs, as the running daemon knows it.

Every answer comes from the daemon; here it is asked, and drawn or printed.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import sleep
from typing import Any, Final

from metagpu import __version__
from metagpu.core.errors import MetagpuError
from metagpu.plugins import control

PERIOD: Final = 1.0
"""Seconds between two looks of `-w` and `top`."""
FORMATS: Final = ("table", "wide", "json", "yaml")

Answer = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; give the exit status: 0 done, 1 failed, 2 not understood."""
    args = _parser().parse_args(arguments)

    try:
        return int(args.do(args))
    except MetagpuError as error:
        print(f"mgctl: {error}", file=sys.stderr)  # noqa: T201 - a command line speaks so
        return 1
    except BrokenPipeError:
        # Who read us has had enough. What is still to be flushed at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mgctl",
        description="Says who uses what of this node's GPUs.",
        epilog="examples:\n  mgctl get processes -w\n  mgctl get pods -o json\n  mgctl top",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    get = commands.add_parser("get", aliases=["g"], help="show devices, processes or pods")
    kinds = get.add_subparsers(title="what to show", required=True, metavar="WHAT")
    for name, aliases, summary in (
        ("devices", ["device", "d"], "the GPUs, and how large a share of each is"),
        ("processes", ["process", "p"], "the processes on GPUs, and whose they are"),
        ("pods", ["pod"], "the containers that hold shares, and what they use"),
    ):
        kind = kinds.add_parser(name, aliases=aliases, help=summary, description=summary)
        kind.set_defaults(do=_get, kind=name)
        _add_output(kind)
        kind.add_argument("-w", "--watch", action="store_true", help="again every second")
        _add_run_dir(kind)

    top = commands.add_parser("top", help="how busy and how full the GPUs are, live")
    top.set_defaults(do=_top)
    _add_run_dir(top)

    version = commands.add_parser("version", help="the versions of mgctl and of the daemon")
    version.set_defaults(do=_version)
    _add_run_dir(version)
    return parser


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
        type=Path,
        default=control.DEFAULT_RUN_DIR,
        help="where the daemon's control socket stands (default: %(default)s)",
    )


# --- what the commands do -------------------------------------------------------------------------


def _get(args: argparse.Namespace) -> int:
    if not args.watch:
        answer = _usage(args)
        _hint(answer)
        _show(answer, args.kind, args.output)
        return 0

    if args.output in {"json", "yaml"}:
        return _again(lambda: _show(_usage(args), args.kind, args.output, compact=True))
    return _live(lambda: _drawn(_usage(args), args.kind, wide=args.output == "wide"))


def _top(args: argparse.Namespace) -> int:
    from metagpu.usage_tables import top_screen  # noqa: PLC0415 - other formats need no tables

    before: dict[int, tuple[float, float]] = {}

    def draw() -> Any:  # noqa: ANN401 - whatever rich draws
        answer = _usage(args)
        now, spent = answer["at"], _processor_time(answer)
        cpu = {
            pid: max(0.0, 100 * (seconds - before[pid][1]) / (now - before[pid][0]))
            for pid, seconds in spent.items()
            if pid in before and now > before[pid][0]
        }
        before.clear()
        before.update({pid: (now, seconds) for pid, seconds in spent.items()})
        return top_screen(answer, cpu)

    return _live(draw)


def _version(args: argparse.Namespace) -> int:
    print(f"mgctl {__version__}")  # noqa: T201
    try:
        print(f"metagpu {_usage(args)['version']}")  # noqa: T201
    except MetagpuError as error:
        print(f"mgctl: {error}", file=sys.stderr)  # noqa: T201
    return 0


def _usage(args: argparse.Namespace) -> Answer:
    answer: Answer = control.ask(args.run_dir, {"command": "usage"})
    return answer


def _processor_time(answer: Answer) -> dict[int, float]:
    parts = [part for container in answer["containers"] for part in container["gpus"]]
    everybody = [process for part in parts for process in part["processes"]]
    return {
        process["pid"]: process["cpuSeconds"]
        for process in (*everybody, *answer["strangers"])
        if process["cpuSeconds"] is not None
    }


# --- how it is shown ------------------------------------------------------------------------------


def _show(answer: Answer, kind: str, form: str, *, compact: bool = False) -> None:
    """Print an answer once; `compact` keeps JSON on one line, and YAML in a document of its own."""
    if form == "json":
        print(json.dumps(_part(answer, kind), indent=None if compact else 2), flush=True)  # noqa: T201
    elif form == "yaml":
        import yaml  # noqa: PLC0415 - tables need none

        head = "---\n" if compact else ""
        print(head + yaml.safe_dump(_part(answer, kind), sort_keys=False), end="", flush=True)  # noqa: T201
    else:
        from metagpu.tables import console  # noqa: PLC0415 - as above

        console().print(_drawn(answer, kind, wide=form == "wide"))


def _part(answer: Answer, kind: str) -> Answer:
    """Give what was asked for, for programs; the node's name is always there."""
    head = {"node": answer["node"]}
    if kind == "devices":
        return {**head, "gpus": answer["gpus"]}
    if kind == "processes":
        return {**head, "containers": answer["containers"], "strangers": answer["strangers"]}

    without = [
        {
            **container,
            "gpus": [
                {key: value for key, value in part.items() if key != "processes"}
                for part in container["gpus"]
            ],
        }
        for container in answer["containers"]
    ]
    return {**head, "containers": without}


def _drawn(answer: Answer, kind: str, *, wide: bool) -> Any:  # noqa: ANN401 - whatever rich draws
    from metagpu import usage_tables  # noqa: PLC0415 - programs need no tables

    draw = {
        "devices": usage_tables.devices_table,
        "processes": usage_tables.processes_table,
        "pods": usage_tables.pods_table,
    }[kind]
    return draw(answer, wide=wide)


def _live(draw: Callable[[], Any]) -> int:
    """Draw in place every second until interrupted; once, where no terminal listens."""
    from rich.live import Live  # noqa: PLC0415 - as above

    from metagpu.tables import console  # noqa: PLC0415

    screen = console()
    if not screen.is_terminal:
        screen.print(draw())
        return 0
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        return _again(lambda: live.update(draw(), refresh=True))


def _again(show: Callable[[], None]) -> int:
    """Do something every second until interrupted: that is how it ends, and no failure."""
    try:
        while True:
            show()
            sleep(PERIOD)
    except KeyboardInterrupt:
        return 0


def _hint(answer: Answer) -> None:
    for hint in answer["hints"]:
        print(f"mgctl: {hint}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
