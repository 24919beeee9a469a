"""GPUs that are lost, hang, or go away: the others must not notice."""

import anyio
import anyio.lowlevel
import pynvml
import pytest

from metagpu.core.driver import RecoveryAction
from metagpu.core.errors import (
    DriverError,
    DriverTimeout,
    DriverUnavailable,
    GpuLost,
    InUse,
    NoRoom,
    Unsupported,
)
from metagpu.nvml import Nvml
from metagpu.sim.library import Library
from metagpu.sim.spec import simulated
from tests.nvml.rig import DEADLINE, hurried, opened
from tests.waiting import skip


async def test_a_lost_gpu_leaves_the_others_alone() -> None:
    """A GPU that fell off the bus is reported by uuid and index; the others are read as before."""
    async with opened() as (node, nvml, before):
        node.lose(node.gpu(1))
        survey = await nvml.survey()

        assert [gpu.id for gpu in survey.gpus] == [before.gpus[0].id, before.gpus[2].id]
        [gone] = survey.unreadable
        assert (gone.index, gone.gpu) == (1, before.gpus[1].id)
        assert "lost" in gone.reason
        assert (await nvml.condition(before.gpus[2].id)).recovery_action == RecoveryAction.NONE
        with pytest.raises(GpuLost, match=r"GPU 1 .*lost"):
            await nvml.condition(before.gpus[1].id)


async def test_a_gpu_that_wants_a_reset_says_so() -> None:
    """RESET_REQUIRED is a lost GPU too, with a message that tells it from one off the bus."""
    async with opened() as (node, nvml, survey):
        node.lose(node.gpu(0), pynvml.NVML_ERROR_RESET_REQUIRED)
        with pytest.raises(GpuLost, match="wants a reset"):
            await nvml.processes(survey.gpus[0].id)


async def test_a_gpu_lost_before_the_session_keeps_its_name() -> None:
    """A GPU that was read in an earlier session is named although it cannot be read now."""
    node = simulated("t4:2")
    nvml = Nvml(Library(node), DEADLINE)
    async with nvml.session():
        lost = (await nvml.survey()).gpus[1]
    node.lose(node.gpu(1))

    async with nvml.session():
        assert (await nvml.survey()).unreadable[0].gpu == lost.id
        with pytest.raises(GpuLost, match=lost.id):
            await nvml.condition(lost.id)


async def test_a_removed_gpu_is_not_called_lost() -> None:
    """Who moved up to a lower index is not taken for the GPU that was there before."""
    async with opened() as (node, nvml, before):
        node.remove_gpu(node.gpu(0))
        survey = await nvml.survey()

        assert [gpu.id for gpu in survey.gpus] == [before.gpus[1].id, before.gpus[2].id]
        assert [gpu.index for gpu in survey.gpus] == [0, 1]
        with pytest.raises(DriverError, match="last survey"):
            await nvml.condition(before.gpus[0].id)


async def test_a_hung_gpu_times_out_and_delays_nobody() -> None:
    """A hung GPU costs its own caller the deadline, and later callers nothing; others answer."""
    async with opened() as (node, nvml, survey):
        node.hang(node.gpu(0), 600)
        async with hurried(nvml, "GPU 0"):
            with pytest.raises(DriverTimeout, match=f"GPU 0.*within {DEADLINE:g} s"):
                await nvml.condition(survey.gpus[0].id)

        with pytest.raises(DriverTimeout, match="earlier"):
            await nvml.processes(survey.gpus[0].id)
        await nvml.condition(survey.gpus[1].id)
        assert nvml.overdue == [f"GPU 0 ({survey.gpus[0].id})"]

        assert [u.index for u in (await nvml.survey()).unreadable] == [0]
        node.recover(node.gpu(0))
        with anyio.fail_after(30):
            while nvml.overdue:
                await anyio.lowlevel.checkpoint()
        assert not (await nvml.survey()).unreadable


async def test_a_hanging_call_waits_for_its_deadline_when_cancelled() -> None:
    """Cancelling a call does not take NVML away from under its thread."""
    ended: list[str] = []

    async def ask() -> None:
        with pytest.raises(DriverTimeout):
            await nvml.condition(survey.gpus[0].id)
        ended.append(nvml.overdue[0])

    async with opened() as (node, nvml, survey):
        node.hang(node.gpu(0), 600)
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            while not nvml.overdue:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
                assert not ended
                skip(DEADLINE)

        assert ended == [f"GPU 0 ({survey.gpus[0].id})"]
        node.recover(node.gpu(0))


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, GpuLost, "off the bus"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, GpuLost, "wants a reset"),
        (pynvml.NVML_ERROR_TIMEOUT, DriverTimeout, "nvmlDeviceGetMemoryInfo timed out"),
        (pynvml.NVML_ERROR_UNKNOWN, DriverError, "nvmlDeviceGetMemoryInfo: Unknown Error"),
        (pynvml.NVML_ERROR_NO_PERMISSION, DriverError, "nvmlDeviceGetMemoryInfo: Insufficient"),
        (pynvml.NVML_ERROR_IN_USE, InUse, "nvmlDeviceGetMemoryInfo: In use by another client"),
        (pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, NoRoom, "Insufficient Resources"),
        (pynvml.NVML_ERROR_NOT_SUPPORTED, Unsupported, "Not Supported"),
    ],
)
async def test_codes_become_errors(code: int, error: type[DriverError], message: str) -> None:
    """Each code about one GPU is an error of ours that names the GPU, and NVML's call and text."""
    async with opened() as (node, nvml, survey):
        node.lose(node.gpu(2), code)
        with pytest.raises(DriverError, match=rf"GPU 2 .*{message}") as caught:
            await nvml.condition(survey.gpus[2].id)

    assert type(caught.value) is error


async def test_an_odd_answer_is_an_error_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot even be decoded makes one GPU unreadable, by name, and no other."""
    answers = [b"\xff", b"Tesla T4"]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda _: answers.pop(0).decode())
    nvml = Nvml(Library(simulated("t4:2")), DEADLINE)
    async with nvml.session():
        survey = await nvml.survey()

    [odd] = survey.unreadable
    assert len(survey.gpus) == 1
    assert odd.reason.startswith(f"GPU {odd.index} ")
    assert "odd answer: UnicodeDecodeError: 'utf-8'" in odd.reason


async def test_an_odd_answer_about_nvml_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NVML says about itself is needed: a new session may bring something readable."""
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", b"\xff".decode)
    nvml = Nvml(Library(simulated("t4:1")), DEADLINE)
    async with nvml.session():
        with pytest.raises(DriverUnavailable, match=r"NVML: .*UnicodeDecodeError"):
            await nvml.survey()
