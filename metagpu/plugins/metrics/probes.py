"""Whether the daemon lives, and whether it has done what it is there for: the kubelet's probes."""

from collections.abc import Sequence
from typing import Final

import anyio

from metagpu.core.snapshot import Snapshot
from metagpu.plugins.record import KubeletRecord

PERIOD: Final = 1.0
LATE: Final = 5.0
"""Seconds: how often the event loop is measured, and how late it is when nobody is served well."""


class Pulse:
    """Measures the event loop.

    Attributes:
        lag: seconds by which it was late last.
    """

    def __init__(self) -> None:
        self.lag = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = anyio.current_time() + PERIOD
            await anyio.sleep(PERIOD)
            self.lag = max(0.0, anyio.current_time() - due)


def ills(lag: float, ended: Sequence[str]) -> list[str]:
    """Say what only a restart would mend; a kubelet or NVML that is away is no such thing."""
    found = [f"a part of metagpu has ended: {part}" for part in ended]
    if lag > LATE:
        found.append(f"the event loop was {lag:.1f} s late")
    return found


def lacks(snapshot: Snapshot, kubelet: KubeletRecord) -> list[str]:
    """Say which resources the kubelet does not have from us."""
    if not snapshot.offers:
        return ["nothing is on offer yet"]

    found = []
    for resource in snapshot.offers:
        if (rival := snapshot.rivals.get(resource)) is not None:
            found.append(f"{resource} is served by another device plugin on {rival}")
        elif not kubelet.of(resource).listed:
            found.append(f"{resource} is not registered with the kubelet")
    return found
