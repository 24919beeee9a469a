"""The command line: `metagpu run | demo | explain | validate | status | acknowledge | sim`."""

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from metagpu import __version__
from metagpu.core.errors import ConfigError, MetagpuError
from metagpu.plugins import control, kubelet_directory, pod_folder, podresources

if TYPE_CHECKING:
    from metagpu.app import Agent, Places

SIMULATE_HELP = (
    "simulate a node instead of reading NVML: boards and counts as in a100-40gb:4,t4:2, or a YAML "
    "file that describes the node"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; give the exit status: 0 done, 1 failed, 2 not understood."""
    args = _parser().parse_args(arguments)
    status = 1

    try:
        status = _do(args)
    finally:
        _leave_what_hangs(args, status)
    return status


def _do(args: argparse.Namespace) -> int:
    """Carry out a command; tell an error of ours in one line."""
    try:
        return int(args.do(args))
    except (MetagpuError, BaseExceptionGroup) as error:
        ours = _ours(error)
        if ours is None:
            raise
        print(f"metagpu: {ours}", file=sys.stderr)  # noqa: T201 - a command line speaks so
        return 1
    except KeyboardInterrupt:
        return 130


def _leave_what_hangs(args: argparse.Namespace, status: int) -> None:
    """End the process here, if the command's driver has calls out: Python waits for threads."""
    agent: Agent | None = getattr(args, "agent", None)
    if agent is None or not agent.driver.overdue:
        return

    import structlog

    if sys.exc_info()[0] is not None:
        traceback.print_exc()
    structlog.get_logger().warning("NVML still hangs; leaving it", calls=agent.driver.overdue)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def _ours(error: BaseException) -> MetagpuError | None:
    """Find an error of ours in what a task group raised; `None` if there is any other in it."""
    if isinstance(error, BaseExceptionGroup):
        found = [_ours(inner) for inner in error.exceptions]
        return None if None in found else found[0]
    return error if isinstance(error, MetagpuError) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metagpu",
        description="Lets the pods of a Kubernetes node share its NVIDIA GPUs.",
        epilog="Try `metagpu demo`: it needs neither a GPU nor a cluster.",
    )
    parser.add_argument("--version", action="version", version=f"metagpu {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = _command(
        commands,
        "run",
        _run,
        "serve this node: offer its GPUs to the kubelet until stopped",
        "metagpu run --config metagpu.yaml\n"
        "  metagpu run --simulate a100-40gb:8 --kubelet-dir /tmp/kubelet --run-dir /tmp/run",
    )
    _add_node(run)
    run.add_argument(
        "--kubelet-dir",
        type=Path,
        default=kubelet_directory.DEFAULT_DIRECTORY,
        help="the kubelet's device-plugins folder (default: %(default)s)",
    )
    run.add_argument(
        "--pod-resources",
        type=Path,
        default=podresources.DEFAULT_SOCKET,
        help="the kubelet's PodResources socket (default: %(default)s)",
    )
    run.add_argument(
        "--dev-root",
        type=Path,
        help="where the host's /dev stands, as seen from here and from the container runtime",
    )
    run.add_argument(
        "--pod-dir",
        type=Path,
        help="the folder that containers with shares see, with mgctl and its socket; the same path "
        f"here and for the container runtime (default: {pod_folder.DEFAULT_POD_DIR}; with "
        "--run-dir, pod in it)",
    )
    run.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    run.add_argument(
        "--log-format",
        default="auto",
        choices=("auto", "json", "console"),
        help="json, or console for people; auto asks whether a terminal listens",
    )
    _add_run_dir(run)

    demo = _command(
        commands,
        "demo",
        _demo,
        "show the main job on a simulated node of 8 GPUs with a kubelet in it",
        "metagpu demo --json",
    )
    demo.add_argument("--json", action="store_true", help="print what happened as JSON")

    explain = _command(
        commands,
        "explain",
        _explain,
        "say what the kubelet would be offered, and why, without starting anything",
        "metagpu explain --config metagpu.yaml --simulate a100-40gb:4,t4:2",
    )
    _add_node(explain)
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.add_argument(
        "--topology", action="store_true", help="also say how the GPUs are connected"
    )

    validate = _command(
        commands,
        "validate",
        _validate,
        "check configuration files; name line, path and mend of what is wrong",
        "metagpu validate metagpu.yaml",
    )
    validate.add_argument("files", type=Path, nargs="+", metavar="FILE")

    status = _command(
        commands,
        "status",
        _status,
        "say what the running daemon offers, which GPUs are healthy and who holds what",
        "metagpu status --json",
    )
    status.add_argument("--json", action="store_true", help="print JSON")
    _add_run_dir(status)

    acknowledge = _command(
        commands,
        "acknowledge",
        _acknowledge,
        "take a GPU back into service on your word, if it passes the device check",
        "metagpu acknowledge 3",
    )
    acknowledge.add_argument("gpu", help="index or uuid")
    _add_run_dir(acknowledge)

    _add_sim(commands)
    return parser


def _command(
    commands: Any,  # noqa: ANN401 - argparse names the type of its sub-parsers privately
    name: str,
    do: Callable[[argparse.Namespace], int],
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[:1].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(do=do)
    return parser


def _add_node(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="without it: 100 shares of every GPU"
    )
    parser.add_argument("--simulate", metavar="BOARDS|FILE", help=SIMULATE_HELP)


def _add_run_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=control.DEFAULT_RUN_DIR,
        help="where the daemon's control socket stands (default: %(default)s)",
    )


def _add_sim(commands: Any) -> None:  # noqa: ANN401 - as above
    from metagpu.sim import steer

    sim = _command(
        commands,
        "sim",
        _sim,
        "steer the simulated node of a running `metagpu run --simulate`",
        "metagpu sim xid 0 79\n  metagpu sim recover 0\n  metagpu sim node",
    )
    _add_run_dir(sim)
    steer.add_arguments(sim.add_subparsers(title="what to do", required=True, metavar="WHAT"))


# --- what the commands do -------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    from metagpu.app import Places

    _log(args.log_level, args.log_format)
    pods = args.pod_dir or _pod_dir(args.run_dir)
    places = Places(args.kubelet_dir, args.pod_resources, args.run_dir, args.dev_root, pods)
    args.agent = _agent(args.config, args.simulate, places)
    anyio.run(args.agent.run)
    return 0


def _demo(args: argparse.Namespace) -> int:
    from metagpu.sim import demo

    _log("critical", "console")
    return demo.run(as_json=args.json)


def _explain(args: argparse.Namespace) -> int:
    from metagpu import tables
    from metagpu.core import report

    _log("error", "console")
    args.agent = agent = _agent(args.config, args.simulate)
    anyio.run(agent.look)
    explained = report.explanation(agent.registry.snapshot, agent.layout)

    if args.json:
        _print_json(explained)
    else:
        tables.show_explanation(explained, topology=args.topology)
    return 0


def _validate(args: argparse.Namespace) -> int:
    from metagpu.core import config
    from metagpu.core.backend import installed_backends
    from metagpu.core.layout import rehearse

    wrong = 0
    for file in args.files:
        try:
            rehearse(config.load(file, installed_backends()))
        except ConfigError as error:
            wrong += 1
            print(error, file=sys.stderr)  # noqa: T201
        else:
            print(f"{file}: good")  # noqa: T201
    return 1 if wrong else 0


def _status(args: argparse.Namespace) -> int:
    from metagpu import tables

    answer = control.ask(args.run_dir, {"command": "status"})

    if args.json:
        _print_json(answer)
    else:
        tables.show_status(answer)
    return 0


def _acknowledge(args: argparse.Namespace) -> int:
    print(control.ask(args.run_dir, {"command": "acknowledge", "gpu": args.gpu}))  # noqa: T201
    return 0


def _sim(args: argparse.Namespace) -> int:
    import msgspec

    from metagpu.sim import pictures, remote, steer

    reply = remote.send(args.run_dir, args)
    if getattr(args, "json", False):
        _print_json(msgspec.to_builtins(reply.node))
    elif args.command_type is steer.Node:
        pictures.show_node(reply.node)
    else:
        print(reply.message)  # noqa: T201
    return 0


# --- shared ---------------------------------------------------------------------------------------


def _pod_dir(run_dir: Path) -> Path:
    """Give the usual folder; a daemon with a run directory of its own has it there."""
    if run_dir == control.DEFAULT_RUN_DIR:
        return pod_folder.DEFAULT_POD_DIR
    return run_dir / "pod"


def _agent(config: Path | None, simulate: str | None, places: "Places | None" = None) -> "Agent":
    from metagpu.app import Agent, Places
    from metagpu.nvml import Nvml

    places = places or Places()
    if simulate is None:
        return Agent(config, Nvml(), places)

    from metagpu.host import LinuxHost
    from metagpu.sim.library import Library
    from metagpu.sim.remote import COMMAND, steering
    from metagpu.sim.spec import simulated
    from metagpu.sim.tools import SimulatedTools

    node = simulated(simulate)
    return Agent(
        config,
        Nvml(Library(node)),
        places,
        {COMMAND: steering(node)},
        tools=SimulatedTools(),
        host=LinuxHost(own_pids=True),
    )


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))  # noqa: T201


def _log(level: str, form: str) -> None:
    """Log to stderr: lines of JSON for machines, aligned text for a person at a terminal."""
    import structlog

    people = form == "console" or (form == "auto" and sys.stderr.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        if people
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if people else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # grpclib logs each call that a kubelet's end cancels; only its errors are news.
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
