"""Every function of NVML fails with every code: what the kubelet sees of two GPUs meanwhile.

A scene is one function, one code, one GPU, and whether the function fails from the start or later.
`make fuzz` takes a twentieth of the scenes of a running node and a sixtieth of the starts, which
take longer, by its piece. `make fuzz PIECES=60` takes all of them, and the unit tests a few.
"""

import re
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pynvml
import pytest

from metagpu.core.errors import DriverUnavailable
from metagpu.core.health.watch import HealthTiming
from metagpu.core.model.gpu import Gpu
from metagpu.core.state.facts import GpuFaulted
from metagpu.nvml.driver import NvmlDriver
from metagpu.nvml.session_gpu import NvmlTiming
from tests.fuzz.__main__ import commits
from tests.rigs.agent import Scene, agent_at_work
from tests.rigs.nvml_library import SOURCE, NvmlLibrary

FUNCTIONS: Final = re.findall(r"^int (nvml\w+)\(", SOURCE.read_text(), re.MULTILINE)
OF_GPU: Final = [name for name in FUNCTIONS if name.startswith("nvmlDevice")]
OF_GPU.remove("nvmlDeviceGetCount_v2")
OF_NVML: Final = [name for name in FUNCTIONS if name not in OF_GPU]
CODES: Final = sorted(pynvml.NVMLError._errcode_to_string)
LOST: Final = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED}
AWAY: Final = {
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
}
NEEDED: Final = {"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"}
"""Of a GPU; its memory has two functions, and one of them is enough."""
ESSENTIAL: Final = {"nvmlInitWithFlags", "nvmlDeviceGetCount_v2"}
"""Of NVML."""
OPTIONAL: Final = sorted({*FUNCTIONS} - NEEDED - ESSENTIAL)
PIECES: Final = 20
"""Pieces of all scenes of a running node in `make fuzz`."""
SUITE: Final = 300
"""Those pieces where none is asked for, as among the unit tests."""
STARTS: Final = 3
"""Pieces of starts for each of them."""
CONFIG: Final = """
version: metagpu/v1
health: {quietPeriod: 20ms, rescanPeriod: 20ms}
pools:
  - name: all
    backends: [{backend: fraction, sharesPerGpu: 10}]
"""


class Failure(NamedTuple):
    """A function that fails: about GPU 0 or 1, or `-` about NVML."""

    function: str
    code: int
    gpu: int | str

    @property
    def costs_gpu(self) -> bool | None:
        """Return whether its GPU leaves service; `None` if it may."""
        if self.function in NEEDED:
            return True
        return None if self.code in LOST else False

    def allows(self, lost: Collection[int]) -> bool:
        """Return whether these GPUs may leave service."""
        if self.may_cost_all:
            return True
        return set(lost) <= ({self.gpu} if self.costs_gpu is not False else set())

    @property
    def may_cost_all(self) -> bool:
        """Return whether NVML as a whole may count as unusable."""
        return self.function in ESSENTIAL or (self.gpu == "-" and self.code in AWAY)


FAILURES: Final = [
    *(Failure(name, code, gpu) for name in OF_GPU for code in CODES for gpu in (0, 1)),
    *(Failure(name, code, "-") for name in OF_NVML for code in CODES),
]


@pytest.fixture
def piece(request: pytest.FixtureRequest) -> int:
    """Return the piece of this run: the seed, or the number of commits."""
    seed = request.config.getoption("--hypothesis-seed")
    return commits() if seed is None else int(seed)


def part(piece: int, pieces: int) -> Sequence[Failure]:
    """Return the failures of one piece of several."""
    return FAILURES[piece % pieces :: pieces]


@pytest.fixture
def pieces(request: pytest.FixtureRequest) -> int:
    """Return the number of pieces: many where no piece is asked for."""
    return SUITE if request.config.getoption("--hypothesis-seed") is None else PIECES


async def test_failures_of_a_running_node(tmp_path: Path, piece: int, pieces: int) -> None:
    """A failure costs its own GPU at most, and none that works without the function."""
    library = NvmlLibrary(tmp_path / "nvml")
    async with node(tmp_path, library) as scene:
        await scene.until(20, 20)
        gpus = list(scene.agent.registry.snapshot.gpus)

        for failure in part(piece, pieces):
            with scene.agent.registry.events.subscribe(GpuFaulted) as subscription:
                library.fail(failure.function, failure.gpu, failure.code)
                try:
                    await scene.agent.health.survey()
                except* DriverUnavailable:
                    assert failure.may_cost_all, failure
                if failure.costs_gpu:
                    await scene.until(20, 10)

                lost = {
                    gpus.index(event.gpu)
                    for event in subscription._waiting
                    if isinstance(event, GpuFaulted)
                }
                assert failure.allows(lost), (failure, lost)
            library.work()
            await scene.until(20, 20)


async def test_failures_from_the_start(tmp_path: Path, piece: int, pieces: int) -> None:
    """A node starts with the GPUs that can be read, and gets the others when they can."""
    for number, failure in enumerate(part(piece, STARTS * pieces)):
        folder = tmp_path / str(number)
        folder.mkdir()
        library = NvmlLibrary(folder / "nvml")
        library.fail(failure.function, failure.gpu, failure.code)

        async with node(folder, library) as scene:
            if failure.costs_gpu:
                await scene.until(10, 10)
                assert [gpu.index for gpu in gpus_of(scene)] == [1 - int(failure.gpu)], failure
            elif failure.costs_gpu is False and not failure.may_cost_all:
                await scene.until(20, 20)
            library.work()
            await scene.until(20, 20)


async def test_a_library_without_a_function(tmp_path: Path, piece: int) -> None:
    """A driver whose library lacks a function that is not needed has its GPUs offered."""
    for function in OPTIONAL[piece % PIECES :: PIECES]:
        folder = tmp_path / function
        folder.mkdir()
        async with node(folder, NvmlLibrary(folder / "nvml", missing=[function])) as scene:
            await scene.until(20, 20)


def gpus_of(scene: Scene) -> list[Gpu]:
    """Return the GPUs that the agent knows."""
    return [state.gpu for state in scene.agent.registry.snapshot.gpus.values()]


@asynccontextmanager
async def node(folder: Path, library: NvmlLibrary) -> AsyncIterator[Scene]:
    """Run an agent on a library while the block lasts; it tries everything again at once."""
    timing = NvmlTiming(wait=0.05, event_retry=0.05, event_retry_longest=0.05)
    async with agent_at_work(
        folder,
        config=CONFIG,
        driver=NvmlDriver(library.load(), 30.0, timing),
        health_timing=HealthTiming(retry=0.02, event_retry=0.02, unread_rescan=0.02),
    ) as scene:
        yield scene
