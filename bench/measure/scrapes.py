"""CPU time of a scrape and of a view of the page, and what serving both adds to the daemon."""

import http.client
import socket
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Final

import anyio
import msgspec
from anyio import to_thread
from msgspec.structs import replace

from bench import daemon, kubelets, machine
from bench.figures import Figure
from bench.plan import Plan
from metagpu.sim.kubelet.kubelet import SimKubelet, SimPod

PODS: Final = 40
SHARES: Final = 10
"""Of each GPU; each pod holds two."""
PERIOD: Final = 1.5
"""Seconds between two scrapes: those within one second share a page."""
SETTLE: Final = 3.0
PAGES: Final[Mapping[str, tuple[str, float | None]]] = {
    "/metrics": ("--metrics", 20),
    "/dcgm": ("--metrics", None),
    "/api/v1/view": ("--web", None),
}
"""The measured pages: their options, and targets in milliseconds."""


class _Spent(msgspec.Struct, frozen=True):
    """The memory of a daemon in MB, its CPU at rest in percent, and milliseconds by page."""

    memory: float
    rest: float
    pages: dict[str, float]


def scrapes(plan: Plan) -> list[Figure]:
    """Measure scrapes and views of a node of 8 GPUs and 40 pods."""
    return anyio.run(_scrapes, plan)


async def _scrapes(plan: Plan) -> list[Figure]:
    count = plan.count(20, 2)
    plain, serving = await _measure(plan, 0), await _measure(plan, count)
    of_pages = [
        Figure(
            name=f"CPU of {page}, 8 GPUs, {PODS} pods",
            unit="ms",
            measured=serving.pages[page],
            target=target,
            calls=count,
        )
        for page, (_, target) in PAGES.items()
    ]
    memory = Figure(
        name=f"memory of metrics and page, after {len(PAGES) * count} requests",
        unit="MB",
        measured=serving.memory - plain.memory,
        target=15,
        calls=len(PAGES) * count,
    )
    rest = Figure(
        name="CPU at rest that metrics and page add",
        unit="%",
        measured=serving.rest - plain.rest,
        target=0.5,
        calls=1,
    )
    return [*of_pages, memory, rest]


async def _measure(plan: Plan, count: int) -> _Spent:
    """Return what a daemon spends that serves the pages, or none of them for no count."""
    options = dict.fromkeys(option for option, _ in PAGES.values()) if count else {}
    ports = {option: _free_port() for option in options}
    with daemon.folder() as folder:
        asked = folder / "pod-resources.sock"
        async with kubelets.simulated(folder / "kubelet", pod_resources=asked) as kubelet:
            subject = daemon.start(
                folder,
                config=daemon.POOL.format(shares=SHARES),
                pod_resources=asked,
                kubelet=False,
                further={option: f"127.0.0.1:{port}" for option, port in ports.items()},
            )
            try:
                await _admit(kubelet)
                await anyio.sleep(SETTLE)
                spent = {}
                for page, (option, _) in PAGES.items() if count else ():
                    plan.report(f"scrapes: {count} of {page}")
                    cpu = await _cpu_of_a_scrape(subject.pid, ports[option], page, count)
                    spent[page] = 1000 * cpu
                plan.report("scrapes: rest")
                rest = await _share_at_rest(subject.pid, plan.count(30, 2))
                return _Spent(machine.resident(subject.pid), 100 * rest, spent)
            finally:
                await to_thread.run_sync(subject.stop)


async def _admit(kubelet: SimKubelet) -> None:
    await kubelet.wait_for(lambda: kubelet.allocatable().get(daemon.RESOURCE) == 8 * SHARES)
    for number in range(PODS):
        pod = SimPod.single(f"pod-{number}", {daemon.RESOURCE: 2})
        await kubelet.admit(replace(pod, namespace=f"team-{number % 4}"))


async def _cpu_of_a_scrape(pid: int, port: int, page: str, count: int) -> float:
    """Return the CPU seconds of a scrape, without those of the idle daemon meanwhile."""
    await to_thread.run_sync(_scrape, port, page)
    idle = await _share_at_rest(pid, PERIOD * count)

    began, before = time.monotonic(), machine.cpu_seconds(pid)
    for _ in range(count):
        await anyio.sleep(PERIOD)
        await to_thread.run_sync(_scrape, port, page)
    spent = machine.cpu_seconds(pid) - before - idle * (time.monotonic() - began)
    return spent / count


async def _share_at_rest(pid: int, seconds: float) -> float:
    """Return the share of a core that a daemon uses while nobody asks it."""
    began, before = time.monotonic(), machine.cpu_seconds(pid)
    await anyio.sleep(seconds)
    return (machine.cpu_seconds(pid) - before) / (time.monotonic() - began)


def _scrape(port: int, page: str) -> None:
    """Read a page as Prometheus or a browser does."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", page, headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        body = answer.read()
    if answer.status != http.client.OK or not body:
        raise RuntimeError(f"{page}: {answer.status} {answer.reason}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
