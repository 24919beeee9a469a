"""Count what the daemon does for each call and at rest, in figures that noise does not move.

Calls of functions, loaded modules and bytes are the same on a busy and on an idle machine. So they
show what a change costs before anybody measures time: `--check`, which is part of what every change
passes, fails where a figure is more than 5 % above the one in `cost.json`, that of the commit
before, at rest 50 %. Who makes a figure dearer with good reason writes the file anew, and says why
in the commit.

$ python -m bench.cost --check
$ python -m bench.cost --before ../metagpu-before
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import anyio

from bench import client, counted, daemon
from bench.client import Client
from bench.daemon import Daemon
from bench.enforcement_node import simulated_node
from bench.measure.enforcement import GPUS, NODE, PODS, collect_gpus, populate
from bench.pod_resources import PodResources
from metagpu.plugins.kubelet.pb import v1
from metagpu.plugins.kubelet.pod_list import parse_leases

COMMITTED: Final = Path(__file__).with_suffix(".json")
TOLERANCE: Final = 0.05
REST_TOLERANCE: Final = 0.5
"""A busy machine ends several waits at once. A walk of all leases is three times as much."""
CALLS: Final = 41
"""Of each kind, or as many as there are shares for. The figure is their lower quartile, since what
happens by the clock adds to some."""
REST_S: Final = 21.0
"""At rest, what happens by the clock is all there is: two of the longest periods."""
_AFTER_S: Final = 0.02
"""For what the daemon still does after its answer."""

Figures = dict[str, int]


class Count(NamedTuple):
    """The work of a daemon so far."""

    calls: int
    modules: int


def main() -> int:
    """Print the figures, and compare them; return 1 where one is dearer than allowed."""
    args = _arguments()
    if args.json:
        print(json.dumps(measure()))
        return 0
    name, before = _before(args.before)
    figures = measure()
    print(_table(figures, before, name))
    if args.write:
        COMMITTED.write_text(json.dumps({"python": _python(), "figures": figures}, indent=2) + "\n")
        print(f"written to {COMMITTED}")
        return 0
    dearer = [key for key, value in figures.items() if _is_dearer(key, value, before)]
    if dearer:
        print(
            f"dearer than {name} allows: {', '.join(dearer)}. Find out which change did it "
            "(--before PATH compares two trees); if it is worth that, run `make cost WRITE=1` and "
            "give the reason in the commit."
        )
    return 1 if dearer and args.check else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.cost", description=__doc__)
    add = parser.add_argument
    add("--check", action="store_true", help="fail where a figure is dearer than allowed")
    add("--write", action="store_true", help=f"write {COMMITTED.name} anew")
    add("--before", type=Path, metavar="PATH", help="compare with another commit's source tree")
    add("--json", action="store_true", help="print the figures alone, as JSON")
    return parser.parse_args()


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _before(tree: Path | None) -> tuple[str, Figures]:
    """Return the figures to compare with, and what they are called."""
    if tree is not None:
        command = [sys.executable, "-m", "bench.cost", "--json"]
        printed = subprocess.run(command, cwd=tree, check=True, stdout=subprocess.PIPE).stdout
        return str(tree), json.loads(printed)
    committed = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}
    if committed.get("python") != _python():
        # Each Python has other calls: from 3.12 on, comprehensions are none.
        print(f"{COMMITTED.name} has the figures of Python {committed.get('python')} alone")
        return COMMITTED.name, {}
    return COMMITTED.name, committed["figures"]


def _is_dearer(key: str, value: int, before: Figures) -> bool:
    allowed = REST_TOLERANCE if "at rest" in key else TOLERANCE
    return key in before and value > before[key] * (1 + allowed)


def _table(figures: Figures, before: Figures, name: str) -> str:
    width = max(map(len, figures))
    lines = [f"{'':{width}} {'now':>10} {'before':>10}  (before: {name})"]
    for key, value in figures.items():
        earlier = before.get(key)
        change = f"{value / earlier - 1:+8.1%}" if earlier else ""
        lines.append(f"{key:{width}} {value:>10} {earlier or '':>10} {change}".rstrip())
    return "\n".join(lines)


def measure() -> Figures:
    """Return all figures, with their names."""
    return {**_of_calls(), **_at_rest(), **_of_passes(), **_of_pod_lists()}


def _of_calls() -> Figures:
    """Measure a daemon of 8 GPUs with 100 shares each."""
    with ExitStack() as stack:
        folder = stack.enter_context(daemon.folder())
        subject, ask = stack.enter_context(_counted(folder, shares=100))
        plugin = stack.enter_context(client.connected(subject.socket))
        first = plugin.first_list()
        ids = client.ids_in(first)
        shuffled = random.Random(1).sample(ids, len(ids))  # noqa: S311 - the same each time
        halves = [ids[at : at + 50] for at in range(0, len(ids), 50)]
        lists = [plugin.first_list] * CALLS
        preferred = client.preferred_request(shuffled, 4)
        ones = [client.allocate_request([share]) for share in shuffled[:CALLS]]
        fifties = [client.allocate_request(half) for half in halves]
        stream = stack.enter_context(plugin.lists())
        stream.take()
        return {
            "modules loaded": ask().modules,
            "bytes of the first list": len(first),
            "calls for a first list": _quartile(ask, lists),
            "calls for Preferred, 4 of 800": _quartile(
                ask, [lambda: plugin.prefer(preferred)] * CALLS
            ),
            "calls for Allocate, 1 id": _quartile(ask, _all(plugin, ones)),
            "calls for Allocate, 50 ids": _quartile(ask, _all(plugin, fifties)),
        }


def _all(plugin: Client, requests: Sequence[bytes]) -> list[Callable[[], object]]:
    return [partial(plugin.allocate, request) for request in requests]


def _quartile(ask: Callable[[], Count], actions: Iterable[Callable[[], object]]) -> int:
    counts = []
    for action in actions:
        before = ask().calls
        action()
        time.sleep(_AFTER_S)
        counts.append(ask().calls - before)
    return sorted(counts)[len(counts) // 4]


def _at_rest() -> Figures:
    """Measure 16 GPUs with 1000 shares each, before and after all are leased."""
    pods = PodResources()
    with ExitStack() as stack:
        folder = stack.enter_context(daemon.folder())
        asked = folder / "pod-resources.sock"
        stack.enter_context(pods.served(asked))
        subject, ask = stack.enter_context(
            _counted(folder, shares=1000, simulate="a100-40gb:16", pod_resources=asked)
        )
        plugin = stack.enter_context(client.connected(subject.socket))
        stack.enter_context(plugin.lists()).take()
        free = _in_a_second(ask)
        pods.lease_all(plugin, daemon.RESOURCE)
        return {
            "calls a second at rest, nothing leased": free,
            "calls a second at rest, 16000 shares leased": _in_a_second(ask),
        }


def _in_a_second(ask: Callable[[], Count]) -> int:
    time.sleep(3)
    began, before = time.monotonic(), ask().calls
    time.sleep(REST_S)
    return round((ask().calls - before) / (time.monotonic() - began))


def _of_passes() -> Figures:
    """Measure a pass of the enforcer over 800 processes of 200 pods, of 8 GPUs."""
    return {f"calls of a pass, {GPUS} GPUs, {GPUS * PODS} pods": anyio.run(_pass)}


async def _pass() -> int:
    counts = []
    with tempfile.TemporaryDirectory(prefix="metagpu-bench-") as folder:
        async with simulated_node(Path(folder), NODE) as node:
            collector = populate(node, [os.getpid()] * 4)
            for _ in range(3):
                with counted.here() as calls:
                    await collect_gpus(collector, node)
                counts.append(calls())
    return min(counts)


def _of_pod_lists() -> Figures:
    """Measure an answer of PodResources: 110 pods of 16 GPUs with 100 shares each."""
    ids = [f"GPU-{gpu}::{share}" for gpu in range(16) for share in range(100)]
    pods = [
        v1.PodResources(
            name=f"pod-{number}",
            namespace="bench",
            containers=[
                v1.ContainerResources(
                    name="main",
                    devices=[
                        v1.ContainerDevices(
                            resource_name=daemon.RESOURCE, device_ids=ids[number::110]
                        )
                    ],
                )
            ],
        )
        for number in range(110)
    ]
    answer = bytes(v1.ListPodResourcesResponse(pod_resources=pods))
    with counted.here() as calls:
        parse_leases(answer, 0.0)
    return {"calls for an answer of PodResources, 110 pods": calls()}


@contextmanager
def _counted(
    folder: Path,
    *,
    shares: int,
    simulate: str = daemon.GPUS,
    pod_resources: Path | None = None,
) -> Iterator[tuple[Daemon, Callable[[], Count]]]:
    """Run a daemon whose calls are counted; yield it, and what asks for the count."""
    asked = folder / "count.sock"
    environment: Mapping[str, str] = {counted.SOCKET: str(asked)}
    config = daemon.POOL.format(shares=shares)

    def ask() -> Count:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(asked))
            calls, modules = map(int, connection.recv(100).split())
        return Count(calls, modules)

    program = ("-m", "bench.counted")
    with daemon.start(
        folder,
        config=config,
        simulate=simulate,
        pod_resources=pod_resources,
        environment=environment,
        program=program,
    ) as subject:
        yield subject, ask


if __name__ == "__main__":
    sys.exit(main())
