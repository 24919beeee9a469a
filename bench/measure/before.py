"""CPU, memory and an XID's delay of this tree, beside those of another commit's.

Daemons of both trees run at the same time and take turns: other load on the machine affects both.
"""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench import client, daemon, machine
from bench.client import Client
from bench.daemon import Daemon
from bench.figures import Figure, Samples
from bench.measure.calls import BATCH, questions
from bench.measure.faults import raise_xid, recover
from bench.plan import Plan
from bench.pod_resources import PodResources

RATIO: Final = 1.05
NAMES: Final = ("Allocate, 1 id", "Allocate, 50 ids", "Preferred, 4 of 800")
LEASED: Final = "CPU of a second at rest, 16000 shares leased"
SETTLE: Final = 3.0
"""Seconds of rest before memory or CPU is read."""
SLICE: Final = 5.0
"""Seconds in which the CPU of both daemons at rest is read."""
WORKS: Final = """\
import time
from contextlib import contextmanager
from bench import cost, counted
@contextmanager
def here():
    took = []
    began = time.process_time()
    yield lambda: took[0]
    took.append(time.process_time() - began)
counted.here = here
print(*cost._of_passes().values(), *cost._of_pod_lists().values())
"""
"""The works that `bench.cost` counts in a process of its own: here with their CPU time."""


def before(plan: Plan) -> list[Figure]:
    """Compare with the tree that `--before` names; without one there is nothing to measure."""
    if plan.before is None:
        return []
    trees = (daemon.HERE, plan.before)
    return [*_serving(plan, trees), *_resting(plan, trees), *_works(plan, trees)]


def _figures(name: str, unit: str, sides: Sequence[Samples]) -> list[Figure]:
    now, earlier = sides
    ratio = now.ratio(f"{name}, to the commit before", earlier, target=RATIO)
    return [now.figure(name, unit=unit), ratio]


def _serving(plan: Plan, trees: Sequence[Path]) -> Iterator[Figure]:
    """Measure memory, the daemon's CPU for each kind of call, and an XID."""
    with _daemons(trees, shares=100) as (daemons, plugins):
        time.sleep(SETTLE)
        now, earlier = (machine.resident(each.pid) for each in daemons)
        rest = Figure(name="resident memory", unit="MB", measured=now, target=None, calls=1)
        yield rest
        name = "resident memory, to the commit before"
        yield Figure(name=name, unit="x", measured=now / earlier, target=RATIO, calls=1)

        asked = [questions(client.ids_in(plugin.first_list())) for plugin in plugins]
        kinds: list[tuple[str, list[Callable[[], object]]]] = [
            ("a first list", [plugin.first_list for plugin in plugins])
        ]
        for of_both in zip(*asked, strict=True):
            calls = [
                partial(_call, question.method(plugin), itertools.cycle(question.requests))
                for question, plugin in zip(of_both, plugins, strict=True)
            ]
            if of_both[0].name in NAMES:
                kinds.append((of_both[0].name, [*calls]))
        for name, alternatives in kinds:
            plan.report(f"before: {name}")
            yield from _figures(f"CPU of {name}", "us", _of_calls(plan, daemons, alternatives))
        plan.report("before: XIDs")
        yield from _figures("XID to list, in turn", "ms", _of_xids(plan, daemons, plugins))


def _call(method: Callable[[bytes], object], requests: Iterator[bytes]) -> object:
    return method(next(requests))


@contextmanager
def _daemons(
    trees: Sequence[Path], *, shares: int, simulate: str = daemon.GPUS, asked: Sequence[Path] = ()
) -> Iterator[tuple[list[Daemon], list[Client]]]:
    """Run a daemon of each tree whose bytecode exists; yield them and a client of each."""
    config = daemon.POOL.format(shares=shares)
    with ExitStack() as stack:
        daemons = []
        for root, socket in itertools.zip_longest(trees, asked):
            start = partial(
                daemon.start,
                stack.enter_context(daemon.folder()),
                config=config,
                simulate=simulate,
                pod_resources=socket,
                root=root,
            )
            with start() as first, client.connected(first.socket):
                pass
            daemons.append(stack.enter_context(start()))
        yield daemons, [stack.enter_context(client.connected(each.socket)) for each in daemons]


def _of_calls(
    plan: Plan, daemons: Sequence[Daemon], calls: Sequence[Callable[[], object]]
) -> list[Samples]:
    sides = [Samples() for _ in daemons]
    for number in range(-4, plan.count(80, 2)):  # the first rounds warm up
        for side, call, samples in zip(daemons, calls, sides, strict=True):
            spent = machine.cpu_seconds(side.pid)
            for _ in range(BATCH):
                call()
            if number >= 0:
                samples.seconds.append((machine.cpu_seconds(side.pid) - spent) / BATCH)
    return sides


def _of_xids(plan: Plan, daemons: Sequence[Daemon], plugins: Sequence[Client]) -> list[Samples]:
    sides = [Samples() for _ in daemons]
    with ExitStack() as stack:
        streams = [stack.enter_context(plugin.lists()) for plugin in plugins]
        healthy = [stream.take().message for stream in streams]
        order = list(zip(daemons, streams, healthy, sides, strict=True))
        for _ in range(plan.count(60, 2)):
            order.reverse()  # the other one may still be at work on its recovery
            for side, stream, well, samples in order:
                samples.seconds.append(raise_xid(side, [stream], well))
                recover(side, [stream], well)
    return sides


def _resting(plan: Plan, trees: Sequence[Path]) -> list[Figure]:
    """Measure 16 GPUs with 1000 shares each, all of them leased."""
    return _figures(LEASED, "ms", leased_at_rest(plan, trees))


def leased_at_rest(plan: Plan, trees: Sequence[Path]) -> Sequence[Samples]:
    """Return the CPU time of a second at rest of each tree's daemon with 16000 shares leased."""
    plan.report("at rest, 16000 shares leased")
    sides = [Samples() for _ in trees]
    with ExitStack() as stack:
        folder = stack.enter_context(daemon.folder())
        sockets = [folder / f"{number}.sock" for number in range(len(trees))]
        services = [PodResources() for _ in trees]
        for service, socket in zip(services, sockets, strict=True):
            stack.enter_context(service.served(socket))
        daemons, plugins = stack.enter_context(
            _daemons(trees, shares=1000, simulate="a100-40gb:16", asked=sockets)
        )
        for service, plugin in zip(services, plugins, strict=True):
            service.lease_all(plugin, daemon.RESOURCE)
        time.sleep(SETTLE)
        for _ in range(plan.count(8, 1)):  # at the same time: what both do by the clock differs
            spent, began = [machine.cpu_seconds(each.pid) for each in daemons], time.monotonic()
            time.sleep(SLICE)
            took = time.monotonic() - began
            for each, earlier, samples in zip(daemons, spent, sides, strict=True):
                samples.seconds.append((machine.cpu_seconds(each.pid) - earlier) / took)
    return sides


def _works(plan: Plan, trees: Sequence[Path]) -> list[Figure]:
    """Measure a pass of the enforcer, and an answer of PodResources, each in its own tree."""
    plan.report("before: passes, answers of PodResources")
    passes, answers = [[Samples() for _ in trees] for _ in range(2)]
    for _ in range(plan.count(5, 1)):
        for number, root in enumerate(trees):
            command = [sys.executable, "-c", WORKS]
            printed = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE).stdout
            one_pass, answer = map(float, printed.split())
            passes[number].seconds.append(one_pass)
            answers[number].seconds.append(answer)
    return [
        *_figures("CPU of the enforcer's pass, 200 pods", "ms", passes),
        *_figures("CPU of an answer of PodResources, 110 pods", "ms", answers),
    ]
