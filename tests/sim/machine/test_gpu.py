"""One GPU of the simulated machine, and the processes on it."""

import pytest

from metagpu.core.model.gpu import MIB
from metagpu.sim.machine.gpu import SimError, SimGpu, SimProcess
from metagpu.sim.machine.gpu_models import GPU_MODELS
from metagpu.sim.machine.node import SimNode


@pytest.fixture
def gpu() -> SimGpu:
    """Return an idle A100 with 40 GiB."""
    return SimNode().add_gpu(GPU_MODELS["a100-40gb"])


def test_processes_use_memory_until_they_end(gpu: SimGpu) -> None:
    """The used memory is the sum over processes; a growing process counts once."""
    gpu.start_process(SimProcess(1, 30_000 * MIB))
    gpu.start_process(SimProcess(1, 35_000 * MIB))
    gpu.start_process(SimProcess(2, None))
    assert gpu.used == 35_000 * MIB

    gpu.end_process(1)
    assert gpu.used == 0
    with pytest.raises(SimError, match=r"no process 1 .* there: 2"):
        gpu.end_process(1)


def test_a_full_gpu_takes_no_more(gpu: SimGpu) -> None:
    """The driver's reserved memory is not available to processes."""
    with pytest.raises(SimError, match="40340 MiB left"):
        gpu.start_process(SimProcess(1, 40_960 * MIB))
