"""GPUs in backends' hands: a layout kept on a simulated node, without a kubelet."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from metagpu.core.companions import Companions
from metagpu.core.facts import GpusFound, SharesGranted, SharesReleased
from metagpu.core.gpu import Gpu
from metagpu.core.injection import Injection
from metagpu.core.keeper import Keeper
from metagpu.core.layout import Layout
from metagpu.core.model import Share
from metagpu.core.registry import Registry
from metagpu.core.snapshot import GpuState
from metagpu.core.tools import Tools
from metagpu.nvml import Nvml
from metagpu.sim.library import Library
from metagpu.sim.node import SimNode
from metagpu.sim.spec import simulated
from metagpu.sim.tools import simulated_companions
from tests.build import laid_out
from tests.recorded_tools import RecordedTools


@dataclass(frozen=True)
class Care:
    """Backends at work on the GPUs of a simulated node.

    Attributes:
        gpus: those that NVML told.
    """

    node: SimNode
    registry: Registry
    keeper: Keeper
    gpus: tuple[Gpu, ...]
    injection: Injection

    def keep(self, text: str) -> Layout:
        """Let another configuration be in force."""
        layout = laid_out(*self.gpus, text=text, injection=self.injection)
        self.keeper.keep(layout)
        return layout

    def state(self, index: int = 0) -> GpuState:
        """Give what is known of a GPU."""
        return self.registry.snapshot.gpus[self.gpus[index].id]

    def share(self, backend: str, number: int = 0, index: int = 0) -> Share:
        """Give one of the shares that a backend offers of a GPU."""
        return [it for it in self.state(index).shares if it.backend == backend][number]

    def grant(self, *shares: Share) -> None:
        """Grant shares."""
        self.registry.apply(SharesGranted(shares, at=anyio.current_time()))

    def release(self, *shares: Share) -> None:
        """Let leases end."""
        self.registry.apply(SharesReleased(shares, at=anyio.current_time()))

    async def settled(self) -> None:
        """Let every task do what it can; calls of NVML are in threads and may be out."""
        await anyio.wait_all_tasks_blocked()


@asynccontextmanager
async def in_care(
    text: str,
    *,
    boards: str = "a100-40gb:2",
    tools: Tools | None = None,
    injection: Injection | None = None,
    companions: Companions | None = None,
    node: SimNode | None = None,
    enabled: bool = False,
) -> AsyncIterator[Care]:
    """Keep a configuration on a simulated node while the block lasts, NVML open.

    `enabled` is whether MIG mode is on.
    """
    node, registry = node or simulated(boards), Registry()
    for it in node.gpus:
        it.mig.enabled = it.mig.pending = enabled
    driver = Nvml(Library(node))

    async with driver.session():
        gpus = (await driver.survey()).gpus
        registry.apply(GpusFound(gpus, at=0))
        beside = companions or simulated_companions()
        keeper = Keeper(registry, driver, tools or RecordedTools(), beside)
        care = Care(node, registry, keeper, gpus, injection or Injection())
        care.keep(text)

        async with anyio.create_task_group() as group:
            group.start_soon(keeper.run)
            await care.settled()
            yield care
            group.cancel_scope.cancel()
