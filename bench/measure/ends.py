"""The daemon's end: by SIGTERM, and by SIGKILL up to the list of the next daemon."""

import random
import signal
import time
from functools import partial
from typing import Final

import anyio
from anyio import to_thread

from bench import daemon, kubelets
from bench.figures import Figure, Samples
from bench.plan import Plan
from metagpu.sim.kubelet.kubelet import SimKubelet
from tests.rigs.nvml_library import NvmlLibrary

_CONFIG: Final = daemon.POOL.format(shares=100)
_WAIT: Final = 1.0
"""Seconds of the daemon's wait for events, which nothing can interrupt."""


def ends(plan: Plan) -> list[Figure]:
    """Measure both ends of a daemon that loads a C library of NVML."""
    ended, listed = anyio.run(_ends, plan)
    name, other = "SIGTERM to the end of the process", "SIGKILL to the next daemon's list"
    return [
        ended.figure(name, target=100),
        ended.worst(f"{name}, worst"),
        listed.figure(other, target=500),
        listed.worst(f"{other}, worst"),
    ]


async def _ends(plan: Plan) -> tuple[Samples, Samples]:
    ended, listed = Samples(), Samples()
    moments = random.Random(1)  # noqa: S311 - no secret

    with daemon.folder() as folder:
        environment = NvmlLibrary(folder / "nvml").environment
        start = partial(
            daemon.start,
            folder,
            config=_CONFIG,
            simulate=None,
            kubelet=False,
            environment={"LD_LIBRARY_PATH": environment["LD_LIBRARY_PATH"]},
        )
        async with kubelets.simulated(folder / "kubelet") as kubelet:
            for number in range(-1, plan.count(30, 3)):
                plan.report(f"ends: {number}")
                with start() as killed:
                    await _listed(kubelet, 2 * number + 3)
                    began = time.perf_counter()
                    killed.end_by(signal.SIGKILL)
                with start() as subject:
                    await _listed(kubelet, 2 * number + 4)
                    took = time.perf_counter() - began
                    await anyio.sleep(_WAIT * (1 + moments.random()))
                    end = await to_thread.run_sync(subject.end_by, signal.SIGTERM)
                if number >= 0:
                    listed.seconds.append(took)
                    ended.seconds.append(end)
    return ended, listed


async def _listed(kubelet: SimKubelet, number: int) -> None:
    """Wait for the first list after a registration."""

    def is_listed() -> bool:
        registered = kubelet.registrations[daemon.RESOURCE] >= number
        return registered and kubelet.lists[daemon.RESOURCE] >= number

    await kubelet.wait_for(is_listed)
