"""A call that fails leaves a value unknown, and the GPU in service."""

from pathlib import Path

import pynvml
import pytest

from metagpu.core.contracts.driver import GpuProcess, RecoveryAction
from metagpu.core.errors import DriverError, GpuLost
from metagpu.nvml import answers
from metagpu.nvml.driver import NvmlDriver
from tests.nvml.rig import DEADLINE
from tests.rigs.logs import capture_module_logs
from tests.rigs.nvml_library import NvmlLibrary

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

    with capture_module_logs(answers) as logs:
        async with nvml.session():
            survey = await nvml.survey()
            assert (await nvml.survey()).gpus == survey.gpus

    _, other = survey.gpus
    assert (other.minor, other.pci_bus_id, other.mig_enabled) == (None, "", None)
    assert len([it for it in logs if it["event"] == "nvml value unknown"]) == len(functions)


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
        assert [it.index for it in survey.unreadable] == [1]
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
    assert [(it.index, V1 in it.reason) for it in survey.unreadable] == [(0, True)]


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
