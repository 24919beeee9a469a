"""What the commands of `metagpu` do; `metagpu/arguments.py` says how they are called."""

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import anyio

from metagpu import configuring
from metagpu.arguments import parser
from metagpu.command_line import finished
from metagpu.core.errors import MetagpuError
from metagpu.options import cluster_of, metrics_of, settle, source_of
from metagpu.plugins import control, kubelet_directory, pod_folder
from metagpu.plugins.cluster.settings import Settings
from metagpu.plugins.metrics.address import Address
from metagpu.sources import Source

if TYPE_CHECKING:
    from metagpu.app import Agent
    from metagpu.places import Places


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; give the exit status: 0 done, 1 failed, 2 not understood."""
    args = parser().parse_args(arguments)
    status = 1

    try:
        status = finished("metagpu", lambda: _do(args))
    finally:
        _leave_what_hangs(args, status)
    return status


def _do(args: argparse.Namespace) -> int:
    """Carry out a command; tell an error of ours in one line."""
    try:
        settle(args)
        return COMMANDS[args.command](args)
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


# --- what the commands do -------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    from metagpu.places import Places

    joins, metrics = cluster_of(args), metrics_of(args)
    kubelet_directory.check(args.kubelet_dir)
    _log(args.log_level, args.log_format)
    pods = args.pod_dir or pod_folder.usual_folder(args.run_dir)
    places = Places(
        args.kubelet_dir, args.pod_resources, args.run_dir, args.dev_root, pods, args.cdi_dir
    )
    args.agent = _agent(source_of(args), args.simulate, places, joins, metrics)
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
    args.agent = agent = _agent(source_of(args), args.simulate)
    configuring.warn(agent)
    anyio.run(agent.look)
    explained = report.explanation(agent.registry.snapshot, agent.layout)

    if args.json:
        _print_json(explained)
    else:
        tables.show_explanation(explained, topology=args.topology)
    return 0


def _plan(args: argparse.Namespace) -> int:
    from metagpu import tables

    _log("error", "console")
    planned = configuring.plan(args, _agent)

    if args.json:
        _print_json(planned)
    else:
        tables.show_plan(planned)
    return 0


def _status(args: argparse.Namespace) -> int:
    from metagpu import tables

    answer = control.ask(args.run_dir, {"command": "status"})

    if args.json:
        _print_json(answer)
    else:
        tables.show_status(answer)
    return 0


def _acknowledge(args: argparse.Namespace) -> int:
    return _tell(args, {"command": "acknowledge", "gpu": args.gpu})


def _cordon(args: argparse.Namespace) -> int:
    return _tell(args, {"command": "cordon", "gpu": args.gpu, "reason": args.reason})


def _uncordon(args: argparse.Namespace) -> int:
    return _tell(args, {"command": "uncordon", "gpu": args.gpu})


def _tell(args: argparse.Namespace, request: Mapping[str, str]) -> int:
    """Have the daemon do something, and print what it says to that."""
    print(control.ask(args.run_dir, request))  # noqa: T201
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


COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "run": _run,
    "demo": _demo,
    "explain": _explain,
    "validate": configuring.validate,
    "plan": _plan,
    "status": _status,
    "acknowledge": _acknowledge,
    "cordon": _cordon,
    "uncordon": _uncordon,
    "sim": _sim,
}


# --- shared ---------------------------------------------------------------------------------------


def _agent(
    source: Source,
    simulate: str | None,
    places: "Places | None" = None,
    joins: Settings | None = None,
    metrics: Address | None = None,
) -> "Agent":
    from metagpu.app import Agent
    from metagpu.nvml import Nvml
    from metagpu.places import Places

    places = places or Places()
    if simulate is None:
        return Agent(source, Nvml(), places, joins=joins, metrics=metrics)

    from metagpu.host import LinuxHost
    from metagpu.sim.library import Library
    from metagpu.sim.remote import COMMAND, steering
    from metagpu.sim.spec import simulated
    from metagpu.sim.tools import SimulatedTools, simulated_companions

    node = simulated(simulate)
    return Agent(
        source,
        Nvml(Library(node)),
        places,
        {COMMAND: steering(node)},
        tools=SimulatedTools(),
        companions=simulated_companions(),
        host=LinuxHost(own_pids=True),
        joins=joins,
        metrics=metrics,
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
