"""GPUs that are lost, hang, or disappear: the other GPUs are not disturbed."""

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
)
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.nvml.rig import DEADLINE, inside, opened, skip_deadlines


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
