"""The driver's own limits of memory, through NVML."""

from pathlib import Path

import pynvml
import pytest

from metagpu.core.errors import DriverError, NotFound, Unsupported
from metagpu.core.model.gpu import MIB
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.gpu import SimError, SimProcess
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import find_model
from tests.nvml.rig import altered_library

GIB = 1024 * MIB


def new_node(driver: str = "615.71.09") -> SimNode:
    """Build a node with one A100 and a driver that knows limits."""
    node = SimNode(driver)
    node.add_gpu(find_model("a100-40gb"))
    return node


async def limit(node: SimNode, cgroup: Path, amount: int | None, **functions: object) -> None:
    """Set a limit on the node's GPU through our driver."""
    nvml = NvmlDriver(altered_library(node, **functions))  # type: ignore[arg-type] # what tests put there
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        await nvml.limit_memory(gpu.id, str(cgroup), amount)


async def test_a_limit_is_for_all_of_a_cgroup_together(tmp_path: Path) -> None:
    """Processes below a limited cgroup count together; other processes have no limit."""
    node = new_node()
    (tmp_path / "below").mkdir()
    await limit(node, tmp_path, 10 * GIB)

    gpu = node.gpu(0)
    node.start_process(gpu, SimProcess(1, 6 * GIB, cgroup=str(tmp_path)))
    node.start_process(gpu, SimProcess(2, 4 * GIB, cgroup=str(tmp_path / "below")))
    node.start_process(gpu, SimProcess(9, 20 * GIB, cgroup="/elsewhere"))
    with pytest.raises(SimError, match="leaves process 1 6144 MiB"):
        node.start_process(gpu, SimProcess(1, 6 * GIB + 1, cgroup=str(tmp_path)))

    await limit(node, tmp_path, None)
    node.start_process(gpu, SimProcess(1, 8 * GIB, cgroup=str(tmp_path)))


async def test_no_guarantee_is_given(tmp_path: Path) -> None:
    """The soft limit stays 0, as a guarantee outlives its container."""
    given: list[int] = []

    def set_limits(_: object, limits: object) -> int:
        given.append(limits._obj.softLimit)  # type: ignore[attr-defined] # of ctypes
        return int(pynvml.NVML_SUCCESS)

    with pytest.raises(DriverError, match="the driver took a limit of memory without effect"):
        await limit(new_node(), tmp_path, GIB, nvmlDeviceSetMemoryLimits_v1=set_limits)
    assert given == [0]


async def test_an_older_driver_has_none(tmp_path: Path) -> None:
    """A library without the function has an error of its own, different from a failure."""
    with pytest.raises(Unsupported, match="nvmlDeviceSetMemoryLimits_v1"):
        await limit(new_node("580.65.06"), tmp_path, GIB)


async def test_in_mig_mode_there_are_none(tmp_path: Path) -> None:
    """A GPU in MIG mode has no limits of cgroups."""
    node = new_node()
    node.gpu(0).mig.enabled = True
    with pytest.raises(Unsupported, match="Not Supported"):
        await limit(node, tmp_path, GIB)


async def test_a_missing_cgroup_is_an_error(tmp_path: Path) -> None:
    """A limit of a container that has ended is an error of its own."""
    with pytest.raises(NotFound, match="Not Found"):
        await limit(new_node(), tmp_path / "gone", GIB)


async def test_only_root_may(tmp_path: Path) -> None:
    """Without root the error names the missing permission."""
    node = new_node()
    node.root = False
    expected = "the driver's memory limits cannot be set: only root may; run metagpu as root"
    with pytest.raises(DriverError, match=expected):
        await limit(node, tmp_path, GIB)


async def test_limits_end_with_the_driver(tmp_path: Path) -> None:
    """A driver that is loaded again has no limits."""
    node = new_node()
    await limit(node, tmp_path, GIB)
    assert node.gpu(0).memory_limits
    node.load_driver()
    assert not node.gpu(0).memory_limits


async def test_a_limit_is_read_back(tmp_path: Path) -> None:
    """A limit is read back, also for a cgroup below; without a limit the answer is None."""
    node = new_node()
    (tmp_path / "below").mkdir()
    nvml = NvmlDriver(altered_library(node))
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        assert await nvml.memory_limit(gpu.id, str(tmp_path)) is None
        await nvml.limit_memory(gpu.id, str(tmp_path), GIB)
        assert await nvml.memory_limit(gpu.id, str(tmp_path)) == GIB
        assert await nvml.memory_limit(gpu.id, str(tmp_path / "below")) == GIB
        with pytest.raises(NotFound):
            await nvml.memory_limit(gpu.id, str(tmp_path / "nowhere"))
