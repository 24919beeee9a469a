"""A node for the bench of enforcement: simulated GPUs, leases, and processes with containers.

What the kernel says of a process (`stat`, `status`, `cmdline`) is read from the kernel, of a few
real processes that stand for all; their cgroups and the kubelet's links are files of ours.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from metagpu.backends.fraction import FractionBackend
from metagpu.core.config import parse
from metagpu.core.facts import GpusFound, LeasesObserved
from metagpu.core.gpu import Gpu
from metagpu.core.injection import Injection
from metagpu.core.layout import lay_out
from metagpu.core.model import Holder, ShareId
from metagpu.core.registry import Registry
from metagpu.nvml import Nvml
from metagpu.sim.gpu import SimProcess
from metagpu.sim.host import SimHost
from metagpu.sim.library import Library
from metagpu.sim.node import SimNode
from metagpu.sim.spec import simulated

POOL: Final = """\
version: metagpu/v1
pools:
  - name: all
    backends: [{backend: fraction, sharesPerGpu: 100}]
"""


@dataclass
class Ground:
    """The node with its parts.

    Attributes:
        at: the moment of the latest look at leases, which only has to grow.
    """

    folder: Path
    node: SimNode
    nvml: Nvml
    gpus: tuple[Gpu, ...]
    registry: Registry = field(default_factory=Registry)
    holders: dict[ShareId, Holder] = field(default_factory=dict)
    at: float = 0.0

    def __post_init__(self) -> None:
        self.machine = SimHost(self.folder)
        config = parse(POOL, "bench", {"fraction": FractionBackend})
        self.registry.apply(GpusFound(self.gpus, at=0))
        self.registry.apply(lay_out(config, self.gpus, Injection()).offered)

    def hold(self, holder: Holder, gpu: int, first: int, count: int) -> None:
        """Let a container hold shares of a GPU from a number on."""
        shares = self.registry.snapshot.gpus[self.gpus[gpu].id].shares[first : first + count]
        self.holders |= {share.id: holder for share in shares}

    def observe(self) -> None:
        """Tell the registry who holds what."""
        self.at += 1
        self.registry.apply(LeasesObserved(dict(self.holders), at=self.at))

    def use(self, gpu: int, pid: int, memory: int, busy: int = 0) -> None:
        """Let a process have memory of a GPU."""
        self.node.add_process(self.node.gpu(gpu), SimProcess(pid, memory, sm=busy))


@asynccontextmanager
async def ground(folder: Path, boards: str) -> AsyncIterator[Ground]:
    """Open NVML on simulated boards while the block lasts."""
    node = simulated(boards)
    nvml = Nvml(Library(node))
    async with nvml.session():
        yield Ground(folder, node, nvml, (await nvml.survey()).gpus)
