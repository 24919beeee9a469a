"""One GPU of the simulated machine, and the processes on it."""

import pytest

from metagpu.core.gpu import MIB
from metagpu.sim.boards import BOARDS
from metagpu.sim.gpu import SimError, SimGpu, SimProcess
from metagpu.sim.node import SimNode


@pytest.fixture
def gpu() -> SimGpu:
    """An A100 with 40 GiB that nobody uses."""
    return SimNode().add_gpu(BOARDS["a100-40gb"])


def test_processes_use_memory_until_they_end(gpu: SimGpu) -> None:
    """Memory is what processes have together; one that grows is not counted twice."""
    gpu.start(SimProcess(1, 30_000 * MIB))
    gpu.start(SimProcess(1, 35_000 * MIB))
    gpu.start(SimProcess(2, None))
    assert gpu.used == 35_000 * MIB

    gpu.end(1)
    assert gpu.used == 0
    with pytest.raises(SimError, match=r"no process 1 .* there: 2"):
        gpu.end(1)


def test_a_full_gpu_takes_no_more(gpu: SimGpu) -> None:
    """What the driver reserves cannot be had."""
    with pytest.raises(SimError, match="40340 MiB left"):
        gpu.start(SimProcess(1, 40_960 * MIB))
