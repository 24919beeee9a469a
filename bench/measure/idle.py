"""CPU time of the idle daemon."""

import time
from typing import Final

import anyio
from anyio import to_thread

from bench import daemon, kubelets, machine
from bench.figures import Figure
from bench.measure.before import LEASED, leased_at_rest
from bench.plan import Plan

SETTLE: Final = 3.0


def idle(plan: Plan) -> list[Figure]:
    """Measure the CPU time while a kubelet is connected and no pod comes.

    With `--before`, the group of that name measures leased shares beside the other commit's.
    """
    figures = [anyio.run(_idle, plan)]
    if plan.before is None:
        [leased] = leased_at_rest(plan, (daemon.HERE,))
        figures.append(leased.figure(LEASED, target=3))
    return figures


async def _idle(plan: Plan) -> Figure:
    seconds = plan.count(30, 3)

    with daemon.folder() as folder:
        asked = folder / "pod-resources.sock"
        async with kubelets.simulated(folder / "kubelet", pod_resources=asked) as kubelet:
            subject = daemon.start(
                folder,
                config=daemon.POOL.format(shares=100),
                pod_resources=asked,
                kubelet=False,
            )
            try:
                await kubelet.wait_for(lambda: kubelet.lists[daemon.RESOURCE] > 0)
                await anyio.sleep(SETTLE)
                plan.report(f"idle: {seconds} s")
                began, before = time.monotonic(), machine.cpu_seconds(subject.pid)
                await anyio.sleep(seconds)
                spent = machine.cpu_seconds(subject.pid) - before
                share = spent / (time.monotonic() - began)
            finally:
                await to_thread.run_sync(subject.stop)

    return Figure(
        name=f"CPU at rest, {seconds} s", unit="%", measured=100 * share, target=0.5, calls=1
    )
