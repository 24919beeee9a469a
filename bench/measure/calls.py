"""Allocate and GetPreferredAllocation, beside a plugin that does nothing."""

import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import client, daemon, machine
from bench.client import Client
from bench.figures import Figure, Samples
from bench.plan import Plan

BATCH: Final = 25
"""Calls to one side before the other has its turn."""
_TIMEOUT: Final = 10.0

Call = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Question:
    """One kind of call, and its target relative to the null plugin.

    Attributes:
        requests: sent in turn, repeatedly.
    """

    name: str
    method: Callable[[Client], Call]
    requests: Sequence[bytes]
    target: float


def questions(ids: Sequence[str]) -> list[Question]:
    """Return all kinds of calls about these ids, in the order of their measurement.

    Calls with rotating ids come last: they leave every share leased.
    """
    shuffled = random.Random(1).sample(ids, len(ids))  # noqa: S311 - as Go's map order does
    by_gpu: dict[str, list[str]] = {}
    for share in ids:
        by_gpu.setdefault(share.partition("::")[0], []).append(share)
    halves = [those[at : at + 50] for those in by_gpu.values() for at in (0, 50)]

    allocate: Callable[[Client], Call] = lambda plugin: plugin.allocate  # noqa: E731
    prefer: Callable[[Client], Call] = lambda plugin: plugin.prefer  # noqa: E731
    ask = client.allocate_request
    return [
        Question("Allocate, 1 id", allocate, [ask(ids[:1])], 1.2),
        Question("Allocate, 50 ids", allocate, [ask(halves[0])], 1.4),
        Question("Preferred, 1 of 800", prefer, [client.preferred_request(shuffled, 1)], 2),
        Question("Preferred, 4 of 800", prefer, [client.preferred_request(shuffled, 4)], 2),
        Question("Allocate, 1 id, rotating", allocate, [ask([i]) for i in shuffled], 1.2),
        Question("Allocate, 50 ids, rotating", allocate, [ask(half) for half in halves], 1.4),
    ]


def many_shares(ids: Sequence[str]) -> list[Question]:
    """Return calls about 8 GPUs of 1000 shares, whose ids have three digits."""
    shuffled = random.Random(1).sample(ids, len(ids))  # noqa: S311 - as Go's map order does
    prefer = client.preferred_request(shuffled, 4)
    return [
        Question(
            "Allocate, 50 ids, 1000 shares a GPU",
            lambda plugin: plugin.allocate,
            [client.allocate_request(ids[100:150])],
            1.4,
        ),
        Question("Preferred, 4 of 8000", lambda plugin: plugin.prefer, [prefer], 3),
    ]


def calls(plan: Plan) -> list[Figure]:
    """Measure every kind of call, in batches that alternate with the null plugin's."""
    return _measure(plan, 100, questions) + _measure(plan, 1000, many_shares)


def _measure(
    plan: Plan, shares: int, build: Callable[[Sequence[str]], list[Question]]
) -> list[Figure]:
    figures = []

    with ExitStack() as stack:
        folder = stack.enter_context(daemon.folder())
        config = daemon.POOL.format(shares=shares)
        subject = stack.enter_context(daemon.start(folder, config=config))
        plugin = stack.enter_context(client.connected(subject.socket))
        asked = build(client.ids_in(plugin.first_list()))
        answers = [question.method(plugin)(question.requests[0]) for question in asked]
        baseline, sockets = stack.enter_context(null_plugin(answers))

        for question, socket in zip(asked, sockets, strict=True):
            plan.report(f"calls: {question.name}")
            with client.connected(socket) as null:
                sides = question.method(plugin), question.method(null)
                ours, nulls = alternating(*sides, question.requests, plan.count(3000, 100))
                spent = _cpu_of_calls(
                    dict(zip((subject.pid, baseline), sides, strict=True)),
                    question.requests,
                    plan.count(1000, 50),
                )
            figures += [
                ours.ratio(f"{question.name}: to a null plugin's", nulls, target=question.target),
                Figure(
                    name=f"{question.name}: CPU to a null plugin's",
                    unit="x",
                    measured=spent[subject.pid].p50 / spent[baseline].p50,
                    target=None,
                    calls=plan.count(1000, 50),
                ),
                ours.figure(f"{question.name}: metagpu", unit="us"),
                nulls.figure(f"{question.name}: null plugin", unit="us"),
            ]
    return figures


def alternating(
    subject: Call, baseline: Call, requests: Iterable[bytes], count: int
) -> tuple[Samples, Samples]:
    """Time `count` calls to each of two sides in turn, so that load affects both."""
    sides = [(call, itertools.cycle(requests), Samples()) for call in (subject, baseline)]

    for number in range(-1, count // BATCH):
        for call, endless, samples in sides:
            for request in itertools.islice(endless, 200 if number < 0 else BATCH):
                began = time.perf_counter()
                call(request)
                took = time.perf_counter() - began
                if number >= 0:  # the round before the first only warms up
                    samples.seconds.append(took)

    return sides[0][2], sides[1][2]


def _cpu_of_calls(
    sides: Mapping[int, Call], requests: Iterable[bytes], count: int
) -> Mapping[int, Samples]:
    """Return the CPU time of a call for each server, by pid; they take turns."""
    endless = {pid: itertools.cycle(requests) for pid in sides}
    spent = {pid: Samples() for pid in sides}
    for _ in range(count // BATCH):
        for pid, call in sides.items():
            before = machine.cpu_seconds(pid)
            for request in itertools.islice(endless[pid], BATCH):
                call(request)
            spent[pid].seconds.append((machine.cpu_seconds(pid) - before) / BATCH)
    return spent


@contextmanager
def null_plugin(answers: Sequence[bytes]) -> Iterator[tuple[int, list[Path]]]:
    """Run the null plugin; yield its pid, and a socket per answer."""
    with tempfile.TemporaryDirectory(prefix="metagpu-bench-null-") as made:
        files = [Path(made) / f"{number}.answer" for number in range(len(answers))]
        for file, answer in zip(files, answers, strict=True):
            file.write_bytes(answer)
        sockets = [file.with_suffix(".sock") for file in files]
        process = subprocess.Popen([sys.executable, "-m", "bench.null_plugin", made])

        try:
            deadline = time.monotonic() + _TIMEOUT
            while not all(socket.exists() for socket in sockets):
                assert process.poll() is None, "the null plugin ended"
                assert time.monotonic() < deadline, "the null plugin does not serve"
                time.sleep(0.01)
            yield process.pid, sockets
        finally:
            process.kill()
            process.wait()
