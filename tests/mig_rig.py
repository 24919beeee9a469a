"""An agent whose GPUs are cut by MIG as pods ask, on a simulated node with a simulated kubelet."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from metagpu.backends.mig import keeping, ledger, turns
from metagpu.core.model import Made
from metagpu.plugins import podresources
from metagpu.sim.foreign import place_of
from metagpu.sim.kubelet import Pod, SimKubelet
from metagpu.sim.node import SimNode
from metagpu.sim.spec import simulated
from tests.agent_rig import Scene, agent_at_work

PROFILES = "1g.5gb, 1g.5gb+me, 2g.10gb, 3g.20gb, 7g.40gb"


def hurry(monkeypatch: pytest.MonkeyPatch, *, period: float = 0.02) -> None:
    """Have nobody wait for what takes seconds on a real node.

    Args:
        monkeypatch: takes it back.
        period: seconds between two questions to the kubelet.
    """
    monkeypatch.setattr(podresources, "PERIOD", period)
    monkeypatch.setattr(podresources, "SETTLE", 0.01)
    monkeypatch.setattr(turns, "TURN", 0.01)
    for module in (ledger, keeping):
        monkeypatch.setattr(module, "POLL", 0.05)
        monkeypatch.setattr(module, "LOOK", 0.2)
    monkeypatch.setattr(ledger, "GRACE", 0.2)


def configured(options: str = "keepWarm: 100ms", profiles: str = PROFILES) -> str:
    """Write a configuration of one pool of MIG instances that are made on demand."""
    return cut(f"profiles: [{profiles}], {options}")


def cut(options: str) -> str:
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
    gpus: str = "{board: a100-40gb, mig: true}",
    kubelet: SimKubelet | None = None,
    layout: str | None = None,
) -> AsyncIterator[Scene]:
    """Run an agent on a node whose GPUs are as `gpus` says, in the words of a node file.

    With a `layout`, instances are fixed.
    """
    node = await a_node(tmp_path, gpus)
    config = configured(options, profiles) if layout is None else cut(f"layout: {layout}")
    async with agent_at_work(tmp_path, node, config, kubelet=kubelet) as scene:
        await scene.settles(lambda now: bool(now.gpus))
        yield scene


async def a_node(tmp_path: Path, gpus: str) -> SimNode:
    """Make a node from what a node file says of its GPUs."""
    file = tmp_path / "node.yaml"
    await anyio.Path(file).write_text(f"gpus: [{gpus}]\n")
    return simulated(str(file))


def places(node: SimNode, index: int = 0) -> list[str]:
    """List the instances that are really on a GPU."""
    gpu = node.gpus[index]
    with node.changed:
        return sorted(place_of(gpu, instance) for instance in gpu.mig.present.values())


def made(scene: Scene, index: int = 0) -> dict[str, Made]:
    """Give what the agent says that it has made, by profile and slice."""
    stock = scene.state(index).stocks.get("mig")
    return {share.partition("::")[2]: it for share, it in stock.made.items()} if stock else {}


def why(scene: Scene, index: int = 0) -> str:
    """Say why a GPU gives no instances, empty when it does."""
    pause = scene.state(index).suspended.get("mig")
    return pause.reason if pause else ""


def blocked(scene: Scene, index: int = 0) -> set[str]:
    """Say what else than leases is on a GPU."""
    stock = scene.state(index).stocks.get("mig")
    return set(stock.blocked.values()) if stock else set()


def pod(name: str, profile: str = "2g.10gb", count: int = 1) -> Pod:
    """Make a pod that asks for instances."""
    return Pod.single(name, {f"nvidia.com/mig-{profile.replace('+', '.')}": count})


async def until_placed(scene: Scene, *expected: str, index: int = 0) -> None:
    """Wait until exactly these instances are on a GPU."""
    await until(lambda: places(scene.node, index) == sorted(expected))


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for what nothing tells of."""
    with anyio.fail_after(30):
        while not is_so():  # noqa: ASYNC110 - see above
            await anyio.sleep(0.01)
