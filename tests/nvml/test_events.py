"""Events: none is lost, none is delivered twice, and no fault makes the wait spin."""

import ctypes
import itertools
import threading
import time
from collections.abc import Iterable

import anyio
import anyio.lowlevel
import anyio.to_thread
import pynvml
import pytest
from structlog.testing import capture_logs

from metagpu.core.contracts.driver import (
    EccError,
    GpuUnavailable,
    RecoveryAction,
    RecoveryActionChanged,
    Xid,
)
from metagpu.core.errors import DriverError
from metagpu.nvml.driver import NvmlDriver
from metagpu.nvml.session_gpu import NvmlTiming
from metagpu.sim.machine.gpu_models import GPU_MODELS
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.nvml.rig import DEADLINE, altered_library, inside, opened, skip_deadlines
from tests.rigs.waiting import becomes

BRIEF = NvmlTiming(wait=0.05, event_retry=0.0)
"""Waits in which nothing happens take a moment, and what failed is tried again at once."""


def address(handle: object) -> int | None:
    """Return the address in a handle."""
    return ctypes.cast(handle, ctypes.c_void_p).value  # type: ignore[arg-type]


async def test_a_burst_comes_in_one_batch() -> None:
    """XIDs that happen together are delivered together, in order, with their GPUs."""
    async with opened() as (node, nvml, survey):
        for index in range(3):
            node.raise_xid(node.gpu(index), 31)

        assert await nvml.events() == tuple(Xid(gpu.id, 31) for gpu in survey.gpus)


async def test_a_waiting_caller_gets_an_event_at_once() -> None:
    """An XID wakes the waiting caller long before the time slice is over."""
    async with (
        opened(timing=NvmlTiming(wait=DEADLINE)) as (node, nvml, survey),
        anyio.create_task_group() as group,
    ):
        began = time.monotonic()

        async def wait() -> None:
            assert await nvml.events() == (Xid(survey.gpus[2].id, 43),)
            assert time.monotonic() - began < DEADLINE

        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        node.raise_xid(node.gpu(2), 43)


async def test_a_wait_is_no_unanswered_call() -> None:
    """Monitoring counts calls past their deadline, not the wait that each daemon is in."""
    async with (
        opened(timing=NvmlTiming(wait=600.0)) as (_, nvml, _),
        anyio.create_task_group() as group,
    ):
        group.start_soon(nvml.events)
        while "NVML events" not in inside(nvml):
            await anyio.lowlevel.checkpoint()
        assert nvml.has_threads
        assert not nvml.unanswered_calls
        group.cancel_scope.cancel()


async def test_a_wait_that_is_cancelled_is_interrupted() -> None:
    """A cancelled wait is interrupted where the library can, so that the session ends at once."""
    async with (
        opened(timing=NvmlTiming(wait=600.0)) as (_, nvml, _),
        anyio.create_task_group() as group,
    ):
        group.start_soon(nvml.events)
        while "NVML events" not in inside(nvml):
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()

    assert not nvml.has_threads


async def test_a_wait_that_cannot_be_interrupted_ends_first() -> None:
    """With NVML's own library the event set lasts until the waiting thread has left it."""
    node, order = build_node("t4:1"), []
    waiting, released = threading.Event(), threading.Event()
    library = altered_library(node)
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
    nvml = NvmlDriver(library, DEADLINE)
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
    """An XID has instance ids where NVML gives them, and None where NVML has none."""
    async with opened() as (node, nvml, survey):
        node.raise_xid(node.gpu(0), 13, gi=7, ci=0)
        node.raise_xid(node.gpu(0), 13)

        gpu = survey.gpus[0].id
        assert await nvml.events() == (Xid(gpu, 13, 7, 0), Xid(gpu, 13))


async def test_memory_errors_and_recovery_actions_are_events() -> None:
    """An uncorrected error is an XID event, then a change of the recovery action."""
    async with opened() as (node, nvml, survey):
        gpu = survey.gpus[0].id
        node.add_ecc_errors(node.gpu(0), double_bit=False)
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
    """NVML fails a wait without a name; the driver finds the lost GPU, once, and waits on."""
    async with opened() as (node, nvml, survey):
        node.lose_gpu(node.gpu(1))

        assert await nvml.events() == (GpuUnavailable(survey.gpus[1].id),)
        node.raise_xid(node.gpu(2), 31)
        assert await nvml.events() == (Xid(survey.gpus[2].id, 31),)
        assert set(node.event_sets[0].registered) == {0, 2}


async def test_a_gpu_that_comes_back_is_registered_again() -> None:
    """After a reset that removed the registration, the next survey registers again."""
    async with opened() as (node, nvml, survey):
        gpu = survey.gpus[1].id
        node.raise_xid(node.gpu(1), 79)
        await nvml.events()
        await nvml.survey()
        node.reset_gpu(node.gpu(1))
        assert await nvml.survey() == survey

        node.raise_xid(node.gpu(1), 31)
        assert await nvml.events() == (Xid(gpu, 31),)


async def test_a_gpu_that_falls_off_the_bus_changes_its_action_once() -> None:
    """A lost GPU's change of its recovery action is a second event, delivered once."""
    async with opened() as (node, nvml, survey):
        gpu = survey.gpus[0].id
        node.raise_xid(node.gpu(0), 79)

        assert await nvml.events() == (Xid(gpu, 79), RecoveryActionChanged(gpu))
        assert await nvml.events() == (GpuUnavailable(gpu),)


async def test_a_gpu_that_was_reset_is_registered_again() -> None:
    """A GPU that is healthy again is registered again, without a survey."""
    async with opened() as (node, nvml, survey):
        gpu = survey.gpus[0].id
        node.set_recovery_action(node.gpu(0), RecoveryAction.GPU_RESET)
        await nvml.events()
        assert (await nvml.condition(gpu)).recovery_action == RecoveryAction.GPU_RESET
        node.reset_gpu(node.gpu(0))
        assert (await nvml.condition(gpu)).recovery_action == RecoveryAction.NONE

        node.raise_xid(node.gpu(0), 31)
        assert await nvml.events() == (Xid(gpu, 31),)
        assert len(node.event_sets) == 1


async def test_two_surveys_register_once() -> None:
    """A second survey creates no second event set and delivers no event twice."""
    async with opened() as (node, nvml, survey):
        await nvml.survey()
        node.raise_xid(node.gpu(0), 31)

        assert await nvml.events() == (Xid(survey.gpus[0].id, 31),)
        assert len(node.event_sets) == 1


async def test_an_added_gpu_is_found_and_registered() -> None:
    """A GPU that appears later is surveyed and registered for events like the others."""
    async with opened() as (node, nvml, _):
        node.add_gpu(GPU_MODELS["t4"])
        new = (await nvml.survey()).gpus[3]
        node.raise_xid(node.gpu(3), 31)

        assert new.name == "Tesla T4"
        assert await nvml.events() == (Xid(new.id, 31),)


async def test_a_gpu_without_events_is_known_as_one() -> None:
    """A GPU without events is known as unheard, and a wait lasts its time without error."""
    node = build_node("t4:1")
    library = altered_library(
        node, nvmlDeviceGetSupportedEventTypes=lambda *_: pynvml.NVML_ERROR_NOT_SUPPORTED
    )
    nvml = NvmlDriver(library, DEADLINE, BRIEF)
    async with nvml.session():
        gpu = (await nvml.survey()).gpus[0].id
        assert not await nvml.events()
        assert nvml.unheard == {gpu: "this GPU or its driver reports no XIDs"}


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES]
)
async def test_a_machine_without_event_sets_is_read_all_the_same(code: int) -> None:
    """Without an event set the GPUs are read, and each is known as unheard with the reason."""
    library = altered_library(build_node("t4:1"), nvmlEventSetCreate=lambda *_: code)
    nvml = NvmlDriver(library, DEADLINE)
    async with nvml.session():
        gpu = (await nvml.survey()).gpus[0].id
        assert "nvmlEventSetCreate" in nvml.unheard[gpu]


async def test_a_spoiled_event_set_is_replaced() -> None:
    """After UNKNOWN the event set is replaced, and every GPU is registered again."""
    node = build_node("t4:3")
    failures = [pynvml.NVML_ERROR_UNKNOWN] * 2
    real = SimLibrary.nvmlDeviceRegisterEvents
    library = altered_library(
        node,
        nvmlDeviceRegisterEvents=lambda *args: failures.pop() if failures else real(library, *args),
    )
    nvml = NvmlDriver(library, DEADLINE)
    async with nvml.session():
        await nvml.survey()
        await nvml.renew_events()
        survey = await nvml.survey()
        for gpu in node.gpus:
            node.raise_xid(gpu, 31)

        assert not nvml.unheard
        assert await nvml.events() == tuple(Xid(gpu.id, 31) for gpu in survey.gpus)
        assert len(node.event_sets) == 1


async def test_a_failing_wait_keeps_nvmls_words() -> None:
    """A wait that fails is a DriverError with the call and NVML's text."""
    library = altered_library(
        build_node("t4:1"), nvmlEventSetWait_v2=lambda *_: pynvml.NVML_ERROR_UNKNOWN
    )
    nvml = NvmlDriver(library, DEADLINE)
    async with nvml.session():
        await nvml.survey()
        with pytest.raises(DriverError, match="nvmlEventSetWait_v2: Unknown Error") as caught:
            await nvml.events()

    assert type(caught.value) is DriverError


async def test_a_lost_gpu_that_cannot_be_found_does_not_spin() -> None:
    """A loss that NVML reports and no GPU confirms is one event a second."""
    library = altered_library(
        build_node("t4:1"), nvmlEventSetWait_v2=lambda *_: pynvml.NVML_ERROR_GPU_IS_LOST
    )
    nvml = NvmlDriver(library, DEADLINE, BRIEF)
    async with nvml.session():
        await nvml.survey()
        began = time.monotonic()
        assert await nvml.events() == (GpuUnavailable(None),)
        assert time.monotonic() - began >= BRIEF.wait


def scarce(node: SimNode, failing: Iterable[int]) -> SimLibrary:
    """Build a library that cannot create the event sets with these numbers."""
    calls = 0

    def create(event_set: object) -> int:
        nonlocal calls
        calls += 1
        failed = calls in failing
        return pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES if failed else real(event_set)

    library = SimLibrary(node)
    real = library.nvmlEventSetCreate
    library.nvmlEventSetCreate = create  # type: ignore[method-assign, assignment]
    return library


async def test_a_set_that_cannot_be_replaced_is_logged_once_and_tried_again() -> None:
    """Surveys and waits continue without the set, until a later wait replaces it."""
    node = build_node("t4:3")
    nvml = NvmlDriver(scarce(node, range(2, 6)), DEADLINE, BRIEF)
    async with nvml.session():
        survey = await nvml.survey()
        node.lose_gpu(node.gpu(1))
        with capture_logs() as logs:
            assert [u.index for u in (await nvml.survey()).unreadable] == [1]  # attempt 2
            assert await nvml.events() == ()  # 3, and 4 once the wait has failed
            assert [u.index for u in (await nvml.survey()).unreadable] == [1]  # 5
            assert await nvml.events() == ()  # 6, which works
            node.raise_xid(node.gpu(2), 31)
            assert await nvml.events() == (Xid(survey.gpus[2].id, 31),)

    assert [line["event"] for line in logs] == ["nvml event set unavailable"]
    assert "nvmlEventSetCreate" in logs[0]["error"]


async def test_a_condition_does_not_depend_on_the_event_set() -> None:
    """A recovered GPU is reported once, also where the set cannot be replaced."""
    node = build_node("t4:2")
    nvml = NvmlDriver(scarce(node, {2}), DEADLINE, BRIEF)
    async with nvml.session():
        gpu = (await nvml.survey()).gpus[0].id
        node.set_recovery_action(node.gpu(0), RecoveryAction.GPU_RESET)
        await nvml.events()
        await nvml.condition(gpu)
        node.reset_gpu(node.gpu(0))
        with capture_logs() as logs:
            assert (await nvml.condition(gpu)).recovery_action == RecoveryAction.NONE
            await nvml.condition(gpu)
        assert len(logs) == 1

        assert await nvml.events() == ()
        node.raise_xid(node.gpu(0), 31)
        assert await nvml.events() == (Xid(gpu, 31),)


async def test_a_wait_that_hangs_fails_no_survey() -> None:
    """While a wait hangs the set cannot be replaced, and GPUs are read as before."""
    node, released = build_node("t4:2"), threading.Event()
    library = altered_library(
        node, nvmlEventSetWait_v2=lambda *_: released.wait() and pynvml.NVML_ERROR_TIMEOUT
    )
    nvml = NvmlDriver(library, DEADLINE)
    async with nvml.session():
        gpu = (await nvml.survey()).gpus[0].id
        async with skip_deadlines(nvml, "NVML events"):
            with pytest.raises(DriverError, match="no answer"):
                await nvml.events()
        node.lose_gpu(node.gpu(0))
        assert [u.gpu for u in (await nvml.survey()).unreadable] == [gpu]
        node.reset_gpu(node.gpu(0))
        assert not (await nvml.survey()).unreadable
        await nvml.condition(gpu)
        released.set()


async def test_a_gpu_that_hangs_while_it_is_lost_leaves_the_set() -> None:
    """A GPU that hangs when the wait reports a loss is taken for lost."""
    node, released = build_node("t4:2"), threading.Event()
    library = SimLibrary(node)
    memory = library.nvmlDeviceGetMemoryInfo_v2

    def hang(handle: object, answer: object) -> int:
        if lost and address(handle) == node.gpu(0).handle:
            released.wait()
        return memory(handle, answer)

    def wait(event_set: object, data: object, patience: object) -> int:
        held = lost and 0 in node.event_sets[0].registered
        return pynvml.NVML_ERROR_GPU_IS_LOST if held else real(event_set, data, patience)

    real, lost = library.nvmlEventSetWait_v2, False
    library.nvmlDeviceGetMemoryInfo_v2 = hang
    library.nvmlEventSetWait_v2 = wait  # type: ignore[method-assign, assignment]
    nvml = NvmlDriver(library, DEADLINE)
    async with nvml.session():
        survey = await nvml.survey()
        lost = True

        async with skip_deadlines(nvml, "GPU 0"):
            assert await nvml.events() == (GpuUnavailable(survey.gpus[0].id),)
        node.raise_xid(node.gpu(1), 31)
        assert await nvml.events() == (Xid(survey.gpus[1].id, 31),)
        released.set()


async def test_a_renewal_loses_no_event_and_doubles_none() -> None:
    """Each event of the time in which the event set is replaced is delivered once."""
    node, raised, disturbs = build_node("t4:2"), list[int](), False
    library, codes = SimLibrary(node), itertools.count(1000)

    def disturbed(name: str) -> None:
        real, calls = getattr(library, name), 0

        def function(*arguments: object) -> int:
            nonlocal calls
            calls += disturbs
            if disturbs and calls <= 4:
                code = next(codes)
                raised.append(code)
                node.raise_xid(node.gpu(code % 2), code)
            return int(real(*arguments))

        setattr(library, name, function)

    for name in ("EventSetCreate", "DeviceRegisterEvents", "EventSetWait_v2", "EventSetFree"):
        disturbed(f"nvml{name}")
    nvml = NvmlDriver(library, DEADLINE)
    async with nvml.session():
        await nvml.survey()
        disturbs = True
        for _ in range(4):
            await nvml.renew_events()
        disturbs = False
        heard = [event.code for event in await nvml.events() if isinstance(event, Xid)]

    assert len(raised) >= 16
    assert sorted(heard) == sorted(raised)


async def test_a_gpu_with_a_call_under_way_is_registered_again_too() -> None:
    """A renewal waits for the call of a busy GPU, and leaves the GPU in the set."""
    node, released = build_node("t4:2"), threading.Event()
    library = SimLibrary(node)
    memory = library.nvmlDeviceGetMemoryInfo_v2

    released.set()

    def slow(*arguments: object) -> int:
        released.wait()
        return memory(*arguments)

    library.nvmlDeviceGetMemoryInfo_v2 = slow
    nvml = NvmlDriver(library, DEADLINE)
    async with nvml.session():
        gpu = (await nvml.survey()).gpus[0].id
        released.clear()
        async with anyio.create_task_group() as group:
            group.start_soon(nvml.condition, gpu)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(nvml.renew_events)
            await anyio.wait_all_tasks_blocked()
            released.set()

        assert set(node.event_sets[0].registered) == {0, 1}
        assert not nvml.unheard


async def test_a_gpu_that_spoils_the_set_leaves_the_others_heard() -> None:
    """One GPU's registration fails: the others are heard, and the failure is logged once."""
    node, sets = build_node("t4:2"), 0
    library = SimLibrary(node)
    register, create = library.nvmlDeviceRegisterEvents, library.nvmlEventSetCreate

    def refuse(gpu: object, types: object, events: object) -> int:
        if address(gpu) == node.gpu(0).handle:
            return int(pynvml.NVML_ERROR_UNKNOWN)
        return register(gpu, types, events)

    def count(events: object) -> int:
        nonlocal sets
        sets += 1
        return create(events)

    library.nvmlDeviceRegisterEvents = refuse  # type: ignore[method-assign, assignment]
    library.nvmlEventSetCreate = count  # type: ignore[method-assign]
    nvml = NvmlDriver(library, DEADLINE, BRIEF)
    async with nvml.session():
        with capture_logs() as logs:
            spoiling, other = (gpu.id for gpu in (await nvml.survey()).gpus)
            for code in range(20):
                node.raise_xid(node.gpu(1), code)
                assert await nvml.events() == (Xid(other, code),)
                await nvml.survey()
        assert list(nvml.unheard) == [spoiling]
        assert "Unknown Error" in nvml.unheard[spoiling]

    assert [line["event"] for line in logs] == ["gpu events unheard"]
    assert sets <= 3


async def test_a_wait_that_keeps_failing_makes_every_gpu_unheard() -> None:
    """While NVML's wait fails, each GPU is unheard with NVML's words; then it is heard again."""
    library, fails = SimLibrary(build_node("t4:2")), True
    real = library.nvmlEventSetWait_v2
    library.nvmlEventSetWait_v2 = (  # type: ignore[method-assign]
        lambda *args: pynvml.NVML_ERROR_UNKNOWN if fails else real(*args)
    )
    nvml = NvmlDriver(library, DEADLINE, BRIEF)
    async with nvml.session():
        gpus = [gpu.id for gpu in (await nvml.survey()).gpus]
        for _ in range(3):
            with pytest.raises(DriverError):
                await nvml.events()
        assert nvml.unheard.keys() == set(gpus)
        assert all("nvmlEventSetWait_v2" in reason for reason in nvml.unheard.values())

        fails = False
        await nvml.events()
        assert not nvml.unheard


async def test_a_failing_set_is_replaced_ever_more_seldom() -> None:
    """Each failure doubles the time until the next replacement."""
    created = 0

    def refuse(*_: object) -> int:
        nonlocal created
        created += 1
        return int(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)

    nvml = NvmlDriver(
        altered_library(build_node("t4:1"), nvmlEventSetCreate=refuse),
        DEADLINE,
        NvmlTiming(wait=0.001, event_retry=3600.0),
    )
    async with nvml.session():
        await nvml.survey()
        for _ in range(10):
            assert not await nvml.events()
    assert created == 2


async def test_a_set_is_not_freed_under_a_registration_that_hangs() -> None:
    """A set is kept while a call with it has not returned, and freed once it has."""
    node, released, freed = build_node("t4:2"), threading.Event(), list[int | None]()
    library = SimLibrary(node)
    register, free = library.nvmlDeviceRegisterEvents, library.nvmlEventSetFree
    hangs, hanging = False, list[int | None]()

    def hang(gpu: object, types: object, events: object) -> int:
        if hangs and address(gpu) == node.gpu(0).handle and not hanging:
            hanging.append(address(events))
            released.wait()
        return register(gpu, types, events)

    def note(events: object) -> int:
        freed.append(address(events))
        return free(events)

    library.nvmlDeviceRegisterEvents = hang  # type: ignore[method-assign, assignment]
    library.nvmlEventSetFree = note  # type: ignore[method-assign]
    nvml = NvmlDriver(library, DEADLINE)
    async with nvml.session():
        await nvml.survey()
        hangs = True
        async with skip_deadlines(nvml, "GPU 0"):
            await nvml.renew_events()
        await nvml.renew_events()
        assert hanging
        assert not set(hanging) & set(freed)

        released.set()
        await becomes(lambda: not nvml.has_threads)
        await nvml.condition((await nvml.survey()).gpus[0].id)
        await nvml.renew_events()
        assert set(hanging) <= set(freed)


async def test_a_set_that_was_freed_takes_no_registration() -> None:
    """A registration that begins late, after its set was replaced, does not touch the freed set."""
    library = SimLibrary(build_node("t4:1"))
    register, sets = library.nvmlDeviceRegisterEvents, list[object]()

    def record(gpu: object, types: object, events: object) -> int:
        sets.append(events)
        return register(gpu, types, events)

    library.nvmlDeviceRegisterEvents = record  # type: ignore[method-assign, assignment]
    nvml = NvmlDriver(library, DEADLINE, BRIEF)
    async with nvml.session():
        await nvml.survey()
        assert nvml._session is not None
        events = nvml._session.events
        event_set = events.event_set
        freed, (known,) = event_set.handle, events.gpus.values()
        await nvml.renew_events()
        before = len(sets)

        assert not event_set.register(known.handle, freed).types
        assert event_set.register(known.handle).types
        assert len(sets) == before + 1
