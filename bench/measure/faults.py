"""From an XID to the changed list at every stream."""

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from bench import client, daemon
from bench.client import Lists
from bench.daemon import Daemon
from bench.figures import Figure, Samples
from bench.plan import Plan

TIME_LIMIT: Final = 180.0
"""Seconds for the rounds of one node; `calls` of the figure is their number."""
_CALM: Final = 0.05
"""Seconds after a fault in which the daemon finds out that the GPU is lost."""
_GPU, _OTHER = "0", "1"


@dataclass(frozen=True)
class Node:
    """A node whose first GPU fails repeatedly, watched by some streams."""

    gpus: int
    shares: int
    streams: int
    target: float

    @property
    def name(self) -> str:
        """Return the name of the figure."""
        who = "a client" if self.streams == 1 else f"the last of {self.streams} streams"
        return f"XID to list at {who}, {self.gpus} x {self.shares}"


NODES: Final = (
    Node(gpus=8, shares=100, streams=1, target=5),
    Node(gpus=16, shares=1000, streams=4, target=40),
)


def faults(plan: Plan) -> list[Figure]:
    """Measure the delay on all nodes."""
    return [figure for node in NODES for figure in _node(plan, node)]


def _node(plan: Plan, node: Node) -> list[Figure]:
    samples = Samples()
    config = daemon.POOL.format(shares=node.shares)

    with ExitStack() as stack:
        folder = stack.enter_context(daemon.folder())
        subject = stack.enter_context(
            daemon.start(folder, config=config, simulate=f"a100-40gb:{node.gpus}")
        )
        socket = subject.socket
        streams = [
            stack.enter_context(stack.enter_context(client.connected(socket)).lists())
            for _ in range(node.streams)
        ]
        [well] = {stream.take().message for stream in streams}
        deadline = time.monotonic() + TIME_LIMIT

        for number in range(-3, plan.count(1000, 10)):
            if time.monotonic() > deadline:
                break
            if number % 100 == 0:
                plan.report(f"faults: {node.name}: {number}")
            took = raise_xid(subject, streams, well)
            recover(subject, streams, well)
            if number >= 0:
                samples.seconds.append(took)

    return [samples.figure(node.name, target=node.target), samples.worst(f"{node.name}, worst")]


def raise_xid(subject: Daemon, streams: list[Lists], well: bytes) -> float:
    """Raise an XID; return the seconds until every stream has the changed list."""
    began = time.perf_counter()
    subject.change_node("xid", gpu=_GPU, code=79)
    return max(stream.changed(well).at for stream in streams) - began


def recover(subject: Daemon, streams: list[Lists], well: bytes) -> None:
    """Reset the GPU, acknowledge it, and wait until it is back on every stream.

    The daemon returns the GPU to service once its current wait for events is over, up to a second
    later. A corrected memory error of another GPU, which has no other effect, ends that wait.
    """
    time.sleep(_CALM)
    subject.change_node("reset", gpu=_GPU)
    acknowledging = threading.Thread(
        target=subject.ask, args=("acknowledge",), kwargs={"gpu": _GPU}
    )
    acknowledging.start()

    while acknowledging.is_alive():
        acknowledging.join(0.005)
        subject.change_node("ecc", gpu=_OTHER)
    for stream in streams:
        while stream.take().message != well:
            pass
