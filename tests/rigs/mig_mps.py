"""MPS on the MIG devices of a fixed layout: an agent, a simulated kubelet, control daemons."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from anyio import to_thread

from metagpu.backends.common.mps_daemon.control import MpsDirectories
from metagpu.backends.common.mps_daemon.decisions import MpsDaemonTiming
from metagpu.backends.mig.backend import MigBackend
from metagpu.host.daemons import HostDaemons
from metagpu.sim.kubelet.kubelet import SimKubelet, SimPod
from metagpu.sim.machine.node import SimNode
from tests.rigs.agent import Scene, agent_at_work
from tests.rigs.daemons import DAEMONS, StandIn
from tests.rigs.mig import a_node, hurry, mig_pool

SHARED, TWO = "nvidia.com/mig-1g.5gb.shared", "nvidia.com/mig-2g.10gb"
LAYOUT: Final = "layout: {2g.10gb: 2, 1g.5gb: 3}"
QUARTERS: Final = f"{LAYOUT}, mps: {{replicas: {{1g.5gb: 4}}}}"


def hurry_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timings that last seconds on a real node."""
    hurry(monkeypatch, period=0.05)
    timing = MpsDaemonTiming(
        period=0.1, retry=0.05, deadline=20.0, first_delay=0.05, longest_delay=0.2
    )
    monkeypatch.setattr(MigBackend, "mps_timing", timing)


@asynccontextmanager
async def shared(
    folder: Path,
    options: str = QUARTERS,
    *,
    node: SimNode | None = None,
    kubelet: SimKubelet | None = None,
    daemons: HostDaemons = DAEMONS,
) -> AsyncIterator[Scene]:
    """Share instances through MPS while the block lasts."""
    node = node or await a_node(folder, "{model: a100-40gb, mig: true}")
    pool = mig_pool(options)
    async with agent_at_work(folder, node, pool, kubelet=kubelet, daemons=daemons) as scene:
        await scene.wait_snapshot(lambda now: bool(now.gpus))
        yield scene


async def devices(folder: Path) -> list[str]:
    """List the devices that have folders."""
    return await to_thread.run_sync(
        lambda: sorted(os.listdir(folder / "mps")) if (folder / "mps").exists() else []  # noqa: PTH208
    )


def control(folder: Path, device: str, daemons: HostDaemons = DAEMONS) -> StandIn:
    """Return the control daemon's client of a device."""
    return StandIn(MpsDirectories.for_device(str(folder), device), device, daemons)


def pod(name: str, count: int = 1) -> SimPod:
    """Build a pod that asks for parts of instances."""
    return SimPod.single(name, {SHARED: count})
