"""Values that NVML leaves out, or reports in unusual forms."""

from typing import Any

import pynvml
import pytest

from metagpu.core.contracts.driver import ComputeMode, RecoveryAction, Xid
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import MIB
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.gpu_models import GPU_MODELS
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.nvml.rig import DEADLINE, altered_library, opened


async def test_an_unsupported_value_is_unknown() -> None:
    """A T4 has no MIG and replaces no rows: None, and not False or zero."""
    async with opened("t4:1") as (_, nvml, survey):
        condition = await nvml.condition(survey.gpus[0].id)

    assert survey.gpus[0].mig_enabled is None
    assert condition.mig_enabled is None
    assert condition.remapped_rows is None


async def test_a_value_unknown_to_the_driver_is_unknown() -> None:
    """Driver 550 has no recovery action, neither as a value nor as an event."""
    node, nvml = older("550.163.01")
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        node.raise_xid(node.gpu(0), 95)

        assert (await nvml.condition(gpu.id)).recovery_action is None
        assert await nvml.events() == (Xid(gpu.id, 95),)


@pytest.mark.parametrize("action", [RecoveryAction.GPU_RESET, RecoveryAction.DRAIN_AND_RESET])
async def test_driver_560_reports_a_needed_reset(action: RecoveryAction) -> None:
    """Two older fields have a needed reset; that none is needed is no recovery action."""
    node, nvml = older("560.35.03")
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        found = [(await nvml.condition(gpu.id)).recovery_action]
        for each in (action, RecoveryAction.NONE):
            node.set_recovery_action(node.gpu(0), each)
            found.append((await nvml.condition(gpu.id)).recovery_action)

    assert found == [None, action, None]


async def test_an_old_driver_has_older_functions() -> None:
    """Driver 470 reserves unknown memory, uses the same, and lists processes."""
    node, nvml = older("470.256.02")
    node.start_process(node.gpu(0), SimProcess(11, 512 * MIB))
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        used = (await nvml.condition(gpu.id)).memory_used

        assert gpu.reserved is None
        assert used == (GPU_MODELS["a100-40gb"].reserved + 512) * MIB
        assert [it.pid for it in await nvml.processes(gpu.id)] == [11]


async def test_an_unknown_recovery_action_is_no_health() -> None:
    """An unknown number of a recovery action fails the device check."""
    async with opened() as (node, nvml, survey):
        node.gpu(0).recovery_action = 42  # type: ignore[assignment]
        with pytest.raises(DriverError, match="recovery action 42"):
            await nvml.condition(survey.gpus[0].id)


async def test_processes_are_listed_once() -> None:
    """A process with compute and graphics is one; memory that the driver hides is None."""
    async with opened() as (node, nvml, survey):
        gpu = node.gpu(0)
        node.start_process(gpu, SimProcess(11, 512 * MIB))
        node.start_process(gpu, SimProcess(11, 256 * MIB, gi=3, ci=0))
        node.start_process(gpu, SimProcess(12, None, graphics=True))
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


async def test_a_machine_without_numa_has_no_node() -> None:
    """An empty set of NUMA nodes is no node, and not node 0."""
    library = altered_library(
        build_node("t4:1"), nvmlDeviceGetMemoryAffinity=lambda *_: pynvml.NVML_SUCCESS
    )
    nvml = NvmlDriver(library, DEADLINE)
    async with nvml.session():
        assert (await nvml.survey()).gpus[0].numa_node is None


async def test_a_field_that_fails_is_unknown() -> None:
    """An error inside a field's answer is unknown, as an unknown field is."""
    codes = [pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_INVALID_ARGUMENT]

    def answer(_handle: object, _count: object, values: Any) -> int:  # noqa: ANN401
        values._obj[0].nvmlReturn = codes.pop()
        return 0

    nvml = NvmlDriver(
        altered_library(build_node("t4:1"), nvmlDeviceGetFieldValues=answer), DEADLINE
    )
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        assert (await nvml.condition(gpu.id)).recovery_action is None
        assert (await nvml.condition(gpu.id)).recovery_action is None


async def test_processes_that_start_meanwhile_are_listed() -> None:
    """A list that grows between NVML's two calls is read again."""
    node = build_node("t4:1")
    node.start_process(node.gpu(0), SimProcess(99, MIB))
    starting = list(range(1, 13))

    def growing(*args: object) -> int:
        code = SimLibrary.nvmlDeviceGetComputeRunningProcesses_v3(library, *args)
        while starting:
            node.start_process(node.gpu(0), SimProcess(starting.pop(), MIB))
        return code

    library = altered_library(node, nvmlDeviceGetComputeRunningProcesses_v3=growing)
    nvml = NvmlDriver(library, DEADLINE)
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        assert len(await nvml.processes(gpu.id)) == 13


def older(driver: str) -> tuple[SimNode, NvmlDriver]:
    """Build a node with one A100 under another driver."""
    node = SimNode(driver)
    node.add_gpu(GPU_MODELS["a100-40gb"])
    return node, NvmlDriver(SimLibrary(node), DEADLINE)


async def test_a_compute_mode_is_read_and_set() -> None:
    """A compute mode is set for one GPU alone, and ends with a reset."""
    async with opened() as (node, nvml, survey):
        first, second = (gpu.id for gpu in survey.gpus[:2])
        await nvml.set_compute_mode(first, ComputeMode.EXCLUSIVE_PROCESS)

        assert await nvml.compute_mode(first) is ComputeMode.EXCLUSIVE_PROCESS
        assert await nvml.compute_mode(second) is ComputeMode.DEFAULT
        node.reset_gpu(node.gpu(0))
        assert await nvml.compute_mode(first) is ComputeMode.DEFAULT


async def test_a_refused_compute_mode_has_its_reason() -> None:
    """A mode needs root, and is refused under MIG or when GPUs no longer have it."""
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


async def test_a_compute_mode_may_be_unknown() -> None:
    """A GPU that has no compute mode reports None."""
    library = altered_library(
        build_node("t4:1"), nvmlDeviceGetComputeMode=lambda *_: pynvml.NVML_ERROR_NOT_SUPPORTED
    )
    nvml = NvmlDriver(library, DEADLINE)
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        assert await nvml.compute_mode(gpu.id) is None
