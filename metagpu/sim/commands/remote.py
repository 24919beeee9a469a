"""The commands of `metagpu sim` over the daemon's control socket."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from anyio import to_thread

from metagpu.plugins.control.client import send_request
from metagpu.plugins.control.socket import CommandHandler
from metagpu.sim.commands.arguments import command_from
from metagpu.sim.commands.node_commands import AnySimCommand, SimReply, apply_command
from metagpu.sim.machine.node import SimNode

COMMAND: Final = "sim"


def command_handler(node: SimNode) -> CommandHandler:
    """Return the handler of the control command `sim` for this node."""

    async def handle(request: Mapping[str, Any]) -> object:
        command: AnySimCommand = msgspec.convert(request.get("change"), AnySimCommand)
        # In a thread: the command may read where a process of this machine runs.
        return msgspec.to_builtins(await to_thread.run_sync(apply_command, node, command))

    return handle


def send_command(run_dir: Path, args: argparse.Namespace) -> SimReply:
    """Send the command of a parsed command line to the daemon.

    Raises:
        MetagpuError: no daemon answers, it has no simulated node, or the node refuses.
    """
    command = msgspec.to_builtins(command_from(args))
    answer = send_request(run_dir, {"command": COMMAND, "change": command})
    return msgspec.convert(answer, SimReply)
