"""The driver's own limits of memory, as far as NVML has them."""

from pathlib import Path

import pynvml
import pytest

from metagpu.core.errors import DriverError, NotThere, Unsupported
from metagpu.core.gpu import MIB
from metagpu.nvml import Nvml
from metagpu.sim.gpu import SimError, SimProcess
from metagpu.sim.node import SimNode
from metagpu.sim.spec import board
from tests.nvml.rig import altered

GIB = 1024 * MIB


def new_node(driver: str = "615.71.09") -> SimNode:
    """Make a node with one A100 and a driver that knows limits."""
    node = SimNode(driver)
    node.add_gpu(board("a100-40gb"))
    return node


async def limit(node: SimNode, cgroup: Path, amount: int | None, **functions: object) -> None:
    """Set a limit on the node's GPU through our driver."""
    nvml = Nvml(altered(node, **functions))  # type: ignore[arg-type] # what tests put there
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        await nvml.limit_memory(gpu.id, str(cgroup), amount)


async def test_a_limit_is_for_all_of_a_cgroup_together(tmp_path: Path) -> None:
    """What two processes below a limited cgroup have counts together; others are not limited."""
    node = new_node()
    (tmp_path / "below").mkdir()
    await limit(node, tmp_path, 10 * GIB)

    gpu = node.gpu(0)
    node.add_process(gpu, SimProcess(1, 6 * GIB, cgroup=str(tmp_path)))
    node.add_process(gpu, SimProcess(2, 4 * GIB, cgroup=str(tmp_path / "below")))
    node.add_process(gpu, SimProcess(9, 20 * GIB, cgroup="/elsewhere"))
    with pytest.raises(SimError, match="leaves process 1 6144 MiB"):
        node.add_process(gpu, SimProcess(1, 6 * GIB + 1, cgroup=str(tmp_path)))

    await limit(node, tmp_path, None)
    node.add_process(gpu, SimProcess(1, 8 * GIB, cgroup=str(tmp_path)))


async def test_no_guarantee_is_given(tmp_path: Path) -> None:
    """The soft limit stays 0: what is guaranteed would outlive the container above it."""
    given: list[int] = []

    def set_limits(_: object, limits: object) -> int:
        given.append(limits._obj.softLimit)  # type: ignore[attr-defined] # of ctypes
        return int(pynvml.NVML_SUCCESS)

    with pytest.raises(DriverError, match="the driver took a limit of memory without effect"):
        await limit(new_node(), tmp_path, GIB, nvmlDeviceSetMemoryLimits_v1=set_limits)
    assert given == [0]


async def test_an_older_driver_has_none(tmp_path: Path) -> None:
    """A library without the function is told apart from a failure."""
    with pytest.raises(Unsupported, match="nvmlDeviceSetMemoryLimits_v1"):
        await limit(new_node("580.65.06"), tmp_path, GIB)


async def test_in_mig_mode_there_are_none(tmp_path: Path) -> None:
    """A GPU in MIG mode knows no limits of cgroups."""
    node = new_node()
    node.gpu(0).mig.enabled = True
    with pytest.raises(Unsupported, match="Not Supported"):
        await limit(node, tmp_path, GIB)


async def test_a_cgroup_that_is_not_there_is_told(tmp_path: Path) -> None:
    """A container may end before its limit is set."""
    with pytest.raises(NotThere, match="Not Found"):
        await limit(new_node(), tmp_path / "gone", GIB)


async def test_only_root_may(tmp_path: Path) -> None:
    """Without root the message says what is missing."""
    node = new_node()
    node.root = False
    expected = "the driver's memory limits cannot be set: only root may; run metagpu as root"
    with pytest.raises(DriverError, match=expected):
        await limit(node, tmp_path, GIB)


async def test_limits_end_with_the_driver(tmp_path: Path) -> None:
    """A driver that is loaded again has forgotten them."""
    node = new_node()
    await limit(node, tmp_path, GIB)
    assert node.gpu(0).limits
    node.restore_driver()
    assert not node.gpu(0).limits


async def test_a_limit_is_read_back(tmp_path: Path) -> None:
    """What is set is told, also of a cgroup below; nothing where nothing is."""
    node = new_node()
    (tmp_path / "below").mkdir()
    nvml = Nvml(altered(node))
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        assert await nvml.memory_limit(gpu.id, str(tmp_path)) is None
        await nvml.limit_memory(gpu.id, str(tmp_path), GIB)
        assert await nvml.memory_limit(gpu.id, str(tmp_path)) == GIB
        assert await nvml.memory_limit(gpu.id, str(tmp_path / "below")) == GIB
        with pytest.raises(NotThere):
            await nvml.memory_limit(gpu.id, str(tmp_path / "nowhere"))
