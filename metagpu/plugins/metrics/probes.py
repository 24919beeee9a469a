"""The kubelet's probes: liveness and readiness of the daemon."""

from collections.abc import Mapping
from typing import Final

import anyio

from metagpu.core.model.offers import Api
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.schema.daemon import DraReport
from metagpu.core.state.call_stats import KubeletCallStats

PERIOD: Final = 1.0
"""Seconds between two measurements of the event loop."""


class LoopLagProbe:
    """Measures the delay of the event loop.

    Attributes:
        lag: the last delay, in seconds.
    """

    def __init__(self) -> None:
        self.lag = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = anyio.current_time() + PERIOD
            await anyio.sleep(PERIOD)
            self.lag = max(0.0, anyio.current_time() - due)


def liveness_problems(lag: float, ended: Mapping[str, str], late: float) -> list[str]:
    """Return the problems that only a restart fixes.

    A kubelet or an NVML that does not answer is none of them.

    Args:
        lag: the delay of the event loop, in seconds.
        ended: why main tasks have ended, by task.
        late: the delay that is a problem, in seconds.
    """
    found = [f"the main task {task} has ended: {why}" for task, why in ended.items()]
    if lag > late:
        found.append(f"the event loop was {lag:.1f} s late")
    return found


def readiness_problems(
    snapshot: Snapshot, kubelet: KubeletCallStats, claims: DraReport | None = None
) -> list[str]:
    """Return the resources that the kubelet lacks, and the DRA driver likewise.

    The report of the DRA driver is `None` while it does not run.
    """
    if not snapshot.offers:
        return ["no resource is offered yet"]

    found = []
    for resource in snapshot.offers_of(Api.DEVICE_PLUGIN):
        if (other := snapshot.competing_plugins.get(resource)) is not None:
            found.append(f"{resource} is served by another device plugin on {other}")
        elif not kubelet.of_resource(resource).listed:
            found.append(f"{resource} is not registered with the kubelet")
        elif problem := snapshot.registration_problems.get(resource):
            found.append(f"{resource}: {problem}")
    if snapshot.offers_of(Api.DRA):
        found += _driver_problems(claims)
    return found


def _driver_problems(claims: DraReport | None) -> list[str]:
    if claims is None:
        return ["the DRA driver does not run yet"]
    if claims.registered:
        return []
    why = f": {claims.problem}" if claims.problem else ""
    return [f"the DRA driver {claims.driver} is not registered with the kubelet{why}"]
