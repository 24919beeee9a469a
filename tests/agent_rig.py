"""The whole agent on a simulated node with a simulated kubelet, in the test's own loop."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import anyio

from metagpu.app import Agent
from metagpu.core.host import Host
from metagpu.core.news import Event
from metagpu.core.snapshot import GpuState, Snapshot
from metagpu.core.tools import Tools
from metagpu.nvml import Nvml
from metagpu.places import Places
from metagpu.plugins.cluster.settings import Settings
from metagpu.plugins.metrics.address import Address
from metagpu.sim.kubelet import SimKubelet
from metagpu.sim.library import Library
from metagpu.sim.node import SimNode
from metagpu.sim.spec import simulated
from metagpu.sim.tools import SimulatedTools, simulated_companions
from metagpu.sources import Source

METAGPU = "cnvrg.io/metagpu"
QUICK = """
version: metagpu/v1
health: {quietPeriod: 100ms, rescanPeriod: 100ms}
pools:
  - name: all
    backends: [{backend: fraction, sharesPerGpu: 10}]
"""


@dataclass
class Scene:
    """An agent at work, and the hardware and kubelet around it."""

    node: SimNode
    kubelet: SimKubelet
    agent: Agent
    config_file: Path

    def state(self, index: int) -> GpuState:
        """Give what the agent knows of a GPU."""
        return list(self.agent.registry.snapshot.gpus.values())[index]

    async def until(self, capacity: int, allocatable: int, resource: str = METAGPU) -> None:
        """Wait until the kubelet counts so."""
        await self.kubelet.wait_for(
            lambda: (
                (
                    self.kubelet.capacity().get(resource, 0),
                    self.kubelet.allocatable().get(resource, 0),
                )
                == (capacity, allocatable)
            ),
            within=30,
        )

    async def settles(self, predicate: Callable[[Snapshot], bool]) -> None:
        """Wait until the agent's registry is so."""
        with anyio.fail_after(30):
            async for snapshot in self.agent.registry.watch(lambda now: now):
                if predicate(snapshot):
                    return

    async def told(self) -> None:
        """Wait until the kubelet has told the holder of every lease."""
        await self.settles(
            lambda now: all(i.holder for gpu in now.gpus.values() for i in gpu.leases.values())
        )

    async def news(self, *kinds: type[Event]) -> Event:
        """Wait for the next news of one of these kinds."""
        with self.agent.registry.news.subscribe(*kinds) as news, anyio.fail_after(30):
            async for fact in news:
                return fact
        raise AssertionError


@asynccontextmanager
async def agent_at_work(
    tmp_path: Path,
    boards: str | SimNode = "a100-40gb:2",
    config: str = QUICK,
    *,
    drivers: bool = True,
    kubelet: SimKubelet | None = None,
    tools: Tools | None = None,
    source: Source | None = None,
    joins: Settings | None = None,
    host: Host | None = None,
    pods: Path | None = None,
    cdi: Path | None = None,
    metrics: Address | None = None,
) -> AsyncIterator[Scene]:
    """Run an agent while the block lasts, and a kubelet with it unless one is given.

    `boards` is a node, or what `--simulate` says of one.
    `drivers=False` starts without NVML; `source` is where the configuration is if not in a file;
    `pods` is the folder that containers see, `cdi` the one of CDI specifications; `metrics` where
    monitoring may ask.
    """
    config_file = tmp_path / "metagpu.yaml"
    await anyio.Path(config_file).write_text(config)
    places = Places(
        kubelet=tmp_path / "device-plugins",
        pod_resources=tmp_path / "pod-resources.sock",
        run=tmp_path,
        dev_root=tmp_path,
        pods=pods,
        cdi=cdi,
    )
    node = simulated(boards) if isinstance(boards, str) else boards
    if not drivers:
        node.fail_driver()
    agent = Agent(
        source or Source((config_file,)),
        Nvml(Library(node)),
        places,
        tools=tools or SimulatedTools(),
        joins=joins,
        companions=simulated_companions(),
        host=host,
        metrics=metrics,
    )
    own = SimKubelet(places.kubelet, pod_resources=places.pod_resources)

    async with (
        nullcontext(kubelet) if kubelet else own.running() as present,
        anyio.create_task_group() as group,
    ):
        for task in agent.tasks:
            group.start_soon(task)
        yield Scene(node, present, agent, config_file)
        group.cancel_scope.cancel()
