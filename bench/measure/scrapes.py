"""CPU time of a scrape and of a view of the page, and what serving both adds to the daemon."""

import http.client
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import anyio
from anyio import to_thread
from msgspec.structs import replace

from bench import daemon, kubelets, machine
from bench.figures import Figure
from bench.plan import Plan
from metagpu.core.model.shares import Holder
from metagpu.sim.kubelet.kubelet import SimKubelet, SimPod
from metagpu.sim.machine.containers import SimHost

PODS: Final = 40
SHARES: Final = 10
"""Of each GPU; each pod holds two."""
PROCESS: Final = {"memory": 1 << 30, "load": 10}
"""The one process of each pod: its memory and load, within the pod's shares."""
FIRST_PID: Final = 10_000
PERIOD: Final = 1.31
"""Seconds from a scrape to the next: those within one second share a page.

Not a multiple of the daemon's own periods: its other work is as often in the windows with a scrape
as in those without.
"""
AFTER: Final = 0.05
"""Seconds after a response, for what the daemon does when the client has it."""
SETTLE: Final = 3.0
TIMEOUT: Final = 60.0
PAGES: Final[Mapping[str, tuple[str, float | None]]] = {
    "/metrics": ("--metrics", 20),
    "/dcgm": ("--metrics", None),
    "/api/v1/view": ("--web", None),
}
"""The measured pages: their options, and targets in milliseconds."""
COSTLY: Final = ", NVML's calls as on an H200"


class _Node(NamedTuple):
    """A daemon on a node of its own, the port of each option that opens one, a remark on it."""

    subject: daemon.Daemon
    ports: dict[str, int]
    remark: str


def scrapes(plan: Plan) -> list[Figure]:
    """Measure scrapes and views of a node of 8 GPUs and 40 pods."""
    return anyio.run(_scrapes, plan)


async def _scrapes(plan: Plan) -> list[Figure]:
    count = plan.count(40, 2)
    options = dict.fromkeys(option for option, _ in PAGES.values())

    # Side by side: other load on the machine affects both.
    async with _node(()) as plain, _node(tuple(options)) as serving:
        await anyio.sleep(SETTLE)
        of_pages = [
            await _page(plan, serving, page, target, count) for page, (_, target) in PAGES.items()
        ]
        async with _node(("--metrics",), nvml_costs=True) as costly:
            of_pages.append(await _page(plan, costly, "/metrics", 20, count))
        plan.report("scrapes: rest")
        rest = await _shares_at_rest((plain.subject.pid, serving.subject.pid), plan.count(30, 2))
        memory = [machine.resident(node.subject.pid) for node in (plain, serving)]
    requests = len(PAGES) * count
    return [
        *of_pages,
        Figure(
            name=f"memory of metrics and page, after {requests} requests",
            unit="MB",
            measured=memory[1] - memory[0],
            target=15,
            calls=requests,
        ),
        Figure(
            name=f"CPU at rest, 8 GPUs, {PODS} pods",
            unit="%",
            measured=100 * rest[0],
            target=1.5,
            calls=1,
        ),
        Figure(
            name="CPU at rest that metrics and page add",
            unit="%",
            measured=100 * (rest[1] - rest[0]),
            target=0.5,
            calls=1,
        ),
    ]


@asynccontextmanager
async def _node(options: Sequence[str], *, nvml_costs: bool = False) -> AsyncIterator[_Node]:
    """Run a daemon with these options on a node with all pods."""
    costs = ("--nvml-costs",) if nvml_costs else ()
    ports = {option: daemon.free_port() for option in options}
    with daemon.folder() as folder:
        asked = folder / "pod-resources.sock"
        async with kubelets.simulated(folder / "kubelet", pod_resources=asked) as kubelet:
            host = SimHost(_made(folder / "host"))
            subject = daemon.start(
                folder,
                config=daemon.POOL.format(shares=SHARES),
                pod_resources=asked,
                kubelet=False,
                program=("-m", "bench.contained", *costs, str(host.folder)),
                further={option: f"127.0.0.1:{port}" for option, port in ports.items()},
            )
            try:
                await _admit(kubelet, host, subject)
                yield _Node(subject, ports, COSTLY if costs else "")
            finally:
                with anyio.CancelScope(shield=True):
                    await to_thread.run_sync(subject.stop)


async def _page(plan: Plan, node: _Node, page: str, target: float | None, count: int) -> Figure:
    plan.report(f"scrapes: {count} of {page}")
    option, _ = PAGES[page]
    seconds = await _cpu_of_a_scrape(node.subject.pid, node.ports[option], page, count)
    return Figure(
        name=f"CPU of {page}, 8 GPUs, {PODS} pods{node.remark}",
        unit="ms",
        measured=1000 * seconds,
        target=target,
        calls=count,
    )


async def _admit(kubelet: SimKubelet, host: SimHost, subject: daemon.Daemon) -> None:
    """Admit all pods, with a process of each on its GPU."""
    await kubelet.wait_for(lambda: kubelet.allocatable().get(daemon.RESOURCE) == 8 * SHARES)
    for number in range(PODS):
        pod = SimPod.single(f"pod-{number}", {daemon.RESOURCE: 2})
        pod, pid = replace(pod, namespace=f"team-{number % 4}"), FIRST_PID + number
        await kubelet.admit(pod)
        host.add_container_process(pid, Holder(pod.namespace, pod.name, "main"), real=os.getpid())
        [gpu] = {name.partition("::")[0] for name in kubelet.devices(pod)["main"][daemon.RESOURCE]}
        change = partial(subject.change_node, "process", change="start", gpu=gpu, pid=pid)
        await to_thread.run_sync(partial(change, **PROCESS))
    with anyio.fail_after(TIMEOUT):
        while await to_thread.run_sync(_named_processes, subject) < PODS:  # noqa: ASYNC110 - as seen
            await anyio.sleep(PERIOD)


def _named_processes(subject: daemon.Daemon) -> int:
    """Count the processes that the daemon knows the containers of."""
    answer = subject.ask("usage")
    assert isinstance(answer, dict)
    return sum(
        len(gpu["processes"]) for container in answer["containers"] for gpu in container["gpus"]
    )


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def _cpu_of_a_scrape(pid: int, port: int, page: str, count: int) -> float:
    """Return the CPU seconds of a scrape, without those of the idle daemon in as much time.

    From the request until a moment after its response: in the second that follows, the daemon uses
    more for its other work, and now more and now less. Windows with and without a scrape take
    turns: other load on the machine affects both.
    """
    await to_thread.run_sync(_scrape, port, page)
    spent = 0.0
    for _ in range(count):
        await anyio.sleep(PERIOD / 2)
        began, before = time.monotonic(), machine.cpu_seconds(pid)
        await to_thread.run_sync(_scrape, port, page)
        await anyio.sleep(AFTER)
        spent += machine.cpu_seconds(pid) - before
        took = time.monotonic() - began

        await anyio.sleep(PERIOD / 2 - 2 * took)
        before = machine.cpu_seconds(pid)
        await anyio.sleep(took)
        spent -= machine.cpu_seconds(pid) - before
    return spent / count


async def _shares_at_rest(pids: Sequence[int], seconds: float) -> list[float]:
    """Return the share of a core that each daemon uses while nobody asks it."""
    began, before = time.monotonic(), [machine.cpu_seconds(pid) for pid in pids]
    await anyio.sleep(seconds)
    took = time.monotonic() - began
    return [(machine.cpu_seconds(pid) - at) / took for pid, at in zip(pids, before, strict=True)]


def _scrape(port: int, page: str) -> None:
    """Read a page as Prometheus or a browser does."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", page, headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        body = answer.read()
    if answer.status != http.client.OK or not body:
        raise RuntimeError(f"{page}: {answer.status} {answer.reason}")
