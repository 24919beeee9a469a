"""GPUs shared through MPS, with real processes in place of NVIDIA's."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from metagpu.backends.mps_daemon.control import Folders
from metagpu.backends.mps_daemon.supervisor import Timing
from metagpu.core.companions import Process
from metagpu.core.driver import ComputeMode
from metagpu.core.injection import Injection
from metagpu.core.snapshot import GpuState
from tests.companions_rig import StandIn
from tests.served import Care, in_care
from tests.waiting import until

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


TIMING = Timing(
    period=0.05,
    retry=0.02,
    deadline=20.0,
    patience=5.0,
    first_pause=0.05,
    longest_pause=0.2,
    steady=60.0,
)
"""Everything that takes seconds takes a tenth or less, but for an answer: a machine may be busy."""


@dataclass
class Scene:
    """MPS at work on simulated GPUs."""

    care: Care
    folder: Path

    def at(self, index: int = 0) -> StandIn:
        """Give a GPU's control daemon."""
        gpu = self.care.gpus[index].id
        return StandIn(Folders(self.folder / "mps" / gpu), gpu)

    async def becomes(self, wanted: Callable[[GpuState], bool], index: int = 0) -> None:
        """Wait until a GPU's state is so."""
        with anyio.fail_after(30):
            async for state in self.care.registry.watch(
                lambda now: now.gpus[self.care.gpus[index].id]
            ):
                if wanted(state):
                    return

    async def ready(self, index: int = 0) -> None:
        """Wait until MPS gives shares of a GPU."""
        await self.becomes(lambda state: "mps" not in state.suspended, index)

    async def suspended(self, reason: str, index: int = 0) -> None:
        """Wait until MPS gives no shares of a GPU, for a reason that says this."""

        def says(state: GpuState) -> bool:
            pause = state.suspended.get("mps")
            return pause is not None and reason in pause.reason

        await self.becomes(says, index)

    async def mode(self, mode: ComputeMode, index: int = 0) -> None:
        """Wait until a GPU has a compute mode."""

        async def is_so() -> bool:
            return self.care.node.gpus[index].compute_mode == mode

        await until(is_so, 30)

    async def another(self, process: Process, index: int = 0) -> None:
        """Wait until another control daemon than this one runs."""

        async def is_so() -> bool:
            return await self.at(index).process() not in (None, process)

        await until(is_so, 30)

    async def process(self, index: int = 0) -> Process:
        """Give the control daemon that runs."""
        found = await self.at(index).process()
        assert found is not None
        return found


@asynccontextmanager
async def mps(
    folder: Path,
    text: str = ALONE,
    *,
    boards: str = "a100-40gb:1",
    care: Care | None = None,
    stays: bool = False,
) -> AsyncIterator[Scene]:
    """Keep GPUs by MPS while the block lasts; with `stays`, what is left running is left."""
    injection = Injection(run_dir=str(folder))
    node = care.node if care else None

    async with in_care(text, boards=boards, injection=injection, node=node) as made:
        scene = Scene(made, folder)
        try:
            yield scene
        except BaseException:
            stays = False
            raise
    if not stays:
        for index in range(len(made.gpus)):
            await scene.at(index).gone()
