"""GPUs on the machine's memory, such as GB10: the driver reports no memory for them."""

from pathlib import Path

import pynvml
import pytest

from metagpu.core.grants.injection import MEMORY
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.kubelet.pods import SimPod
from tests.rigs.agent import agent_at_work
from tests.rigs.nvml_library import NvmlLibrary

CONFIG = """
version: metagpu/v1
pools:
  - name: all
    backends: [{{{}}}]
"""


@pytest.mark.parametrize(
    ("backend", "resource", "count", "memory"),
    [
        ("backend: whole", "nvidia.com/gpu", 2, ""),
        ("backend: timeslice, replicas: 4", "nvidia.com/gpu.shared", 8, ""),
        ("backend: fraction, sharesPerGpu: 4, gpuMemory: 100Gi", "cnvrg.io/metagpu", 8, "25600"),
    ],
)
async def test_a_gpu_of_unknown_memory_is_shared(
    tmp_path: Path, backend: str, resource: str, count: int, memory: str
) -> None:
    """Whole GPUs and replicas need no memory, and fractions take the configured one."""
    library = NvmlLibrary(tmp_path / "nvml")
    for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):
        library.fail(function, "*", pynvml.NVML_ERROR_NOT_SUPPORTED)
    driver = NvmlDriver(library.load())

    async with agent_at_work(tmp_path, config=CONFIG.format(backend), driver=driver) as scene:
        await scene.until(count, count, resource)
        [container] = (await scene.kubelet.admit(SimPod.single("pod", {resource: 1}))).values()

        assert container.envs.get(MEMORY, "").partition("=")[2] == memory
