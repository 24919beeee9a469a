"""GPUs that are lost, hang, or disappear: the other GPUs are not disturbed."""

from pathlib import Path

import anyio
import anyio.lowlevel
import pynvml
import pytest

from metagpu.core.contracts.driver import RecoveryAction
from metagpu.core.errors import (
    DriverError,
    DriverTimeout,
    DriverUnavailable,
    GpuLost,
    InsufficientResources,
    InUse,
    NotFound,
    Unsupported,
)
from metagpu.core.model.gpu import MIB
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.gpu import SimError, SimProcess
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node, find_model
from metagpu.sim.nvml.library import SimLibrary
from tests.nvml.rig import DEADLINE, altered_library, inside, opened, skip_deadlines


async def test_a_lost_gpu_leaves_the_others_alone() -> None:
    """A GPU that fell off the bus is reported by uuid and index; the others are read as before."""
    async with opened() as (node, nvml, before):
        node.lose_gpu(node.gpu(1))
        survey = await nvml.survey()

        assert [gpu.id for gpu in survey.gpus] == [before.gpus[0].id, before.gpus[2].id]
        [gone] = survey.unreadable
        assert (gone.index, gone.gpu) == (1, before.gpus[1].id)
        assert "lost" in gone.reason
        assert (await nvml.condition(before.gpus[2].id)).recovery_action == RecoveryAction.NONE
        with pytest.raises(GpuLost, match=r"GPU 1 .*lost"):
            await nvml.condition(before.gpus[1].id)


async def test_a_gpu_that_requires_a_reset_is_lost() -> None:
    """RESET_REQUIRED is a lost GPU too, with a message of its own."""
    async with opened() as (node, nvml, survey):
        node.lose_gpu(node.gpu(0), pynvml.NVML_ERROR_RESET_REQUIRED)
        with pytest.raises(GpuLost, match="wants a reset"):
            await nvml.processes(survey.gpus[0].id)


async def test_a_gpu_lost_before_the_session_keeps_its_name() -> None:
    """A GPU of an earlier session is named although it cannot be read now."""
    node = build_node("t4:2")
    nvml = NvmlDriver(SimLibrary(node), DEADLINE)
    async with nvml.session():
        lost = (await nvml.survey()).gpus[1]
    node.lose_gpu(node.gpu(1))

    async with nvml.session():
        assert (await nvml.survey()).unreadable[0].gpu == lost.id
        with pytest.raises(GpuLost, match=lost.id):
            await nvml.condition(lost.id)


async def test_a_removed_gpu_is_not_called_lost() -> None:
    """A GPU that takes a removed GPU's index is not taken for the removed one."""
    async with opened() as (node, nvml, before):
        node.remove_gpu(node.gpu(0))
        survey = await nvml.survey()

        assert [gpu.id for gpu in survey.gpus] == [before.gpus[1].id, before.gpus[2].id]
        assert [gpu.index for gpu in survey.gpus] == [0, 1]
        with pytest.raises(DriverError, match="last survey"):
            await nvml.condition(before.gpus[0].id)


async def test_a_hung_gpu_times_out_and_delays_no_other() -> None:
    """A hung GPU costs its first caller the deadline and later ones nothing; others answer."""
    async with opened() as (node, nvml, survey):
        node.hang_gpu(node.gpu(0), 600)
        async with skip_deadlines(nvml, "GPU 0"):
            with pytest.raises(DriverTimeout, match=f"GPU 0.*within {DEADLINE:g} s"):
                await nvml.condition(survey.gpus[0].id)

        with pytest.raises(DriverTimeout, match="earlier"):
            await nvml.processes(survey.gpus[0].id)
        await nvml.condition(survey.gpus[1].id)
        assert nvml.unanswered_calls == [f"GPU 0 ({survey.gpus[0].id})"]

        assert [u.index for u in (await nvml.survey()).unreadable] == [0]
        node.reset_gpu(node.gpu(0))
        with anyio.fail_after(30):
            while nvml.unanswered_calls:
                await anyio.lowlevel.checkpoint()
        assert not (await nvml.survey()).unreadable


async def test_a_cancelled_call_leaves_at_once() -> None:
    """A cancelled caller does not wait for NVML; the next caller waits for the thread, and works.

    The thread is not overdue before the first caller's deadline.
    """
    async with opened() as (node, nvml, survey):
        gpu = survey.gpus[0].id
        node.hang_gpu(node.gpu(0), 600)
        async with anyio.create_task_group() as group:
            group.start_soon(nvml.condition, gpu)
            while "GPU 0" not in inside(nvml):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        assert (nvml.has_threads, nvml.unanswered_calls) == (True, [])

        async with anyio.create_task_group() as group:
            group.start_soon(nvml.condition, gpu)
            await anyio.wait_all_tasks_blocked()
            node.reset_gpu(node.gpu(0))

        assert not nvml.has_threads


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, GpuLost, "off the bus"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, GpuLost, "wants a reset"),
        (pynvml.NVML_ERROR_TIMEOUT, DriverTimeout, "nvmlDeviceGetMemoryInfo timed out"),
        (pynvml.NVML_ERROR_UNKNOWN, DriverError, "nvmlDeviceGetMemoryInfo: Unknown Error"),
        (pynvml.NVML_ERROR_NO_PERMISSION, DriverError, "nvmlDeviceGetMemoryInfo: Insufficient"),
        (pynvml.NVML_ERROR_IN_USE, InUse, "nvmlDeviceGetMemoryInfo: In use by another client"),
        (pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, InsufficientResources, "Insufficient Resources"),
    ],
)
async def test_codes_become_errors(code: int, error: type[DriverError], message: str) -> None:
    """Each code about one GPU is an error that names the GPU, NVML's call and its text."""
    async with opened() as (node, nvml, survey):
        node.lose_gpu(node.gpu(2), code)
        with pytest.raises(DriverError, match=rf"GPU 2 .*{message}") as caught:
            await nvml.condition(survey.gpus[2].id)

    assert type(caught.value) is error


async def test_an_odd_answer_is_an_error_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that cannot be decoded makes one GPU unreadable, and no other."""
    answers = [b"\xff", b"GPU-1"]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda _: answers.pop(0).decode())
    nvml = NvmlDriver(SimLibrary(build_node("t4:2")), DEADLINE)
    async with nvml.session():
        survey = await nvml.survey()

    [odd] = survey.unreadable
    assert len(survey.gpus) == 1
    assert odd.reason.startswith(f"GPU {odd.index}: ")
    assert "odd answer: UnicodeDecodeError: 'utf-8'" in odd.reason


async def test_an_odd_answer_about_nvml_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """An undecodable answer about NVML itself is DriverUnavailable, so a new session may help."""
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", b"\xff".decode)
    nvml = NvmlDriver(SimLibrary(build_node("t4:1")), DEADLINE)
    async with nvml.session():
        with pytest.raises(DriverUnavailable, match=r"NVML: .*UnicodeDecodeError"):
            await nvml.survey()


GIB = 1024 * MIB


def new_node(driver: str = "615.71.09") -> SimNode:
    """Build a node with one A100 and a driver that knows limits."""
    node = SimNode(driver)
    node.add_gpu(find_model("a100-40gb"))
    return node


async def limit(node: SimNode, cgroup: Path, amount: int | None, **functions: object) -> None:
    """Set a limit on the node's GPU through our driver."""
    nvml = NvmlDriver(altered_library(node, **functions), DEADLINE)  # type: ignore[arg-type] # what tests put there
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
    nvml = NvmlDriver(altered_library(node), DEADLINE)
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        assert await nvml.memory_limit(gpu.id, str(tmp_path)) is None
        await nvml.limit_memory(gpu.id, str(tmp_path), GIB)
        assert await nvml.memory_limit(gpu.id, str(tmp_path)) == GIB
        assert await nvml.memory_limit(gpu.id, str(tmp_path / "below")) == GIB
        with pytest.raises(NotFound):
            await nvml.memory_limit(gpu.id, str(tmp_path / "nowhere"))
