"""GPUs shared through MPS, with real processes in place of NVIDIA's."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import anyio
from msgspec.structs import replace

from metagpu.backends.common.mps_daemon.control import MpsDirectories
from metagpu.backends.common.mps_daemon.decisions import MpsDaemonTiming
from metagpu.core.contracts.driver import ComputeMode
from metagpu.core.contracts.programs import DaemonProcess
from metagpu.core.grants.injection import Injection
from metagpu.core.model.snapshot import GpuState
from metagpu.host.daemons import HostDaemons
from tests.nvml.rig import out
from tests.rigs.daemons import DAEMONS, StandIn
from tests.rigs.gpu_context import BackendRig, run_backends
from tests.rigs.waiting import until

if TYPE_CHECKING:
    from metagpu.nvml.driver import NvmlDriver

EXCLUSIVE, DEFAULT = ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.DEFAULT
ALONE = """
version: metagpu/v1
pools: [{name: all, backends: [{backend: mps, unitsPerGpu: 10}]}]
"""
MIXED = """
version: metagpu/v1
pools:
  - name: all
    backends: [{backend: mps, unitsPerGpu: 10}, {backend: whole}]
"""


TIMING = MpsDaemonTiming(
    period=0.05,
    retry=0.02,
    deadline=20.0,
    start_timeout=30.0,
    first_delay=0.05,
    longest_delay=0.2,
    stable_after=60.0,
)
"""Everything that takes seconds takes a tenth or less, but for a start and an answer: a machine may
be busy."""

SELDOM = replace(TIMING, period=2.0)
"""Probes leave the time to see that a daemon has ended, and how, however busy the machine is."""


@dataclass
class Scene:
    """MPS on simulated GPUs."""

    care: BackendRig
    folder: Path
    daemons: HostDaemons = DAEMONS

    def at(self, index: int = 0) -> StandIn:
        """Return a GPU's control daemon."""
        gpu = self.care.gpus[index].id
        return StandIn(MpsDirectories(self.folder / "mps" / gpu), gpu, self.daemons)

    async def becomes(self, wanted: Callable[[GpuState], bool], index: int = 0) -> None:
        """Wait until a GPU's state fulfils a condition."""
        with anyio.fail_after(30):
            async for state in self.care.registry.watch(
                lambda now: now.gpus[self.care.gpus[index].id]
            ):
                if wanted(state):
                    return

    async def ready(self, index: int = 0) -> None:
        """Wait until a GPU's shares are granted."""
        await self.becomes(lambda state: "mps" not in state.suspended, index)

    async def suspended(self, reason: str, index: int = 0) -> None:
        """Wait until a GPU's shares are suspended, for a reason with this text."""

        def says(state: GpuState) -> bool:
            pause = state.suspended.get("mps")
            return pause is not None and reason in pause.reason

        await self.becomes(says, index)

    async def mode(self, mode: ComputeMode, index: int = 0) -> None:
        """Wait until a GPU has a compute mode."""
        driver = cast("NvmlDriver", self.care.runner._driver)

        async def is_so() -> bool:
            is_set = self.care.node.gpus[index].compute_mode == mode
            return is_set and not out(driver)  # and its owner has heard of it

        await until(is_so, 30)

    async def another(self, process: DaemonProcess, index: int = 0) -> None:
        """Wait until a control daemon other than this one runs."""

        async def is_so() -> bool:
            return await self.at(index).process() not in (None, process)

        await until(is_so, 90)  # a daemon that hangs is probed to the end first

    async def process(self, index: int = 0) -> DaemonProcess:
        """Return the running control daemon."""
        found = await self.at(index).process()
        assert found is not None
        return found


@asynccontextmanager
async def mps(
    folder: Path,
    text: str = ALONE,
    *,
    gpu_models: str = "a100-40gb:1",
    care: BackendRig | None = None,
    stays: bool = False,
    daemons: HostDaemons = DAEMONS,
    unread: bool = False,
) -> AsyncIterator[Scene]:
    """Run MPS on GPUs while the block lasts; with `stays`, its daemons are left running."""
    injection = Injection(run_dir=str(folder))
    node = care.node if care else None
    failed = True
    scene: Scene | None = None

    try:
        async with run_backends(
            text,
            gpu_models=gpu_models,
            injection=injection,
            node=node,
            daemons=daemons,
            unread=unread,
        ) as rig:
            scene = Scene(rig, folder, daemons)
            yield scene
            failed = False
    finally:
        if scene is not None and (failed or not stays):
            with anyio.CancelScope(shield=True):
                for index in range(len(scene.care.gpus)):
                    await scene.at(index).gone()
