"""What NVML leaves out, and what it says in odd ways."""

from typing import Any

import pynvml
import pytest

from metagpu.core.driver import ComputeMode, Xid
from metagpu.core.errors import DriverError
from metagpu.core.gpu import MIB
from metagpu.nvml import Nvml
from metagpu.sim.boards import BOARDS
from metagpu.sim.gpu import SimProcess
from metagpu.sim.library import Library
from metagpu.sim.node import SimNode
from metagpu.sim.spec import simulated
from tests.nvml.rig import DEADLINE, altered, opened


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
        assert survey.gpus[0].pci_device == 0x20B010DE
        assert survey.gpus[8].pci_bus_id == "0001:07:00.0"
        assert [gpu.numa_node for gpu in survey.gpus[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]


async def test_a_machine_without_numa_says_none() -> None:
    """An empty set of NUMA nodes is no node, and not node 0."""
    library = altered(simulated("t4:1"), nvmlDeviceGetMemoryAffinity=lambda *_: pynvml.NVML_SUCCESS)
    nvml = Nvml(library, DEADLINE)
    async with nvml.session():
        assert (await nvml.survey()).gpus[0].numa_node is None


async def test_a_field_that_fails_fails_the_check() -> None:
    """An error inside the answer for a field is an error, while an unknown field is None."""
    codes = [pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_INVALID_ARGUMENT]

    def answer(_handle: object, _count: object, values: Any) -> int:  # noqa: ANN401
        values._obj[0].nvmlReturn = codes.pop()
        return 0

    nvml = Nvml(altered(simulated("t4:1"), nvmlDeviceGetFieldValues=answer), DEADLINE)
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        assert (await nvml.condition(gpu.id)).recovery_action is None
        with pytest.raises(DriverError, match="Unknown Error"):
            await nvml.condition(gpu.id)


async def test_processes_that_start_meanwhile_are_listed() -> None:
    """A list that has grown between NVML's two calls is asked for again."""
    node = simulated("t4:1")
    node.add_process(node.gpu(0), SimProcess(99, MIB))
    starting = list(range(1, 13))

    def growing(*args: object) -> int:
        code = Library.nvmlDeviceGetComputeRunningProcesses_v3(library, *args)
        while starting:
            node.add_process(node.gpu(0), SimProcess(starting.pop(), MIB))
        return code

    library = altered(node, nvmlDeviceGetComputeRunningProcesses_v3=growing)
    nvml = Nvml(library, DEADLINE)
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        assert len(await nvml.processes(gpu.id)) == 13


def older(driver: str) -> tuple[SimNode, Nvml]:
    """Make a node with one A100 under another driver."""
    node = SimNode(driver)
    node.add_gpu(BOARDS["a100-40gb"])
    return node, Nvml(Library(node), DEADLINE)


async def test_a_compute_mode_is_read_and_set() -> None:
    """Who may compute on a GPU is said for that GPU alone, and a reset forgets it."""
    async with opened() as (node, nvml, survey):
        first, second = (gpu.id for gpu in survey.gpus[:2])
        await nvml.set_compute_mode(first, ComputeMode.EXCLUSIVE_PROCESS)

        assert await nvml.compute_mode(first) is ComputeMode.EXCLUSIVE_PROCESS
        assert await nvml.compute_mode(second) is ComputeMode.DEFAULT
        node.recover(node.gpu(0))
        assert await nvml.compute_mode(first) is ComputeMode.DEFAULT


async def test_a_compute_mode_that_is_refused_says_why() -> None:
    """Only root may set a mode; one that GPUs have no more, or not under MIG, cannot be set."""
    async with opened() as (node, nvml, survey):
        gpu = survey.gpus[0].id
        with pytest.raises(DriverError, match=r"nvmlDeviceSetComputeMode: Not Supported"):
            await nvml.set_compute_mode(gpu, ComputeMode.EXCLUSIVE_THREAD)

        node.gpu(0).mig.enabled = True
        with pytest.raises(DriverError, match=r"nvmlDeviceSetComputeMode: Not Supported"):
            await nvml.set_compute_mode(gpu, ComputeMode.EXCLUSIVE_PROCESS)

        node.root = False
        with pytest.raises(DriverError) as refused:
            await nvml.set_compute_mode(gpu, ComputeMode.EXCLUSIVE_PROCESS)
        assert str(refused.value) == (
            "the compute mode cannot be set to exclusive process: only root may; run metagpu as "
            "root"
        )
        assert await nvml.compute_mode(gpu) is ComputeMode.DEFAULT


async def test_a_compute_mode_may_be_unsaid() -> None:
    """A GPU that has no compute mode says None."""
    library = altered(
        simulated("t4:1"), nvmlDeviceGetComputeMode=lambda *_: pynvml.NVML_ERROR_NOT_SUPPORTED
    )
    nvml = Nvml(library, DEADLINE)
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        assert await nvml.compute_mode(gpu.id) is None
