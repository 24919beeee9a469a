"""Events: none may be lost, none told twice, and no fault may spin."""

import ctypes
import threading
import time
from collections.abc import Iterable

import anyio
import anyio.lowlevel
import anyio.to_thread
import pynvml
import pytest
from structlog.testing import capture_logs

from metagpu.core.driver import EccError, GpuUnavailable, RecoveryAction, RecoveryActionChanged, Xid
from metagpu.core.errors import DriverError
from metagpu.nvml import Nvml, listening, session
from metagpu.sim.boards import BOARDS
from metagpu.sim.library import Library
from metagpu.sim.node import SimNode
from metagpu.sim.spec import simulated
from tests.nvml.rig import DEADLINE, altered, hurried, opened

BRIEF = 0.05


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have waits in which nothing happens take a moment."""
    monkeypatch.setattr(session, "SLICE", BRIEF)
    monkeypatch.setattr(listening, "SLICE", BRIEF)


async def test_a_burst_comes_in_one_batch() -> None:
    """XIDs that happened together are delivered together, in order, with their GPUs."""
    async with opened() as (node, nvml, survey):
        for index in range(3):
            node.raise_xid(node.gpu(index), 31)

        assert await nvml.events() == tuple(Xid(gpu.id, 31) for gpu in survey.gpus)


async def test_a_waiting_caller_hears_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An XID wakes the one who waits, long before the slice is over."""
    monkeypatch.setattr(session, "SLICE", DEADLINE)
    async with opened() as (node, nvml, survey), anyio.create_task_group() as group:
        began = time.monotonic()

        async def wait() -> None:
            assert await nvml.events() == (Xid(survey.gpus[2].id, 43),)
            assert time.monotonic() - began < DEADLINE

        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        node.raise_xid(node.gpu(2), 43)


async def test_a_wait_that_is_cancelled_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that can end a wait is told to, and the session's end does not sit it out."""
    monkeypatch.setattr(session, "SLICE", 600.0)
    async with opened() as (_, nvml, _), anyio.create_task_group() as group:
        group.start_soon(nvml.events)
        while not nvml.overdue:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()

    assert not nvml.overdue


async def test_a_wait_that_cannot_be_interrupted_ends_first() -> None:
    """With NVML's own library the event set is there until the thread has left it."""
    node, order = simulated("t4:1"), []
    waiting, released = threading.Event(), threading.Event()
    library = altered(node)
    free = library.nvmlEventSetFree

    def wait(*_: object) -> int:
        waiting.set()
        released.wait()
        order.append("waited")
        return int(pynvml.NVML_ERROR_TIMEOUT)

    def freed(events: object) -> int:
        order.append("freed")
        return free(events)

    library.nvmlEventSetWait_v2 = wait  # type: ignore[method-assign, assignment]
    library.nvmlEventSetFree = freed  # type: ignore[method-assign]
    nvml = Nvml(library, DEADLINE)
    async with nvml.session():
        await nvml.survey()
        async with anyio.create_task_group() as group:
            group.start_soon(nvml.events)
            await anyio.to_thread.run_sync(waiting.wait)
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
                assert not order
            released.set()

    assert order == ["waited", "freed"]


async def test_an_xid_inside_mig_names_its_instances() -> None:
    """Instance ids are given where NVML gives them, and are None where it says any."""
    async with opened() as (node, nvml, survey):
        node.raise_xid(node.gpu(0), 13, gi=7, ci=0)
        node.raise_xid(node.gpu(0), 13)

        gpu = survey.gpus[0].id
        assert await nvml.events() == (Xid(gpu, 13, 7, 0), Xid(gpu, 13))


async def test_memory_errors_and_recovery_actions_are_events() -> None:
    """An uncorrected error comes with its XID, and then what the GPU needs has changed."""
    async with opened() as (node, nvml, survey):
        gpu = survey.gpus[0].id
        node.ecc(node.gpu(0), double_bit=False)
        node.raise_xid(node.gpu(0), 48)

        assert await nvml.events() == (
            EccError(gpu, double_bit=False),
            Xid(gpu, 48),
            EccError(gpu, double_bit=True),
            RecoveryActionChanged(gpu),
        )
        condition = await nvml.condition(gpu)
        assert condition.recovery_action == RecoveryAction.GPU_RESET
        assert condition.ecc_uncorrected == 1


async def test_a_lost_gpu_is_named_by_the_wait_once() -> None:
    """NVML fails a wait without a name; we find the GPU, and then listen to the others."""
    async with opened() as (node, nvml, survey):
        node.lose(node.gpu(1))

        assert await nvml.events() == (GpuUnavailable(survey.gpus[1].id),)
        node.raise_xid(node.gpu(2), 31)
        assert await nvml.events() == (Xid(survey.gpus[2].id, 31),)
        assert set(node.event_sets[0].registered) == {0, 2}


async def test_a_gpu_that_comes_back_is_heard_again() -> None:
    """After a reset took the registration along, the next survey listens anew."""
    async with opened() as (node, nvml, survey):
        gpu = survey.gpus[1].id
        node.raise_xid(node.gpu(1), 79)
        await nvml.events()
        await nvml.survey()
        node.recover(node.gpu(1))
        assert await nvml.survey() == survey

        node.raise_xid(node.gpu(1), 31)
        assert await nvml.events() == (Xid(gpu, 31),)


async def test_a_gpu_that_falls_off_the_bus_changes_its_action_once() -> None:
    """What follows from its being lost is another event, not the same one again."""
    async with opened() as (node, nvml, survey):
        gpu = survey.gpus[0].id
        node.raise_xid(node.gpu(0), 79)

        assert await nvml.events() == (Xid(gpu, 79), RecoveryActionChanged(gpu))
        assert await nvml.events() == (GpuUnavailable(gpu),)


async def test_a_gpu_that_was_reset_is_heard_again() -> None:
    """A condition that is well again is reason enough to register anew, without a survey."""
    async with opened() as (node, nvml, survey):
        gpu = survey.gpus[0].id
        node.need(node.gpu(0), RecoveryAction.GPU_RESET)
        await nvml.events()
        assert (await nvml.condition(gpu)).recovery_action == RecoveryAction.GPU_RESET
        node.recover(node.gpu(0))
        assert (await nvml.condition(gpu)).recovery_action == RecoveryAction.NONE

        node.raise_xid(node.gpu(0), 31)
        assert await nvml.events() == (Xid(gpu, 31),)
        assert len(node.event_sets) == 1


async def test_looking_twice_registers_once() -> None:
    """A second survey neither makes a second event set nor delivers events twice."""
    async with opened() as (node, nvml, survey):
        await nvml.survey()
        node.raise_xid(node.gpu(0), 31)

        assert await nvml.events() == (Xid(survey.gpus[0].id, 31),)
        assert len(node.event_sets) == 1


async def test_an_added_gpu_is_found_and_heard() -> None:
    """A GPU that appears later is surveyed and listened to like the others."""
    async with opened() as (node, nvml, _):
        node.add_gpu(BOARDS["t4"])
        new = (await nvml.survey()).gpus[3]
        node.raise_xid(node.gpu(3), 31)

        assert new.name == "Tesla T4"
        assert await nvml.events() == (Xid(new.id, 31),)


@pytest.mark.usefixtures("brief")
async def test_a_gpu_without_events_is_known_as_one() -> None:
    """Where NVML has no events the survey says so, and waiting is a quiet second."""
    node = simulated("t4:1")
    library = altered(
        node, nvmlDeviceGetSupportedEventTypes=lambda *_: pynvml.NVML_ERROR_NOT_SUPPORTED
    )
    nvml = Nvml(library, DEADLINE)
    async with nvml.session():
        assert not (await nvml.survey()).gpus[0].listens
        assert not await nvml.events()


async def test_a_machine_without_event_sets_is_read_all_the_same() -> None:
    """Where not even an event set can be made, GPUs are known and not listened to."""
    node = simulated("t4:1")
    library = altered(node, nvmlEventSetCreate=lambda *_: pynvml.NVML_ERROR_NOT_SUPPORTED)
    nvml = Nvml(library, DEADLINE)
    async with nvml.session():
        assert not (await nvml.survey()).gpus[0].listens


async def test_a_spoiled_event_set_is_replaced() -> None:
    """After UNKNOWN the set is undefined: a new one is made, and everybody is heard."""
    node = simulated("t4:3")
    failures = [pynvml.NVML_ERROR_UNKNOWN] * 2
    real = Library.nvmlDeviceRegisterEvents
    library = altered(
        node,
        nvmlDeviceRegisterEvents=lambda *args: failures.pop() if failures else real(library, *args),
    )
    nvml = Nvml(library, DEADLINE)
    async with nvml.session():
        await nvml.survey()
        survey = await nvml.survey()
        for gpu in node.gpus:
            node.raise_xid(gpu, 31)

        assert all(gpu.listens for gpu in survey.gpus)
        assert await nvml.events() == tuple(Xid(gpu.id, 31) for gpu in survey.gpus)
        assert len(node.event_sets) == 1


async def test_a_failing_wait_keeps_nvmls_words() -> None:
    """A wait that fails is a DriverError with the call and NVML's text, for the caller to bear."""
    library = altered(simulated("t4:1"), nvmlEventSetWait_v2=lambda *_: pynvml.NVML_ERROR_UNKNOWN)
    nvml = Nvml(library, DEADLINE)
    async with nvml.session():
        await nvml.survey()
        with pytest.raises(DriverError, match="nvmlEventSetWait_v2: Unknown Error") as caught:
            await nvml.events()

    assert type(caught.value) is DriverError


@pytest.mark.usefixtures("brief")
async def test_a_lost_gpu_that_nobody_finds_does_not_spin() -> None:
    """When every GPU answers although NVML says one is lost, that is said once a second."""
    library = altered(
        simulated("t4:1"), nvmlEventSetWait_v2=lambda *_: pynvml.NVML_ERROR_GPU_IS_LOST
    )
    nvml = Nvml(library, DEADLINE)
    async with nvml.session():
        await nvml.survey()
        began = time.monotonic()
        assert await nvml.events() == (GpuUnavailable(None),)
        assert time.monotonic() - began >= BRIEF


def scarce(node: SimNode, failing: Iterable[int]) -> Library:
    """Make a library that cannot make the event sets with these numbers."""
    calls = 0

    def create(event_set: object) -> int:
        nonlocal calls
        calls += 1
        failed = calls in failing
        return pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES if failed else real(event_set)

    library = Library(node)
    real = library.nvmlEventSetCreate
    library.nvmlEventSetCreate = create  # type: ignore[method-assign, assignment]
    return library


@pytest.mark.usefixtures("brief")
async def test_a_set_that_cannot_be_replaced_is_told_once_and_tried_again() -> None:
    """Surveys and waits go on without it, and the next wait that can replace it does."""
    node = simulated("t4:3")
    nvml = Nvml(scarce(node, range(2, 6)), DEADLINE)
    async with nvml.session():
        survey = await nvml.survey()
        node.lose(node.gpu(1))
        with capture_logs() as logs:
            assert [u.index for u in (await nvml.survey()).unreadable] == [1]  # attempt 2
            assert await nvml.events() == ()  # 3, and 4 once the wait has failed
            assert [u.index for u in (await nvml.survey()).unreadable] == [1]  # 5
            assert await nvml.events() == ()  # 6, which works
            node.raise_xid(node.gpu(2), 31)
            assert await nvml.events() == (Xid(survey.gpus[2].id, 31),)

    assert [line["event"] for line in logs] == ["the NVML event set cannot be replaced yet"]
    assert "nvmlEventSetCreate" in logs[0]["error"]


@pytest.mark.usefixtures("brief")
async def test_a_condition_does_not_depend_on_the_event_set() -> None:
    """A GPU that is well again is said to be, once, also where the set cannot be replaced."""
    node = simulated("t4:2")
    nvml = Nvml(scarce(node, {2}), DEADLINE)
    async with nvml.session():
        gpu = (await nvml.survey()).gpus[0].id
        node.need(node.gpu(0), RecoveryAction.GPU_RESET)
        await nvml.events()
        await nvml.condition(gpu)
        node.recover(node.gpu(0))
        with capture_logs() as logs:
            assert (await nvml.condition(gpu)).recovery_action == RecoveryAction.NONE
            await nvml.condition(gpu)
        assert len(logs) == 1

        assert await nvml.events() == ()
        node.raise_xid(node.gpu(0), 31)
        assert await nvml.events() == (Xid(gpu, 31),)


async def test_a_wait_that_hangs_fails_no_survey() -> None:
    """While the wait is out the set cannot be replaced; GPUs are read all the same."""
    node, released = simulated("t4:2"), threading.Event()
    library = altered(
        node, nvmlEventSetWait_v2=lambda *_: released.wait() and pynvml.NVML_ERROR_TIMEOUT
    )
    nvml = Nvml(library, DEADLINE)
    async with nvml.session():
        gpu = (await nvml.survey()).gpus[0].id
        async with hurried(nvml, "NVML events"):
            with pytest.raises(DriverError, match="no answer"):
                await nvml.events()
        node.lose(node.gpu(0))
        assert [u.gpu for u in (await nvml.survey()).unreadable] == [gpu]
        node.recover(node.gpu(0))
        assert not (await nvml.survey()).unreadable
        await nvml.condition(gpu)
        released.set()


async def test_a_gpu_that_hangs_while_it_is_lost_leaves_the_set() -> None:
    """The wait says that a GPU is lost, and that one does not answer: it is taken for lost."""
    node, released = simulated("t4:2"), threading.Event()
    library = Library(node)
    memory = library.nvmlDeviceGetMemoryInfo_v2

    def hang(handle: object, answer: object) -> int:
        if lost and ctypes.cast(handle, ctypes.c_void_p).value == node.gpu(0).handle:  # type: ignore[arg-type]
            released.wait()
        return memory(handle, answer)

    def wait(event_set: object, data: object, patience: object) -> int:
        held = lost and 0 in node.event_sets[0].registered
        return pynvml.NVML_ERROR_GPU_IS_LOST if held else real(event_set, data, patience)

    real, lost = library.nvmlEventSetWait_v2, False
    library.nvmlDeviceGetMemoryInfo_v2 = hang  # type: ignore[method-assign, assignment]
    library.nvmlEventSetWait_v2 = wait  # type: ignore[method-assign, assignment]
    nvml = Nvml(library, DEADLINE)
    async with nvml.session():
        survey = await nvml.survey()
        lost = True

        async with hurried(nvml, "GPU 0"):
            assert await nvml.events() == (GpuUnavailable(survey.gpus[0].id),)
        node.raise_xid(node.gpu(1), 31)
        assert await nvml.events() == (Xid(survey.gpus[1].id, 31),)
        released.set()
