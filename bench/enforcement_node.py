"""A node for the bench of enforcement: simulated GPUs, leases, and containers.

The kernel's data on processes (`stat`, `status`, `cmdline`) is read from the kernel, of a few real
processes that stand for all; their cgroups and the kubelet's links are simulated files.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from metagpu.backends.fraction.backend import FractionBackend
from metagpu.core.config.config import parse
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import build_layout
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import Holder, ShareId
from metagpu.core.state.facts import GpusFound, LeasesObserved
from metagpu.core.state.registry import Registry
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.containers import SimHost
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary

POOL: Final = """\
version: metagpu/v1
pools:
  - name: all
    backends: [{backend: fraction, sharesPerGpu: 100}]
"""


@dataclass
class EnforcementNode:
    """The node with its parts.

    Attributes:
        at: the time of the latest observation of leases, which only has to grow.
    """

    folder: Path
    node: SimNode
    nvml: NvmlDriver
    gpus: tuple[Gpu, ...]
    registry: Registry = field(default_factory=Registry)
    holders: dict[ShareId, Holder] = field(default_factory=dict)
    at: float = 0.0

    def __post_init__(self) -> None:
        self.machine = SimHost(self.folder)
        config = parse(POOL, "bench", {"fraction": FractionBackend})
        self.registry.apply(GpusFound(self.gpus, at=0))
        self.registry.apply(build_layout(config, self.gpus, Injection()).offer_fact)

    def hold(self, holder: Holder, gpu: int, first: int, count: int) -> None:
        """Assign consecutive shares of a GPU to a container."""
        shares = self.registry.snapshot.gpus[self.gpus[gpu].id].shares[first : first + count]
        self.holders |= {share.id: holder for share in shares}

    def observe(self) -> None:
        """Report all holders to the registry."""
        self.at += 1
        self.registry.apply(LeasesObserved(dict(self.holders), at=self.at))

    def use(self, gpu: int, pid: int, memory: int, busy: int = 0) -> None:
        """Set the memory that a process uses on a GPU."""
        self.node.start_process(self.node.gpu(gpu), SimProcess(pid, memory, sm=busy))


@asynccontextmanager
async def simulated_node(folder: Path, gpus: str) -> AsyncIterator[EnforcementNode]:
    """Open NVML on simulated GPUs until the block ends."""
    node = build_node(gpus)
    nvml = NvmlDriver(SimLibrary(node))
    async with nvml.session():
        yield EnforcementNode(folder, node, nvml, (await nvml.survey()).gpus)
