"""A simulated node with running backends and no kubelet; GPUs and shares of tests."""

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final
from uuid import UUID

import anyio

from metagpu.core.config.config import parse
from metagpu.core.contracts.backend import Backend
from metagpu.core.contracts.host import HostProcesses
from metagpu.core.contracts.programs import Daemons, Programs
from metagpu.core.errors import ProgramError
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.backend_runner import RESTARTS, BackendRunner, find_left
from metagpu.core.layout.layout import Layout, build_layout
from metagpu.core.model.gpu import MIB, Connection, Gpu, GpuId, Topology
from metagpu.core.model.shares import ResourceName, Share, ShareId
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.runtime.tasks import RestartTiming
from metagpu.core.state.facts import (
    EarlierLeases,
    Fact,
    GpusFound,
    LeasesObserved,
    SharesClaimed,
    SharesOffered,
    SharesReleased,
)
from metagpu.core.state.reduce import reduce
from metagpu.core.state.registry import Registry
from metagpu.host.linux import LinuxHost
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.programs import sim_daemons
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary

NVML_DEADLINE: Final = 30.0
"""Seconds for a call of NVML: a busy machine must not fail a test."""


def gpu(
    index: int,
    *,
    memory_mib: int = 40960,
    name: str = "NVIDIA A100-SXM4-40GB",
    numa_node: int | None = None,
    minor: int | None = -1,
) -> Gpu:
    """Return a GPU, an A100 by default; uuid and device node follow from the index."""
    return Gpu(
        id=GpuId(f"GPU-{UUID(int=index)}"),
        index=index,
        name=name,
        memory=memory_mib * MIB,
        minor=index if minor == -1 else minor,
        pci_bus_id=f"0000:{index:02x}:00.0",
        numa_node=numa_node,
    )


def topology(gpus: Sequence[Gpu], connect: Callable[[Gpu, Gpu], Connection]) -> Topology:
    """Return the topology in which `connect` gives the connection of every two GPUs."""
    return Topology({frozenset((a.id, b.id)): connect(a, b) for a, b in combinations(gpus, 2)})


def share(
    of: Gpu,
    number: int,
    *,
    backend: str = "fraction",
    slots: Iterable[str] | None = None,
    resource: str = "cnvrg.io/metagpu",
    memory_mib: int = 4096,
) -> Share:
    """Return a share of a GPU; its slot is its own unless `slots` names others."""
    slot = f"{backend[:1]}{number:02d}"
    return Share(
        id=ShareId(f"{of.id}::{slot}"),
        gpu=of.id,
        resource=ResourceName(resource),
        backend=backend,
        number=number,
        footprint=frozenset([slot] if slots is None else slots),
        memory=memory_mib * MIB,
    )


def offer(*shares: Share) -> SharesOffered:
    """Return the fact that these shares, and the resources they name, are on offer."""
    return SharesOffered(tuple(dict.fromkeys(share.resource for share in shares)), shares)


def snapshot_after(*facts: Fact, since: Snapshot | None = None) -> Snapshot:
    """Return the snapshot after some facts."""
    snapshot = since or Snapshot()
    for fact in facts:
        snapshot, _ = reduce(snapshot, fact)
    return snapshot


def one_pool(backend: str, options: Mapping[str, Any] | None = None) -> str:
    """Return a configuration with all GPUs in one pool of one backend, as text.

    Args:
        backend: the backend's name.
        options: the other keys of the backend's entry, as the configuration spells them.
    """
    entry = json.dumps({"backend": backend, **(options or {})})  # JSON is YAML
    return f"version: metagpu/v1\npools:\n  - name: all\n    backends:\n      - {entry}\n"


@dataclass
class RecordedPrograms:
    """Host programs that are recorded instead of run.

    Attributes:
        calls: the commands so far, as one would type them.
        refusal: the error of each command, if given.
        refuses: the number of commands that fail with `refusal`; all unless given.
        hold: whether commands do not return from now on; they are recorded all the same.
    """

    calls: list[str] = field(default_factory=list)
    refusal: ProgramError | None = None
    refuses: int | None = None
    hold: bool = False
    _more: anyio.Event = field(default_factory=anyio.Event)

    async def run(self, program: str, *arguments: str) -> str:
        """Record a command.

        Raises:
            ProgramError: as the test says.
        """
        self.calls.append(" ".join([program, *arguments]))
        self._more.set()
        self._more = anyio.Event()
        if self.hold:
            await anyio.sleep_forever()
        if self.refusal is not None and (self.refuses is None or len(self.calls) <= self.refuses):
            raise self.refusal
        return ""

    async def until(self, count: int) -> None:
        """Wait until `count` commands were recorded.

        Raises:
            TimeoutError: after 30 s.
        """
        with anyio.fail_after(30):
            while len(self.calls) < count:
                await self._more.wait()


@dataclass(frozen=True)
class BackendRig:
    """A simulated node whose GPUs are in the hands of backends.

    Attributes:
        node: the simulated machine; its GPUs can fail, be removed, and have processes.
        registry: the state; `registry.snapshot` is the present one.
        runner: runs the backends that manage their GPUs.
        gpus: the GPUs as NVML reports them.
        injection: the node's way of giving GPUs to containers.
        backends: the backends that configurations may name.
    """

    node: SimNode
    registry: Registry
    runner: BackendRunner
    gpus: tuple[Gpu, ...]
    injection: Injection
    backends: Mapping[str, type[Backend]]

    def apply(self, text: str) -> Layout:
        """Apply another configuration.

        Raises:
            ConfigError: if the configuration is wrong.
        """
        layout = build_layout(parse(text, "test.yaml", self.backends), self.gpus, self.injection)
        self.runner.apply(layout)
        return layout

    def state(self, index: int = 0) -> GpuState:
        """Return the state of a GPU."""
        return self.registry.snapshot.gpus[self.gpus[index].id]

    def share(self, backend: str, number: int = 0, index: int = 0) -> Share:
        """Return one of the shares that a backend offers of a GPU."""
        return [
            candidate for candidate in self.state(index).shares if candidate.backend == backend
        ][number]

    def claim(self, *shares: Share) -> None:
        """Claim shares, as Allocate does."""
        self.registry.apply(SharesClaimed(shares, at=anyio.current_time()))

    def release(self, *shares: Share) -> None:
        """Release shares, as at the end of their containers."""
        self.registry.apply(SharesReleased(shares, at=anyio.current_time()))

    async def wait_until(
        self, is_so: Callable[[Snapshot], bool], deadline: float = 30.0
    ) -> Snapshot:
        """Wait for a snapshot of which `is_so` is true, and return it.

        Raises:
            TimeoutError: after `deadline` seconds.
        """
        with anyio.fail_after(deadline):
            async for snapshot in self.registry.watch(lambda snapshot: snapshot):
                if is_so(snapshot):
                    return snapshot
        raise AssertionError("a registry is watched for ever")

    async def settled(self) -> None:
        """Run all tasks until they wait; calls of NVML in threads may still be out."""
        await anyio.wait_all_tasks_blocked()


@asynccontextmanager
async def run_backends(
    text: str,
    backends: Mapping[str, type[Backend]],
    *,
    gpu_models: str = "a100-40gb:2",
    mig_enabled: bool = False,
    node: SimNode | None = None,
    injection: Injection | None = None,
    programs: Programs | None = None,
    daemons: Daemons | None = None,
    host: HostProcesses | None = None,
    timing: RestartTiming = RESTARTS,
    unread: bool = False,
) -> AsyncIterator[BackendRig]:
    """Run the backends of a configuration on a simulated node while the block lasts.

    Args:
        text: the configuration.
        backends: the backends that it may name.
        gpu_models: the node's GPUs, as for `--simulate`.
        mig_enabled: whether MIG mode of these is on.
        node: the node, instead of one of `gpu_models`.
        injection: the node's way of giving GPUs to containers.
        programs: host programs; recorded ones unless given.
        daemons: long-running host programs; stand-ins in real processes unless given.
        host: the host's processes, the real ones unless given.
        timing: the delays of the backend runner.
        unread: whether the leases are unknown, until `EarlierLeases` says otherwise.
    """
    if node is None:
        node = build_node(gpu_models)
        for simulated in node.gpus:
            simulated.mig.enabled = simulated.mig.pending = mig_enabled
    registry = Registry()
    driver = NvmlDriver(SimLibrary(node), NVML_DEADLINE)

    async with driver.session():
        gpus = (await driver.survey()).gpus
        registry.apply(GpusFound(gpus, at=0))
        if unread:
            registry.apply(EarlierLeases("they are not read yet"))
        programs, daemons = programs or RecordedPrograms(), daemons or sim_daemons()
        host = host or LinuxHost(own_pids=True)
        runner = BackendRunner(registry, driver, programs, daemons, host, timing=timing)
        rig = BackendRig(node, registry, runner, gpus, injection or Injection(), backends)
        runner.adopt(await find_left(backends, gpus, rig.injection.run_dir, daemons))
        rig.apply(text)

        async with anyio.create_task_group() as group:
            group.start_soon(runner.run)
            await rig.settled()
            yield rig
            group.cancel_scope.cancel()


def report_no_leases(rig: BackendRig) -> None:
    """Report, as the kubelet does after a start, that no container holds a share."""
    rig.registry.apply(LeasesObserved({}, at=0))
