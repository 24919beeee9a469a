"""NVML behind our Driver, when things go wrong: on the simulator, which can be made to."""

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple

import anyio
import pynvml
import pytest

from metagpu.core.driver import EccError, RecoveryAction, RecoveryActionChanged, Survey, Xid
from metagpu.core.errors import DriverError, DriverTimeout, DriverUnavailable, GpuLost
from metagpu.core.model import MIB
from metagpu.nvml import Nvml
from metagpu.sim.boards import BOARDS
from metagpu.sim.library import Library
from metagpu.sim.node import SimNode, SimProcess
from metagpu.sim.spec import simulated

DEADLINE = 0.1


class Rig(NamedTuple):
    """A node, the driver on it, and its first survey."""

    node: SimNode
    nvml: Nvml
    survey: Survey


@asynccontextmanager
async def opened(what: str = "a100-40gb:3") -> AsyncIterator[Rig]:
    """Open a session on a simulated node and look around once."""
    node = simulated(what)
    nvml = Nvml(Library(node), DEADLINE)

    async with nvml.session():
        yield Rig(node, nvml, await nvml.survey())


def older(driver: str) -> tuple[SimNode, Nvml]:
    """Make a node with one A100 under another driver."""
    node = SimNode(driver)
    node.add_gpu(BOARDS["a100-40gb"])
    return node, Nvml(Library(node), DEADLINE)


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
        node.hang(node.gpu(0), 60)
        began = time.monotonic()
        with pytest.raises(DriverTimeout, match="GPU 0"):
            await nvml.condition(survey.gpus[0].id)
        assert DEADLINE <= time.monotonic() - began < 10 * DEADLINE

        began = time.monotonic()
        with pytest.raises(DriverTimeout, match="earlier"):
            await nvml.processes(survey.gpus[0].id)
        await nvml.condition(survey.gpus[1].id)
        assert time.monotonic() - began < DEADLINE
        assert nvml.overdue == [f"GPU 0 ({survey.gpus[0].id})"]

        assert [u.index for u in (await nvml.survey()).unreadable] == [0]
        node.recover(node.gpu(0))
        with anyio.fail_after(5):
            while nvml.overdue:
                await anyio.lowlevel.checkpoint()
        assert not (await nvml.survey()).unreadable


async def test_a_session_ends_although_a_gpu_hangs() -> None:
    """Leaving does not wait for a hung GPU, and the next session is not disturbed by it."""
    node = simulated("t4:2")
    nvml = Nvml(Library(node), DEADLINE)
    async with nvml.session():
        survey = await nvml.survey()
        node.hang(node.gpu(0), 60)
        with pytest.raises(DriverTimeout):
            await nvml.condition(survey.gpus[0].id)

    assert nvml.overdue
    node.recover(node.gpu(0))
    async with nvml.session():
        assert await nvml.survey() == survey


async def test_a_hanging_call_waits_for_its_deadline_when_cancelled() -> None:
    """Cancelling a call does not take NVML away from under its thread."""
    async with opened() as (node, nvml, survey):
        node.hang(node.gpu(0), 60)
        began = time.monotonic()
        with anyio.move_on_after(DEADLINE / 2), pytest.raises(DriverTimeout):
            await nvml.condition(survey.gpus[0].id)
        assert time.monotonic() - began >= DEADLINE
        node.recover(node.gpu(0))


async def test_a_lost_driver_is_one_error_and_a_new_session_works() -> None:
    """Without a driver every call says DriverUnavailable; after a reload a new session is fine."""
    async with opened() as (node, nvml, before):
        node.fail_driver()
        for call in (nvml.survey(), nvml.condition(before.gpus[0].id), nvml.events()):
            with pytest.raises(DriverUnavailable, match="modprobe nvidia"):
                await call
        node.restore_driver()
        with pytest.raises(DriverUnavailable, match="not initialised"):
            await nvml.survey()

    async with nvml.session():
        assert await nvml.survey() == before


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "modprobe nvidia"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reboot this node"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidiactl"),
        (pynvml.NVML_ERROR_UNKNOWN, "restart it"),
        (pynvml.NVML_ERROR_GPU_NOT_FOUND, "nvmlInit"),
    ],
)
async def test_a_session_that_cannot_open_says_what_to_do(code: int, advice: str) -> None:
    """Each reason for which NVML does not start becomes a message that a person can act on."""
    node = simulated("t4:1")
    node.fail_driver(code)

    with pytest.raises(DriverUnavailable, match=advice):
        await _enter(Nvml(Library(node)).session())


async def test_a_missing_library_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where libnvidia-ml is not there, the message says what to install or mount."""

    def missing(_name: str) -> None:
        raise OSError

    monkeypatch.setattr(pynvml, "CDLL", missing)
    with pytest.raises(DriverUnavailable, match=r"libnvidia-ml\.so\.1 cannot be loaded"):
        await _enter(Nvml().session())


async def test_two_libraries_at_once_are_refused() -> None:
    """Pynvml knows one library per process, so a second one is an error and not a mix-up."""
    async with opened():
        with pytest.raises(RuntimeError, match="another NVML library"):
            await _enter(Nvml(Library(simulated("t4:1"))).session())


async def test_pynvml_is_left_as_it_was() -> None:
    """After a session pynvml knows the library that it knew before."""
    before = pynvml.nvmlLib
    async with opened():
        assert isinstance(pynvml.nvmlLib, Library)

    assert pynvml.nvmlLib is before


async def test_a_burst_comes_in_one_batch() -> None:
    """XIDs that happened together are delivered together, in order, with their GPUs."""
    async with opened() as (node, nvml, survey):
        for index in range(3):
            node.raise_xid(node.gpu(index), 31)

        assert await nvml.events() == tuple(Xid(gpu.id, 31) for gpu in survey.gpus)


async def test_a_waiting_caller_hears_at_once() -> None:
    """An XID wakes the one who waits, long before the slice is over."""
    async with opened() as (node, nvml, survey), anyio.create_task_group() as group:
        began = time.monotonic()

        async def wait() -> None:
            assert await nvml.events() == (Xid(survey.gpus[2].id, 43),)
            assert time.monotonic() - began < 0.5

        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        node.raise_xid(node.gpu(2), 43)


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

        assert await nvml.events() == [RecoveryActionChanged(survey.gpus[1].id)]
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


async def test_what_a_gpu_does_not_support_is_unknown() -> None:
    """A T4 has no MIG and replaces no rows: None, and not False or zero."""
    async with opened("t4:1") as (_, nvml, survey):
        condition = await nvml.condition(survey.gpus[0].id)

    assert survey.gpus[0].mig_enabled is None
    assert condition.mig_enabled is None
    assert condition.remapped_rows is None


async def test_what_a_driver_does_not_know_is_unknown() -> None:
    """Driver 550 has no recovery action, neither as a value nor as an event."""
    node, nvml = older("550.163.01")
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        node.raise_xid(node.gpu(0), 95)

        assert (await nvml.condition(gpu.id)).recovery_action is None
        assert await nvml.events() == (Xid(gpu.id, 95),)


async def test_an_old_driver_has_only_the_first_memory_query() -> None:
    """Without version 2 of the query the reserved memory is unknown, and used is the same."""
    _, nvml = older("470.256.02")
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        used = (await nvml.condition(gpu.id)).memory_used

        assert gpu.reserved is None
        assert used == BOARDS["a100-40gb"].reserved * MIB
        with pytest.raises(DriverError, match="RunningProcesses"):
            await nvml.processes(gpu.id)


async def test_an_unknown_recovery_action_is_no_health() -> None:
    """A number that a future driver brings fails the device check rather than passing it."""
    async with opened() as (node, nvml, survey):
        node.gpu(0).recovery_action = 42  # type: ignore[assignment]
        with pytest.raises(DriverError, match="recovery action 42"):
            await nvml.condition(survey.gpus[0].id)


async def test_processes_are_listed_once_with_what_is_known() -> None:
    """A process with compute and graphics is one; memory that the driver hides is None."""
    async with opened() as (node, nvml, survey):
        gpu = node.gpu(0)
        node.add_process(gpu, SimProcess(11, 512 * MIB))
        node.add_process(gpu, SimProcess(11, 256 * MIB, gi=3, ci=0))
        node.add_process(gpu, SimProcess(12, None, graphics=True))
        found = await nvml.processes(survey.gpus[0].id)

        assert [(p.pid, p.memory, p.gpu_instance, p.compute_instance) for p in found] == [
            (11, 512 * MIB, None, None),
            (11, 256 * MIB, 3, 0),
            (12, None, None, None),
        ]
        assert not await nvml.processes(survey.gpus[1].id)


async def test_a_board_of_the_second_pci_domain_keeps_it() -> None:
    """PCI addresses have their domain in four digits, as in sysfs."""
    async with opened("a100-40gb:9") as (_, _, survey):
        assert survey.gpus[0].pci_bus_id == "0000:07:00.0"
        assert survey.gpus[8].pci_bus_id == "0001:07:00.0"
        assert [gpu.numa_node for gpu in survey.gpus[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]


async def _enter(session: AbstractAsyncContextManager[None]) -> None:
    async with session:
        pass
