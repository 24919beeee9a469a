"""From a kubelet's or the daemon's start to the registered resources."""

import time
from functools import partial
from typing import Final

import anyio
from anyio import to_thread

from bench import daemon, kubelets
from bench.figures import Figure, Samples
from bench.kubelets import Kubelet, MinimalKubelet, TimedSimKubelet
from bench.plan import Plan
from metagpu.sim.kubelet.kubelet import SimKubelet

_DOWN: Final = 0.1
"""Seconds that a kubelet stays away."""


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
    return figures


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
    """Measure the time from the daemon's start to its registration."""
    samples = anyio.run(_starts, plan)
    return [samples.figure("process start to registered", unit="s", target=0.5)]


async def _starts(plan: Plan) -> Samples:
    samples = Samples()

    with daemon.folder() as folder:
        async with kubelets.simulated(folder / "kubelet") as kubelet:
            for number in range(-1, plan.count(30, 3)):
                plan.report(f"starts: {number}")
                wanted = kubelet.registrations[daemon.RESOURCE] + 1
                began = time.perf_counter()
                subject = daemon.start(folder, config=daemon.POOL.format(shares=100), kubelet=False)
                try:
                    await kubelet.wait_for(partial(_registered, kubelet, wanted))
                    took = time.perf_counter() - began
                except TimeoutError as error:
                    error.add_note(subject.log_tail)
                    raise
                finally:
                    await to_thread.run_sync(subject.stop)
                if number >= 0:
                    samples.seconds.append(took)
    return samples


def _registered(kubelet: SimKubelet, wanted: int) -> bool:
    return kubelet.registrations[daemon.RESOURCE] >= wanted
