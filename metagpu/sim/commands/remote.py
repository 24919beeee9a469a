"""The commands of `metagpu sim` over the daemon's control socket."""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from anyio import to_thread

from metagpu.agent.paths import RUN_DIR
from metagpu.core.errors import NoDaemon
from metagpu.host.processes import read_process
from metagpu.plugins.control.client import ANSWER_TIMEOUT, SOCKET_NAME, send_request
from metagpu.plugins.control.socket import CommandHandler
from metagpu.sim.cluster.views import ClusterReply
from metagpu.sim.commands.arguments import command_from
from metagpu.sim.commands.cluster_commands import AnyClusterCommand, ClusterCommand
from metagpu.sim.commands.node_commands import (
    AnySimCommand,
    ProcessCommand,
    RebootCommand,
    SimReply,
    apply_command,
)
from metagpu.sim.machine.gpu import SimError
from metagpu.sim.machine.node import SimNode

if TYPE_CHECKING:
    from metagpu.sim.cluster.single_node import SingleNodeCluster

COMMAND: Final = "sim"
_OPTION, _SET = "--run-dir", "METAGPU_RUN_DIR="


def command_handler(node: SimNode, cluster: "SingleNodeCluster | None" = None) -> CommandHandler:
    """Return the handler of the control command `sim` for a node and its cluster."""

    async def handle(request: Mapping[str, Any]) -> object:
        command: AnySimCommand | AnyClusterCommand = msgspec.convert(
            request.get("change"), AnySimCommand | AnyClusterCommand
        )
        if isinstance(command, ClusterCommand):
            if cluster is None:
                raise SimError(
                    "this daemon has no simulated cluster; start it with "
                    "`metagpu run --simulate … --with-kubelet`"
                )
            await cluster.started.wait()
            return msgspec.to_builtins(await command.apply(cluster))
        # In a thread: the command may read where a process of this machine runs.
        reply = await to_thread.run_sync(apply_command, node, command)
        if cluster is not None and isinstance(command, ProcessCommand):
            await cluster.containers.follow(command.pid, ends=command.change == "end")
        if cluster is not None and isinstance(command, RebootCommand):
            await cluster.restart_kubelet(reboot=True)
        return msgspec.to_builtins(reply)

    return handle


def send_command(run_dir: Path, args: argparse.Namespace) -> SimReply | ClusterReply:
    """Send the command of a parsed command line to the daemon.

    Raises:
        MetagpuError: no daemon answers, it has no simulated node, or the node refuses.
    """
    command = command_from(args)
    change = msgspec.to_builtins(command)
    answer = _ask(run_dir, {"command": COMMAND, "change": change})
    if isinstance(command, ClusterCommand):
        return msgspec.convert(answer, ClusterReply)
    return msgspec.convert(answer, SimReply)


def _ask(run_dir: Path, request: Mapping[str, object]) -> Any:  # noqa: ANN401 - JSON
    """Ask the daemon; one that is starting gets as long as for its answer."""
    deadline, noted = time.monotonic() + ANSWER_TIMEOUT, False
    while True:
        try:
            return send_request(run_dir, request)
        except NoDaemon as error:
            absent = isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError)
            if not absent or time.monotonic() > deadline:
                raise
            _require_start(run_dir, error)
        if not noted:
            note = f"no daemon answers on {run_dir / SOCKET_NAME} yet; waiting {ANSWER_TIMEOUT:g} s"
            print(note, file=sys.stderr)  # noqa: T201 - a command line speaks so
            noted = True
        time.sleep(0.1)


def _require_start(run_dir: Path, absent: NoDaemon) -> None:
    """Raise unless a process of `metagpu run` will answer in this directory."""
    if run_dir in (places := set(_run_dirs())):
        return
    hints = [f"one runs with --run-dir {place}" for place in sorted(places)]
    hints = hints or ["start one by `metagpu run --simulate a100-40gb:8 --with-kubelet`"]
    raise NoDaemon(f"no daemon runs in {run_dir}; {', '.join(hints)}") from absent


def _run_dirs() -> Iterator[Path]:
    """Yield the directory of each `metagpu run` on this machine that may be looked at."""
    for folder in Path("/proc").glob("[0-9]*"):
        process = read_process(int(folder.name))
        words = process.arguments if process else ()
        if process and "run" in words and "metagpu" in {Path(word).name for word in words[:3]}:
            set_by = [word.removeprefix(_SET) for word in process.env if word.startswith(_SET)]
            named = [after for word, after in pairwise(words) if word == _OPTION]
            named += [word.removeprefix(f"{_OPTION}=") for word in words if f"{_OPTION}=" in word]
            yield Path([str(RUN_DIR), *set_by, *named][-1])
