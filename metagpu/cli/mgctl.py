"""`mgctl`: the use of this node's GPUs, by container and process.

This module asks the daemon, and draws or prints the answer.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from metagpu import __version__
from metagpu.agent import paths
from metagpu.cli.live import print_text, repeat, show_live
from metagpu.cli.options import (
    Variable,
    add_driver_roots,
    add_kubelet,
    add_page_address,
    add_run_dir,
    driver_roots_of,
    pod_resources_of,
    resolve_environment,
)
from metagpu.cli.parser import (
    Parser,
    add_command,
    add_completion,
    complete_line,
    completed_by,
    run_command,
)
from metagpu.core.errors import MetagpuError
from metagpu.core.grants.injection import POD_FOLDER, POD_SOCKET, POD_SOCKET_NAME
from metagpu.display.options import WIDE_FORMATS, add_output, add_sort_by, add_watch, encode
from metagpu.display.table import PLAIN, Cell, Terminal, fold, render, stdout_terminal
from metagpu.display.usage import KINDS, TOP, Answer, Top, format_usage, in_namespace
from metagpu.plugins.control.client import send_request

if TYPE_CHECKING:
    from metagpu.core.reports.diagnosis import Diagnosis

_INDENT: Final = " " * 16
"""The place of a finding and its fix, behind the code and the result."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 done, 1 failed, 2 wrong arguments."""
    program = parser()
    if arguments is None and complete_line(program):
        return 0
    args = program.parse_args(arguments)
    return run_command("mgctl", args, lambda: _do(args))


def _do(args: argparse.Namespace) -> int:
    resolve_environment(args)
    return int(args.do(args))


def parser() -> argparse.ArgumentParser:
    """Build the parser; `do` of its result is the command's function."""
    program = Parser(
        prog="mgctl",
        description="Shows the use of this node's GPUs by containers and processes.",
        epilog="examples:\n  mgctl get processes -w\n  mgctl get pods -o json\n  mgctl top",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    program.add_argument("--version", action="version", version=f"mgctl {__version__}")
    commands = program.add_subparsers(title="commands", required=True, metavar="COMMAND")

    get = add_command(
        commands, "get", "show devices, processes or pods", "mgctl get processes", aliases=["g"]
    )
    kinds = get.add_subparsers(title="objects", required=True, metavar="OBJECT")
    for name, summary in (
        ("devices", "show the GPUs, and the size of a share of each"),
        ("processes", "show the processes on GPUs, with pod and container"),
        ("pods", "show the containers that hold shares, and their use"),
    ):
        kind = add_command(kinds, name, summary, f"mgctl get {name} -o wide", aliases=KINDS[name])
        kind.set_defaults(do=_get, kind=name)
        add_output(kind, WIDE_FORMATS)
        add_watch(kind)
        add_sort_by(kind)
        add_run_dir(kind)
        if name != "devices":
            _add_namespace(kind)

    top = add_command(
        commands, "top", "show the load and memory of the GPUs and processes, live", "mgctl top"
    )
    top.set_defaults(do=_top, kind=TOP)
    add_output(top)
    add_watch(top)
    add_sort_by(top)
    add_run_dir(top)

    doctor = add_command(
        commands,
        "doctor",
        "check what on this node keeps metagpu from working; print the fixes",
        "mgctl doctor -o json",
    )
    doctor.set_defaults(do=_doctor)
    add_output(doctor)
    add_run_dir(doctor)
    doctor.add_argument(
        "--pod-dir",
        metavar="DIR",
        type=Path,
        default=Variable(("METAGPU_POD_DIR",), convert=Path),
        help="the folder mounted into containers, as for `metagpu run`",
    )
    add_kubelet(doctor)
    add_driver_roots(doctor)
    doctor.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        help="the folder that has the host's root (default: %(default)s)",
    )

    web = add_command(
        commands,
        "web",
        "in a container: show the GPUs of its pod in a browser. The page is served on the "
        "loopback of the pod, until an interrupt",
        "mgctl web",
    )
    web.set_defaults(
        do=_web,
        socket=Variable((POD_SOCKET,), Path(POD_FOLDER, POD_SOCKET_NAME), convert=Path),
    )
    add_page_address(web)

    version = add_command(
        commands, "version", "print the versions of mgctl and of the daemon", "mgctl version"
    )
    version.set_defaults(do=_version)
    add_run_dir(version)
    add_completion(commands, program.prog)
    return program


def _add_namespace(kind: argparse.ArgumentParser) -> None:
    namespace = kind.add_argument(
        "-n", "--namespace", metavar="NAME", default="", help="only of this one (default: of all)"
    )
    completed_by(
        namespace, lambda args, _: (row["namespace"] for row in _usage(args)["containers"])
    )
    kind.add_argument(
        "-A", "--all-namespaces", action="store_true", help="show all namespaces (default)"
    )


# --- the commands -------------------------------------------------------------------------


def _get(args: argparse.Namespace) -> int:
    form = args.output

    def usage() -> Answer:
        everywhere = args.kind not in ("processes", "pods") or args.all_namespaces
        return in_namespace(_usage(args), "" if everywhere else args.namespace)

    def text(answer: Answer, screen: Terminal, *, compact: bool = False) -> str:
        return format_usage(answer, args.kind, form, screen, compact=compact, sort_by=args.sort_by)

    if not args.watch:
        answer = usage()
        for warning in answer["warnings"]:
            print(f"mgctl: {warning}", file=sys.stderr)  # noqa: T201
        print_text(text(answer, stdout_terminal()))
        return 0

    if form in {"json", "yaml"}:
        return repeat(lambda: print_text(text(usage(), PLAIN, compact=True)))
    return show_live(lambda screen: text(usage(), screen))


def _top(args: argparse.Namespace) -> int:
    """Show the screen, live on a terminal; for programs, print the same data as `get`."""
    if args.output != "table":
        return _get(args)
    top = Top()
    return show_live(lambda screen: top.screen(_usage(args), screen, args.sort_by))


def _web(args: argparse.Namespace) -> int:
    """Serve the page of the pod that this process is in, until an interrupt."""
    import anyio

    from metagpu.cli.page import log_errors_alone, serve_page
    from metagpu.plugins.web.pod import OwnPodView

    async def serve() -> None:
        log_errors_alone()
        view = OwnPodView(args.socket)
        await view.check()
        await serve_page(args.address, view.read, view.changes, "this pod")

    anyio.run(serve)
    return 0


def _version(args: argparse.Namespace) -> int:
    print(f"mgctl {__version__}")  # noqa: T201
    try:
        print(f"metagpu {_usage(args)['version']}")  # noqa: T201
    except MetagpuError as error:
        print(f"mgctl: {error}", file=sys.stderr)  # noqa: T201
    return 0


def _doctor(args: argparse.Namespace) -> int:
    """Check this node; return 1 if any check is bad."""
    from msgspec.structs import asdict

    from metagpu.core.reports.diagnosis import CheckResult
    from metagpu.core.reports.doctor import diagnose
    from metagpu.core.reports.reading import read_report
    from metagpu.core.reports.schema.status import StatusReport
    from metagpu.host.node_facts import SurveyPaths, survey_node

    status, no_status = None, ""
    try:
        status = read_report(send_request(args.run_dir, {"command": "status"}), StatusReport)
    except MetagpuError as error:
        no_status = str(error)

    pod_dir = args.pod_dir or paths.default_pod_dir(args.run_dir)
    pod_resources = pod_resources_of(args)
    roots = driver_roots_of(args)
    where = SurveyPaths(args.root, args.kubelet_dir, pod_resources, args.run_dir, pod_dir, roots)
    found = diagnose(survey_node(where, status, no_status))
    if args.output != "table":
        print_text(
            encode(
                [{**asdict(diagnosis), "result": str(diagnosis.result)} for diagnosis in found],
                args.output,
            )
        )
    else:
        terminal = stdout_terminal()
        print_text(render(_diagnoses(found, terminal), terminal))
    return int(any(diagnosis.result is CheckResult.ERROR for diagnosis in found))


def _diagnoses(found: Sequence["Diagnosis"], terminal: Terminal) -> Sequence[Cell]:
    """Return a summary, then the groups of checks, those with problems first."""
    from metagpu.core.reports.doctor import UNKNOWN, in_groups

    styles = {"ok": "green", "warning": "yellow", "error": "bold red"}
    unknown = [diagnosis.code for diagnosis in found if diagnosis.finding == UNKNOWN]
    groups = in_groups(found)
    counts = Counter(str(diagnosis.result) for group in groups.values() for diagnosis in group)
    errors, warnings = counts["error"], counts["warning"]
    summary = (
        f"{errors or 'no'} {'error' if errors == 1 else 'errors'}, {warnings or 'no'} "
        f"{'warning' if warnings == 1 else 'warnings'}, {counts['ok']} checks ok"
    )
    if unknown:
        summary += f"; {len(unknown)} more need the daemon's answer"
    lines = [Cell(summary, "bold red" if errors else "yellow" if warnings else "green")]
    for group, diagnoses in groups.items():
        lines += [Cell(""), Cell(group, "bold")]
        for diagnosis in diagnoses:
            text = f"{diagnosis.code}  {diagnosis.result:7}  {diagnosis.finding}"
            lines += fold(Cell(text, styles[diagnosis.result]), terminal, _INDENT)
            lines += (
                fold(Cell(f"{_INDENT}{diagnosis.fix}"), terminal, _INDENT) if diagnosis.fix else []
            )
    return lines


def _usage(args: argparse.Namespace) -> Answer:
    answer: Answer = send_request(args.run_dir, {"command": "usage"})
    return answer


if __name__ == "__main__":
    sys.exit(main())
