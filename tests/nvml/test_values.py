"""Values that NVML leaves out, or reports in unusual forms."""

from pathlib import Path
from typing import Any

import pynvml
import pytest

from metagpu.core.contracts.driver import ComputeMode, GpuProcess, RecoveryAction, Xid
from metagpu.core.errors import DriverError, GpuLost
from metagpu.core.model.gpu import MIB
from metagpu.nvml import errors
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.gpu_models import GPU_MODELS
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.nvml.rig import DEADLINE, altered_library, opened
from tests.rigs.logs import capture_module_logs
from tests.rigs.nvml_library import NvmlLibrary


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
        assert [process.pid for process in await nvml.processes(gpu.id)] == [11]


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


async def test_what_few_machines_have_is_read_where_it_is() -> None:
    """PCI class, NVLink domain of several nodes and vGPU are read; older drivers lack some."""
    async with opened("a100-40gb:2,dgx-display") as (node, nvml, survey):
        assert [gpu.pci_class for gpu in survey.gpus] == [0x0302, 0x0302, 0x0300]
        assert [gpu.ecc for gpu in survey.gpus] == [True, True, None]
        assert {(gpu.clique, gpu.virtual) for gpu in survey.gpus} == {(None, False)}

        node.gpu(0).clique = "c0ffee00-0000-0000-0000-000000000001", 7
        node.gpu(1).clique = "00000000-0000-0000-0000-000000000000", 7
        node.gpu(1).virtualization = pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU
        first, second, _ = (await nvml.survey()).gpus
        assert first.clique == "c0ffee00-0000-0000-0000-000000000001.7"
        assert not second.clique
        assert second.virtual

    node, old = older("470.256.02")
    async with old.session():
        [gpu] = (await old.survey()).gpus
        assert (gpu.pci_class, gpu.clique) == (None, None)


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


GIB = 1 << 30
V1, V2 = "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"
V3 = "nvmlDeviceGetComputeRunningProcesses_v3"
UNKNOWN = pynvml.NVML_ERROR_UNKNOWN
EARLY_535 = ("nvmlDeviceGetRunningProcessDetailList",)
DRIVER_470 = (
    V2,
    V3,
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetRunningProcessDetailList",
    "nvmlDeviceGetConfComputeMemSizeInfo",
    "nvmlDeviceSetMemoryLimits_v1",
    "nvmlDeviceGetMemoryLimits_v1",
)


@pytest.fixture
def library(tmp_path: Path) -> NvmlLibrary:
    """Return a library of two GPUs that work."""
    return NvmlLibrary(tmp_path / "nvml")


async def test_versions_feed_labels_alone(library: NvmlLibrary) -> None:
    """Without libcuda NVML does not know CUDA's version, and the GPUs are read."""
    nvml = NvmlDriver(library.load(), DEADLINE)
    library.fail("nvmlSystemGetCudaDriverVersion_v2", "-", pynvml.NVML_ERROR_NOT_FOUND)
    library.fail("nvmlSystemGetDriverVersion", "-", UNKNOWN)

    async with nvml.session():
        survey = await nvml.survey()
        assert len(survey.gpus) == 2
        assert (survey.driver_version, survey.cuda_version) == ("", None)

        library.work()
        later = await nvml.survey()
        assert (later.driver_version, later.cuda_version) == ("550.163.01", None)

        library.fail("nvmlSystemGetDriverVersion", "-", UNKNOWN)
        library.fail("nvmlSystemGetCudaDriverVersion_v2", "-", UNKNOWN)
        assert (await nvml.survey()).driver_version == "550.163.01"


@pytest.mark.parametrize("code", [UNKNOWN, pynvml.NVML_ERROR_INVALID_ARGUMENT])
async def test_unknown_values_are_logged_once(library: NvmlLibrary, code: int) -> None:
    """A GPU without minor number, PCI address and MIG mode is offered, and the log says so once."""
    functions = ("nvmlDeviceGetMinorNumber", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMigMode")
    nvml = NvmlDriver(library.load(), DEADLINE)
    for function in functions:
        library.fail(function, 1, code)

    with capture_module_logs(errors) as logs:
        async with nvml.session():
            survey = await nvml.survey()
            assert (await nvml.survey()).gpus == survey.gpus

    _, other = survey.gpus
    assert (other.minor, other.pci_bus_id, other.mig_enabled) == (None, "", None)
    assert len([log for log in logs if log["event"] == "nvml value unknown"]) == len(functions)


async def test_a_later_failure_keeps_the_value(library: NvmlLibrary) -> None:
    """A value that was read once stays known while its function fails."""
    nvml = NvmlDriver(library.load(), DEADLINE)
    library.set("mig", 1, 1)

    async with nvml.session():
        before = await nvml.survey()
        library.fail("nvmlDeviceGetMigMode", 1, UNKNOWN)
        library.fail("nvmlDeviceGetName", 1, UNKNOWN)

        assert (await nvml.survey()).gpus == before.gpus


async def test_a_lost_gpu_is_lost_by_any_call(library: NvmlLibrary) -> None:
    """A call that nothing depends on still reports that its GPU is lost."""
    nvml = NvmlDriver(library.load(), DEADLINE)
    library.fail("nvmlDeviceGetEccMode", 1, pynvml.NVML_ERROR_GPU_IS_LOST)

    async with nvml.session():
        survey = await nvml.survey()
        assert [unreadable_gpu.index for unreadable_gpu in survey.unreadable] == [1]
        library.work()
        [_, gpu] = (await nvml.survey()).gpus
        library.fail("nvmlDeviceGetRemappedRows", 1, pynvml.NVML_ERROR_GPU_IS_LOST)
        with pytest.raises(GpuLost):
            await nvml.condition(gpu.id)


async def test_a_needed_recovery_stays_needed(library: NvmlLibrary) -> None:
    """A recovery action outlasts failures of its read; "none" does not: it would be old news."""
    nvml = NvmlDriver(library.load(), DEADLINE)

    async with nvml.session():
        one, other = (gpu.id for gpu in (await nvml.survey()).gpus)
        library.set("action", 0, RecoveryAction.GPU_RESET)
        await nvml.condition(one)
        await nvml.condition(other)
        library.fail("nvmlDeviceGetFieldValues", "*", UNKNOWN)

        assert (await nvml.condition(one)).recovery_action is RecoveryAction.GPU_RESET
        assert (await nvml.condition(other)).recovery_action is None


async def test_the_older_memory_query_is_enough(library: NvmlLibrary) -> None:
    """WSL2 refuses the newer memory query with UNKNOWN; the older one is used then."""
    nvml = NvmlDriver(library.load(), DEADLINE)
    library.fail(V2, "*", UNKNOWN)

    async with nvml.session():
        [gpu, _] = (await nvml.survey()).gpus
        assert (gpu.memory, gpu.reserved) == (16 * GIB, None)
        assert (await nvml.condition(gpu.id)).memory_used == GIB // 2


async def test_a_gpu_without_memory_of_its_own(library: NvmlLibrary) -> None:
    """A GPU on the machine's memory passes its check, and its memory is unknown."""
    nvml = NvmlDriver(library.load(), DEADLINE)
    for function in (V1, V2):
        library.fail(function, 0, pynvml.NVML_ERROR_NOT_SUPPORTED)

    async with nvml.session():
        gpu = (await nvml.survey()).gpus[0]
        assert (gpu.memory, gpu.reserved, gpu.mig_profiles) == (None, None, ())
        assert (await nvml.condition(gpu.id)).memory_used is None


async def test_a_memory_that_fails_is_no_unknown_memory(library: NvmlLibrary) -> None:
    """A GPU whose memory cannot be read for another reason cannot be read."""
    nvml = NvmlDriver(library.load(), DEADLINE)
    for function in (V1, V2):
        library.fail(function, 0, UNKNOWN)

    async with nvml.session():
        survey = await nvml.survey()
    assert [(gpu.index, V1 in gpu.reason) for gpu in survey.unreadable] == [(0, True)]


async def test_long_entries_of_early_535(tmp_path: Path) -> None:
    """Drivers 535.43 to 535.86 list processes in 32 bytes under the name of the 24-byte list."""
    library = NvmlLibrary(tmp_path / "nvml", missing=EARLY_535)
    library.set("entry", "-", 32)
    for pid in (11, 12, 13):
        library.add_process(0, pid, pid * GIB)
    nvml = NvmlDriver(library.load(), DEADLINE)

    async with nvml.session():
        survey = await nvml.survey()
        assert await nvml.processes(survey.gpus[0].id) == (
            GpuProcess(11, 11 * GIB),
            GpuProcess(12, 12 * GIB),
            GpuProcess(13, 13 * GIB),
        )
        assert await nvml.processes(survey.gpus[1].id) == ()

        library.fail(V3, 0, UNKNOWN)
        with pytest.raises(DriverError):
            await nvml.processes(survey.gpus[0].id)


async def test_driver_470_lists_processes(tmp_path: Path) -> None:
    """Driver 470 has version 2 of the process list alone, with the same entries."""
    library = NvmlLibrary(tmp_path / "nvml", missing=DRIVER_470)
    library.add_process(1, 4711, GIB)
    nvml = NvmlDriver(library.load(), DEADLINE)

    async with nvml.session():
        survey = await nvml.survey()
        assert survey.gpus[0].memory == 16 * GIB
        assert await nvml.processes(survey.gpus[1].id) == (GpuProcess(4711, GIB),)


@pytest.mark.parametrize(("mask", "node"), [(0b1, 0), (0b100, 2), (0b11, None), (0, None)])
async def test_a_gpu_near_several_numa_nodes_has_none(
    library: NvmlLibrary, mask: int, node: int | None
) -> None:
    """A GPU belongs to a NUMA node only if that is the only one near it."""
    library.set("numa", 0, mask)
    nvml = NvmlDriver(library.load(), DEADLINE)

    async with nvml.session():
        assert (await nvml.survey()).gpus[0].numa_node == node
