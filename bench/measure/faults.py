"""From an XID to the changed list at whoever watches."""

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
"""Seconds for the rounds of one node; `calls` of the figure says how many they were."""
_CALM: Final = 0.05
"""Seconds after a fault in which the daemon finds out that the GPU is lost."""
_GPU, _OTHER = "0", "1"


@dataclass(frozen=True)
class Node:
    """A node whose first GPU breaks again and again, watched on some streams."""

    gpus: int
    shares: int
    streams: int
    target: float

    @property
    def name(self) -> str:
        """Name it as a figure does."""
        who = "a client" if self.streams == 1 else f"the last of {self.streams} streams"
        return f"XID to list at {who}, {self.gpus} x {self.shares}"


NODES: Final = (
    Node(gpus=8, shares=100, streams=1, target=5),
    Node(gpus=16, shares=1000, streams=4, target=40),
)


def faults(plan: Plan) -> list[Figure]:
    """Measure on all nodes."""
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
                plan.say(f"faults: {node.name}: {number}")
            took = _break(subject, streams, well)
            _mend(subject, streams, well)
            if number >= 0:
                samples.seconds.append(took)

    return [samples.figure(node.name, target=node.target), samples.worst(f"{node.name}, worst")]


def _break(subject: Daemon, streams: list[Lists], well: bytes) -> float:
    """Raise an XID; tell how long it took to be known on every stream."""
    began = time.perf_counter()
    subject.steer("xid", gpu=_GPU, code=79)
    return max(stream.changed(well).at for stream in streams) - began


def _mend(subject: Daemon, streams: list[Lists], well: bytes) -> None:
    """Reset the GPU, acknowledge it, and wait until it is back on every stream.

    The daemon takes it back once its present wait for events is over, up to a second later. A
    corrected memory error of another GPU, which concerns nobody, ends that wait.
    """
    time.sleep(_CALM)
    subject.steer("recover", gpu=_GPU)
    acknowledging = threading.Thread(
        target=subject.ask, args=("acknowledge",), kwargs={"gpu": _GPU}
    )
    acknowledging.start()

    while acknowledging.is_alive():
        acknowledging.join(0.005)
        subject.steer("ecc", gpu=_OTHER)
    for stream in streams:
        while stream.take().message != well:
            pass
