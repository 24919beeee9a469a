"""An agent with MIG instances on demand, on a simulated node with a simulated kubelet."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from metagpu.backends.mig.backend import MigBackend
from metagpu.backends.mig.inventory import MigTiming
from metagpu.core.model.shares import HardwareDevice
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.sim.kubelet.kubelet import SimKubelet, SimPod
from metagpu.sim.machine.foreign_instances import placement_name
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node
from tests.rigs import agent
from tests.rigs.agent import Scene, agent_at_work

PROFILES = "1g.5gb, 1g.5gb+me, 2g.10gb, 3g.20gb, 7g.40gb"


def hurry(monkeypatch: pytest.MonkeyPatch, *, period: float = 0.02) -> None:
    """Shorten the timings that last seconds on a real node.

    Args:
        monkeypatch: restores them.
        period: seconds between two queries to the kubelet.
    """
    kubelet = KubeletTiming(poll_period=period, contended_period=0.05, settle=0.01)
    monkeypatch.setattr(agent, "TIMING", kubelet)
    timing = MigTiming(scan=0.2, poll=0.05, grace=0.2, stagger=0.01)
    monkeypatch.setattr(MigBackend, "timing", timing)


def on_demand_pool(options: str = "keepWarm: 100ms", profiles: str = PROFILES) -> str:
    """Write a configuration of one pool of MIG instances that are created on demand."""
    return mig_pool(f"profiles: [{profiles}], {options}")


def mig_pool(options: str) -> str:
    """Write a configuration of one pool of MIG instances."""
    return (
        "version: metagpu/v1\n"
        "health: {quietPeriod: 100ms, rescanPeriod: 100ms}\n"
        "pools:\n"
        "  - name: mig\n"
        f"    backends: [{{backend: mig, {options}}}]\n"
    )


@asynccontextmanager
async def mig_at_work(
    tmp_path: Path,
    *,
    options: str = "keepWarm: 100ms",
    profiles: str = PROFILES,
    gpus: str = "{model: a100-40gb, mig: true}",
    kubelet: SimKubelet | None = None,
    layout: str | None = None,
) -> AsyncIterator[Scene]:
    """Run an agent on a node whose GPUs are described by `gpus`, as in a node file.

    With a `layout`, instances are fixed.
    """
    node = await a_node(tmp_path, gpus)
    config = on_demand_pool(options, profiles) if layout is None else mig_pool(f"layout: {layout}")
    async with agent_at_work(tmp_path, node, config, kubelet=kubelet) as scene:
        await scene.wait_snapshot(lambda now: bool(now.gpus))
        yield scene


async def a_node(tmp_path: Path, gpus: str) -> SimNode:
    """Build a node from a node file's text about its GPUs."""
    file = tmp_path / "node.yaml"
    await anyio.Path(file).write_text(f"gpus: [{gpus}]\n")
    return build_node(str(file))


def placements(node: SimNode, index: int = 0) -> list[str]:
    """List the instances that are on a GPU of the simulated node."""
    gpu = node.gpus[index]
    with node.changed:
        return sorted(placement_name(gpu, instance) for instance in gpu.mig.instances.values())


def created(scene: Scene, index: int = 0) -> dict[str, HardwareDevice]:
    """Return the instances that the agent reports as created, by profile and slice."""
    provisioned_state = scene.state(index).provisioned.get("mig")
    return (
        {share.partition("::")[2]: device for share, device in provisioned_state.devices.items()}
        if provisioned_state
        else {}
    )


def blocker(scene: Scene, index: int = 0) -> str:
    """Return the reason why a GPU gives no instances; empty when it gives instances."""
    pause = scene.state(index).suspended.get("mig")
    return pause.reason if pause else ""


def blocked(scene: Scene, index: int = 0) -> set[str]:
    """Return the processes and instances on a GPU that belong to no lease."""
    provisioned_state = scene.state(index).provisioned.get("mig")
    return set(provisioned_state.blocked.values()) if provisioned_state else set()


def pod(name: str, profile: str = "2g.10gb", count: int = 1) -> SimPod:
    """Build a pod that asks for instances."""
    return SimPod.single(name, {f"nvidia.com/mig-{profile.replace('+', '.')}": count})


async def until_placed(scene: Scene, *expected: str, index: int = 0) -> None:
    """Wait until exactly these instances are on a GPU."""
    await until(lambda: placements(scene.node, index) == sorted(expected))


async def until(is_so: Callable[[], bool]) -> None:
    """Poll until a condition holds that has no event."""
    with anyio.fail_after(30):
        while not is_so():  # noqa: ASYNC110 - see above
            await anyio.sleep(0.01)
