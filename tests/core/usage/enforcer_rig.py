"""An enforcer on simulated GPUs, and real processes of this machine."""

import signal
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
from anyio.abc import Process

from metagpu.core.config.memory import EnforcementPolicy, MemoryEnforcement
from metagpu.core.config.units import Duration
from metagpu.core.contracts.capabilities import guard_of
from metagpu.core.contracts.host import ProcessIdentity
from metagpu.core.model.gpu import MIB, Gpu
from metagpu.core.model.shares import Holder, ShareId
from metagpu.core.state.facts import GpusFound, LeasesObserved
from metagpu.core.state.registry import Registry
from metagpu.core.usage.collector import UsageCollector
from metagpu.core.usage.enforcer import Enforcer
from metagpu.host.linux import LinuxHost
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.containers import SimHost
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.node import SimNode
from tests.nvml.rig import opened
from tests.rigs.build import BACKENDS, layout_of, pool
from tests.rigs.waiting import becomes

SOON: Final = Duration(0.02)
LONG: Final = Duration(60)
ALICE, BOB = Holder("default", "alice", "main"), Holder("default", "bob", "main")

PERCENT: Final = 40960 * MIB // 100
LIMIT_OF_25: Final = 10085 + 512
"""MiB: a quarter of the 40340 that programs can have of such a GPU, and the headroom."""


def terms(
    policy: EnforcementPolicy = EnforcementPolicy.KILL,
    *,
    stop_timeout: Duration = LONG,
    dry_run: bool = False,
) -> MemoryEnforcement:
    """Create memory enforcement settings without delays, but for the next signal."""
    return MemoryEnforcement(
        policy=policy, period=SOON, grace=SOON, stop_timeout=stop_timeout, dry_run=dry_run
    )


class Watched:
    """A host that counts its calls and lets a test act just before a signal."""

    def __init__(self, host: LinuxHost) -> None:
        self._host = host
        self.looks = 0
        self.refused: list[ProcessIdentity] = []
        self.before: Callable[[ProcessIdentity], Any] = lambda _: None
        self.describe, self.holders, self.peer = host.describe, host.holders, host.peer
        self.cgroups, self.clock, self.starting = host.cgroups, host.clock, host.starting
        self.pods = host.pods
        self.advice: tuple[str, ...] = ()

    async def hints(self) -> tuple[str, ...]:
        """Return the hints of the test."""
        return self.advice

    async def identify(self, pids: Collection[int]) -> Mapping[int, ProcessIdentity]:
        """Count a check."""
        self.looks += 1
        return await self._host.identify(pids)

    async def signal(self, who: ProcessIdentity, signal: signal.Signals) -> bool:
        """Call the test's function first, and record processes that the host would not signal."""
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

    def __init__(
        self, node: SimNode, nvml: NvmlDriver, gpus: Sequence[Gpu], machine: SimHost
    ) -> None:
        self.node, self.gpus, self.machine = node, gpus, machine
        self.host = Watched(machine.host)
        self.terms = terms()
        self.registry = Registry()
        self.registry.apply(GpusFound(tuple(gpus), at=0))
        self.registry.apply(layout_of(*gpus, text=pool("sharesPerGpu: 100")).offer_fact)
        self._holders: dict[ShareId, Holder] = {}
        self.enforcer = Enforcer(
            UsageCollector(nvml, self.host, self.registry),
            self.host,
            self.registry,
            lambda _: self.terms,
            {name: guard_of(kind) for name, kind in BACKENDS.items()},
        )

    def hold(self, holder: Holder, shares: int, gpu: int = 0) -> None:
        """Add a container with leases on so many shares of a GPU."""
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
        """Put a real process on a GPU, in a container or in none."""
        self.put_pid(process.pid, percent, gpu=gpu, of=of)

    def put_pid(
        self, pid: int, percent: int | None, *, gpu: int = 0, of: Holder | None = ALICE
    ) -> None:
        """Put the process of a pid on a GPU, in a container or in none."""
        if of is None:
            self.machine.add_process(pid, "0::/system.slice/x.service\n")
        else:
            self.machine.add_container_process(pid, of)
        memory = None if percent is None else percent * PERCENT
        self.node.start_process(self.node.gpu(gpu), SimProcess(pid, memory))

    async def looked(self, times: int = 5) -> None:
        """Wait until the enforcer has checked this many times from now on."""
        wanted = self.host.looks + times
        await becomes(lambda: self.host.looks >= wanted)


@asynccontextmanager
async def ground(
    tmp_path: Path, settings: MemoryEnforcement | None = None
) -> AsyncIterator[Ground]:
    """Run an enforcer while the block lasts."""
    async with opened("a100-40gb:2") as (node, nvml, survey), anyio.create_task_group() as group:
        live_ground = Ground(node, nvml, survey.gpus, SimHost(tmp_path))
        live_ground.terms = settings or live_ground.terms
        group.start_soon(live_ground.enforcer.run)
        yield live_ground
        group.cancel_scope.cancel()
