"""The commands of `metagpu sim` over the daemon's control socket."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from anyio import to_thread

from metagpu.plugins.control.client import send_request
from metagpu.plugins.control.socket import CommandHandler
from metagpu.sim.cluster.views import ClusterReply
from metagpu.sim.commands.arguments import command_from
from metagpu.sim.commands.cluster_commands import AnyClusterCommand, ClusterCommand
from metagpu.sim.commands.node_commands import (
    AnySimCommand,
    RebootCommand,
    SimReply,
    apply_command,
)
from metagpu.sim.machine.gpu import SimError
from metagpu.sim.machine.node import SimNode

if TYPE_CHECKING:
    from metagpu.sim.cluster.single_node import SingleNodeCluster

COMMAND: Final = "sim"


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
    answer = send_request(run_dir, {"command": COMMAND, "change": change})
    if isinstance(command, ClusterCommand):
        return msgspec.convert(answer, ClusterReply)
    return msgspec.convert(answer, SimReply)
