"""CPU time of a scrape, and the memory of the metrics."""

import http.client
import socket
import time
from contextlib import closing
from typing import Final

import anyio
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
PAGES: Final = ("/metrics", "/dcgm")


def scrapes(plan: Plan) -> list[Figure]:
    """Measure scrapes of a node of 8 GPUs and 40 pods."""
    return anyio.run(_scrapes, plan)


async def _scrapes(plan: Plan) -> list[Figure]:
    count = plan.count(20, 2)
    plain, _ = await _measure(plan, 0)
    resident, spent = await _measure(plan, count)
    name = f"8 GPUs, {PODS} pods"
    cpu = [
        Figure(
            name=f"CPU of {page}, {name}",
            unit="ms",
            measured=1000 * spent[page],
            target=target,
            calls=count,
        )
        for page, target in zip(PAGES, (20, None), strict=True)
    ]
    memory = Figure(
        name=f"memory of the metrics, after {2 * count} scrapes",
        unit="MB",
        measured=resident - plain,
        target=15,
        calls=2 * count,
    )
    return [*cpu, memory]


async def _measure(plan: Plan, count: int) -> tuple[float, dict[str, float]]:
    """Return the daemon's memory, and the CPU seconds of a scrape by its page."""
    port = _free_port()
    with daemon.folder() as folder:
        asked = folder / "pod-resources.sock"
        async with kubelets.simulated(folder / "kubelet", pod_resources=asked) as kubelet:
            subject = daemon.start(
                folder,
                config=daemon.POOL.format(shares=SHARES),
                pod_resources=asked,
                kubelet=False,
                further={"--metrics": f"127.0.0.1:{port}"} if count else None,
            )
            try:
                await _admit(kubelet)
                await anyio.sleep(SETTLE)
                spent = {}
                for page in PAGES if count else ():
                    plan.report(f"scrapes: {count} of {page}")
                    spent[page] = await _cpu_of_a_scrape(subject.pid, port, page, count)
                return machine.resident(subject.pid), spent
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
    began, before = time.monotonic(), machine.cpu_seconds(pid)
    await anyio.sleep(PERIOD * count)
    idle = (machine.cpu_seconds(pid) - before) / (time.monotonic() - began)

    began, before = time.monotonic(), machine.cpu_seconds(pid)
    for _ in range(count):
        await anyio.sleep(PERIOD)
        await to_thread.run_sync(_scrape, port, page)
    spent = machine.cpu_seconds(pid) - before - idle * (time.monotonic() - began)
    return spent / count


def _scrape(port: int, page: str) -> None:
    """Read a page as Prometheus does."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", page, headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        body = answer.read()
    if answer.status != http.client.OK or not body:
        raise RuntimeError(f"{page}: {answer.status} {answer.reason}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
