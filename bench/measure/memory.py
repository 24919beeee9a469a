"""Resident memory of the daemon, at rest and under load."""

import itertools
import random
import time
from contextlib import ExitStack
from typing import Final

from anyio.from_thread import start_blocking_portal

from bench import client, daemon, machine
from bench.figures import Figure
from bench.plan import Plan
from metagpu.sim.apiserver.server import SimApiServer

SETTLE: Final = 3.0
"""Seconds of rest before memory is read."""
_NODE: Final = "bench"
PREFERRED_EVERY: Final = 10
"""Calls of Allocate to one of GetPreferredAllocation."""


def memory(plan: Plan) -> list[Figure]:
    """Measure resident memory after the start and under load."""
    early, late = plan.count(10_000, 200), plan.count(50_000, 1000)

    with ExitStack() as stack:
        folder = stack.enter_context(daemon.folder())
        pool = daemon.POOL.format(shares=100)
        with daemon.start(folder, config=pool) as first, client.connected(first.socket):
            pass  # it serves: what an image has already is compiled
        subject = stack.enter_context(daemon.start(folder, config=pool))
        plugin = stack.enter_context(client.connected(subject.socket))
        lists = stack.enter_context(plugin.lists())
        ids = client.ids_in(lists.take().message)
        time.sleep(SETTLE)
        at = {0: machine.resident(subject.pid)}
        relayed = machine.resident_of_tree(subject.pid)

        shuffled = random.Random(1).sample(ids, len(ids))  # noqa: S311 - as Go's map order does
        requests = itertools.cycle([client.allocate_request([share]) for share in shuffled])
        preferred = client.preferred_request(shuffled, 1)
        for number in range(1, late + 1):
            plugin.allocate(next(requests))
            if number % PREFERRED_EVERY == 0:
                plugin.prefer(preferred)
            if number % (late // 5) == 0:
                plan.report(f"memory: {number} allocations")
            if number in {early, late}:
                at[number] = machine.resident(subject.pid)

    return [
        _megabytes("resident memory, at rest", at[0], 45, 0),
        _megabytes("resident memory at rest, with the relay", relayed, 47, 0),
        _megabytes("resident memory at rest, with relay and API server", _joined(), 55, 0),
        _megabytes(f"resident memory, after {late} allocations", at[late], 45, late),
        _megabytes(
            f"growth from allocation {early} to {late}", at[late] - at[early], 1, late - early
        ),
    ]


def _joined() -> float:
    """Return the memory at rest of a daemon and its relay, with an API server's features."""
    server = SimApiServer()
    server.add_node(_NODE)
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        stack.enter_context(portal.wrap_async_context_manager(server.running()))
        folder = stack.enter_context(daemon.folder())
        joins = {"--node-name": _NODE, "--kubeconfig": server.kubeconfig(folder)}
        pool = daemon.POOL.format(shares=100)
        with daemon.start(folder, config=pool, further=joins) as first:
            assert first.socket.exists()  # what an image has already is compiled
        subject = stack.enter_context(daemon.start(folder, config=pool, further=joins))
        plugin = stack.enter_context(client.connected(subject.socket))
        plugin.first_list()
        time.sleep(SETTLE)
        return machine.resident_of_tree(subject.pid)


def _megabytes(name: str, measured: float, target: float, calls: int) -> Figure:
    return Figure(name=name, unit="MB", measured=measured, target=target, calls=calls)
