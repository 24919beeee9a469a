"""From a kubelet's or the daemon's start to the registered resources."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import anyio
from anyio import to_thread

from bench import daemon, kubelets, machine
from bench.figures import Figure, Samples
from bench.kubelets import Kubelet, MinimalKubelet, TimedSimKubelet
from bench.plan import Plan
from metagpu.sim.kubelet.kubelet import SimKubelet

_DOWN: Final = 0.1
"""Seconds that a kubelet stays away."""
_CPU_RATIO: Final = 0.6
"""The target: at most this part of the other commit's CPU time."""
_LIBRARIES: Final = """
import gc, os, sys
gc.disable()  # as the daemon does, and structlog without rich
sys.modules["rich"] = None
import structlog
import anyio, asyncinotify, betterproto2, grpclib.client, grpclib.server, msgspec, pynvml, yaml
import anyio._backends._asyncio
os._exit(0)
"""


def restarts(plan: Plan) -> list[Figure]:
    """Measure the registration of four resources at a new kubelet, with both kubelets."""
    figures = []

    # The simulated kubelet's own work, in Python, is most of its time: it has no target.
    for kind, name, targets in (
        (TimedSimKubelet, "simulated kubelet", (None, None)),
        (MinimalKubelet, "minimal kubelet", (10, 25)),
    ):
        samples = anyio.run(_restarts, plan, kind, name)
        row = f"kubelet.sock to 4 registered, {name}"
        figures += [
            samples.figure(row, target=targets[0]),
            samples.tail(f"{row}, p99", target=targets[1]),
            samples.worst(f"{row}, worst"),
        ]
    unlisted = anyio.run(_unlisted, plan)
    row = "kubelet.sock to registered, of a kubelet that died before the list"
    return [*figures, unlisted.figure(row, target=20), unlisted.worst(f"{row}, worst")]


async def _unlisted(plan: Plan) -> Samples:
    """Time the kubelet after one that died between its answer and the list."""
    samples = Samples()
    with daemon.folder() as folder:
        kubelet = MinimalKubelet(folder / "kubelet")
        config = daemon.POOL.format(shares=100)
        with daemon.start(folder, config=config, kubelet=False):
            for number in range(-3, plan.count(100, 5)):
                if number % 50 == 0:
                    plan.report(f"restarts: without a list: {number}")
                kubelet.lists_plugins = False
                async with kubelet.life():
                    await kubelet.registered(1)
                    await anyio.sleep(_DOWN)  # the answer arrives, and the daemon waits for a list
                await anyio.sleep(_DOWN)
                kubelet.lists_plugins = True
                async with kubelet.life():
                    took = await kubelet.registered(1)
                    await kubelet.listed(1)
                if number >= 0:
                    samples.seconds.append(took)
                await anyio.sleep(_DOWN)
    return samples


async def _restarts(plan: Plan, kind: type[Kubelet], name: str) -> Samples:
    samples = Samples()

    with daemon.folder() as folder:
        kubelet = kind(folder / "kubelet")
        with daemon.start(folder, config=daemon.FOUR_POOLS, kubelet=False):
            for number in range(-3, plan.count(300, 5)):
                if number % 50 == 0:
                    plan.report(f"restarts: {name}: {number}")
                async with kubelet.life():
                    took = await kubelet.registered(len(daemon.FOUR))
                    await kubelet.listed(len(daemon.FOUR))
                if number >= 0:
                    samples.seconds.append(took)
                await anyio.sleep(_DOWN)
    return samples


def starts(plan: Plan) -> list[Figure]:
    """Measure wall and CPU time from the daemon's start to its registration."""
    now, before, libraries = anyio.run(_starts, plan)
    name = "process start to registered"
    figures = [
        now.wall.figure(name, unit="s", target=0.5),
        now.cpu.figure(f"{name}, CPU"),
        libraries.figure(f"{name}, CPU of Python and the libraries alone"),
    ]
    if before.cpu.seconds:
        other = f"{name}, CPU, to the commit before"
        figures.append(now.cpu.ratio(other, before.cpu, target=_CPU_RATIO))
    return figures


class _Starts(NamedTuple):
    wall: Samples
    cpu: Samples


async def _starts(plan: Plan) -> tuple[_Starts, _Starts, Samples]:
    """Start this tree's daemon, the other's, and a Python with the libraries alone, in turn."""
    now, before = _Starts(Samples(), Samples()), _Starts(Samples(), Samples())
    libraries = Samples()
    trees = [(daemon.HERE, now), *([(plan.before, before)] if plan.before else [])]

    with daemon.folder() as folder:
        async with kubelets.simulated(folder / "kubelet") as kubelet:
            for number in range(-1, plan.count(30, 3)):
                plan.report(f"starts: {number}")
                for root, samples in trees:
                    wall, cpu = await _start(kubelet, folder, root)
                    if number >= 0:
                        samples.wall.seconds.append(wall)
                        samples.cpu.seconds.append(cpu)
                if number >= 0:
                    libraries.seconds.append(await to_thread.run_sync(_cpu_of_libraries))
    return now, before, libraries


async def _start(kubelet: SimKubelet, folder: Path, root: Path) -> tuple[float, float]:
    """Start the daemon of a source tree; return its wall and CPU time to the registration."""
    wanted = kubelet.registrations[daemon.RESOURCE] + 1
    began = time.perf_counter()
    subject = daemon.start(folder, config=daemon.POOL.format(shares=100), kubelet=False, root=root)
    try:
        await kubelet.wait_for(partial(_registered, kubelet, wanted))
        return time.perf_counter() - began, machine.cpu_seconds_of_tree(subject.pid)
    except TimeoutError as error:
        error.add_note(subject.log_tail)
        raise
    finally:
        await to_thread.run_sync(subject.stop)


def _cpu_of_libraries() -> float:
    """Return the CPU time of a Python that imports the daemon's libraries, and no more."""
    process = subprocess.Popen([sys.executable, "-c", _LIBRARIES])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def _registered(kubelet: SimKubelet, wanted: int) -> bool:
    return kubelet.registrations[daemon.RESOURCE] >= wanted
