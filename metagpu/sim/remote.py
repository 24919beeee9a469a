"""Steering a simulated node from another process, over the daemon's control socket."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from anyio import to_thread

from metagpu.plugins import control
from metagpu.sim.arguments import command_from
from metagpu.sim.node import SimNode
from metagpu.sim.steer import AnyCommand, Reply, steer

COMMAND: Final = "sim"


def steering(node: SimNode) -> control.Handler:
    """Give the control command that steers this node."""

    async def handle(request: Mapping[str, Any]) -> object:
        command: AnyCommand = msgspec.convert(request.get("steer"), AnyCommand)
        # In a thread: it may look where a process of this machine runs.
        return msgspec.to_builtins(await to_thread.run_sync(steer, node, command))

    return handle


def send(run_dir: Path, args: argparse.Namespace) -> Reply:
    """Send what the command line says to the daemon.

    Raises:
        MetagpuError: if no daemon answers, it has no simulated node, or the node refuses.
    """
    command = msgspec.to_builtins(command_from(args))
    answer = control.ask(run_dir, {"command": COMMAND, "steer": command})
    return msgspec.convert(answer, Reply)
