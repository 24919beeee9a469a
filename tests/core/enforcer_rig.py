"""An enforcer on simulated GPUs, and a machine of real processes."""

import signal
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
from anyio.abc import Process

from metagpu.core.backend import Guard
from metagpu.core.census import Census
from metagpu.core.enforcement import Enforcement, Policy
from metagpu.core.enforcer import Enforcer
from metagpu.core.facts import GpusFound, LeasesObserved
from metagpu.core.gpu import MIB, Gpu
from metagpu.core.host import Identity
from metagpu.core.model import Holder, ShareId
from metagpu.core.registry import Registry
from metagpu.core.units import Duration
from metagpu.host import LinuxHost
from metagpu.nvml import Nvml
from metagpu.sim.gpu import SimProcess
from metagpu.sim.host import SimHost
from metagpu.sim.node import SimNode
from tests.build import laid_out, pool
from tests.nvml.rig import opened
from tests.waiting import becomes

SOON: Final = Duration(0.02)
ALICE, BOB = Holder("default", "alice", "main"), Holder("default", "bob", "main")

PERCENT: Final = 40960 * MIB // 100
LIMIT_OF_25: Final = 10085 + 512
"""MiB: a quarter of the 40340 that programs can have of such a GPU, and the headroom."""


def terms(policy: Policy = Policy.KILL, *, dry_run: bool = False) -> Enforcement:
    """Make settings that lose no time."""
    return Enforcement(policy=policy, period=SOON, grace=SOON, stop_timeout=SOON, dry_run=dry_run)


class Watched:
    """A host that says how often it was asked, and lets a test act just before a signal."""

    def __init__(self, host: LinuxHost) -> None:
        self._host = host
        self.looks = 0
        self.refused: list[Identity] = []
        self.before: Callable[[Identity], Any] = lambda _: None
        self.describe, self.holders, self.peer = host.describe, host.holders, host.peer
        self.homes = host.homes
        self.advice: tuple[str, ...] = ()

    async def hints(self) -> tuple[str, ...]:
        """Give what the test put there."""
        return self.advice

    async def identify(self, pids: Collection[int]) -> Mapping[int, Identity]:
        """Count a look."""
        self.looks += 1
        return await self._host.identify(pids)

    async def signal(self, who: Identity, signal: signal.Signals) -> bool:
        """Do what the test wants first, and note whom the host would not signal."""
        acting = self.before(who)
        if acting is not None:
            await acting
        if done := await self._host.signal(who, signal):
            return done
        self.refused.append(who)
        return False


class Ground:
    """An enforcer on a node of two simulated A100s, and a machine of real processes.

    Attributes:
        terms: what its pool says; may be replaced.
    """

    def __init__(self, node: SimNode, nvml: Nvml, gpus: Sequence[Gpu], machine: SimHost) -> None:
        self.node, self.gpus, self.machine = node, gpus, machine
        self.host = Watched(machine.host)
        self.terms = terms()
        self.registry = Registry()
        self.registry.apply(GpusFound(tuple(gpus), at=0))
        self.registry.apply(laid_out(*gpus, text=pool("sharesPerGpu: 100")).offered)
        self._holders: dict[ShareId, Holder] = {}
        self.enforcer = Enforcer(
            Census(nvml, self.host, self.registry),
            self.host,
            self.registry,
            lambda _: self.terms,
            {"fraction": Guard.ENFORCER, "whole": Guard.ALONE},
        )

    def hold(self, holder: Holder, shares: int, gpu: int = 0) -> None:
        """Let a container hold so many shares of a GPU."""
        free = [
            share.id
            for share in self.registry.snapshot.gpus[self.gpus[gpu].id].shares
            if share.id not in self._holders
        ]
        self._holders |= dict.fromkeys(free[:shares], holder)
        self.registry.apply(LeasesObserved(self._holders, at=len(self._holders)))

    def put(
        self, process: Process, percent: int | None, *, gpu: int = 0, of: Holder | None = ALICE
    ) -> None:
        """Let a real process have so much of a GPU, in a container or in none."""
        if of is None:
            self.machine.show(process.pid, "0::/system.slice/x.service\n")
        else:
            self.machine.house(process.pid, of)
        memory = None if percent is None else percent * PERCENT
        self.node.add_process(self.node.gpu(gpu), SimProcess(process.pid, memory))

    async def looked(self, times: int = 5) -> None:
        """Wait until the enforcer has looked so often from now on."""
        wanted = self.host.looks + times
        await becomes(lambda: self.host.looks >= wanted)


@asynccontextmanager
async def ground(tmp_path: Path, settings: Enforcement | None = None) -> AsyncIterator[Ground]:
    """Run an enforcer while the block lasts."""
    async with opened("a100-40gb:2") as (node, nvml, survey), anyio.create_task_group() as group:
        it = Ground(node, nvml, survey.gpus, SimHost(tmp_path))
        it.terms = settings or it.terms
        group.start_soon(it.enforcer.run)
        yield it
        group.cancel_scope.cancel()
