"""Resident memory of the daemon, at rest and under load."""

import itertools
import random
import time
from contextlib import ExitStack
from typing import Final

from bench import client, daemon, machine
from bench.figures import Figure
from bench.plan import Plan

SETTLE: Final = 3.0
"""Seconds of rest before memory is read."""
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
        _megabytes(f"resident memory, after {late} allocations", at[late], 45, late),
        _megabytes(
            f"growth from allocation {early} to {late}", at[late] - at[early], 1, late - early
        ),
    ]


def _megabytes(name: str, measured: float, target: float, calls: int) -> Figure:
    return Figure(name=name, unit="MB", measured=measured, target=target, calls=calls)
