"""Our driver on a library in C: what only a real library shows of the calls."""

from contextlib import nullcontext
from pathlib import Path

import pynvml
import pytest

from metagpu.core.contracts.driver import GpuProcess, Xid
from metagpu.core.errors import DriverError
from metagpu.nvml.driver import NvmlDriver
from tests.nvml.rig import DEADLINE
from tests.rigs.nvml_library import NvmlLibrary

GIB = 1 << 30
XID = pynvml.nvmlEventTypeXidCriticalError


@pytest.fixture
def library(tmp_path: Path) -> NvmlLibrary:
    """Return a library of two GPUs that work."""
    return NvmlLibrary(tmp_path / "nvml")


async def test_reads_structures_of_c(library: NvmlLibrary) -> None:
    """GPUs, conditions, profiles and processes of a C library are read as the library has them."""
    nvml = NvmlDriver(library.load(), DEADLINE)

    async with nvml.session():
        survey = await nvml.survey()
        library.add_process(1, 4711, GIB)
        one = survey.gpus[1]

        assert [gpu.memory for gpu in survey.gpus] == [16 * GIB, 16 * GIB]
        assert (one.pci_bus_id, one.minor, one.reserved) == ("0000:08:00.0", 1, GIB // 2)
        assert [(profile.name, profile.max_instances) for profile in one.mig_profiles] == [
            ("1g.2gb", 7)
        ]
        assert survey.topology.between(survey.gpus[0].id, one.id).nvlinks == 2
        assert (await nvml.condition(one.id)).memory_used == GIB + GIB // 2
        assert await nvml.processes(one.id) == (GpuProcess(4711, GIB),)


async def test_the_library_of_now_is_used(
    library: NvmlLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each session has the library of the driver's place of now; the same one is loaded once."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    paths, later = [str(library.path)], NvmlLibrary(tmp_path / "later")
    library.set("gpus", "-", 1)
    nvml = NvmlDriver(deadline=DEADLINE, find_libraries=lambda: ["/no/such/nvml.so", *paths])

    found = []
    for path in (paths[0], paths[0], str(later.path)):
        paths[:] = [path]
        async with nvml.session():
            found.append((len((await nvml.survey()).gpus), pynvml.nvmlLib))

    (one, first), (same, again), (two, other) = found
    assert (one, same, two) == (1, 1, 2)
    assert first is again is not other


async def test_hears_events_of_c(library: NvmlLibrary) -> None:
    """An event wakes the wait of a C library, with the GPU and the MIG instance it is about."""
    nvml = NvmlDriver(library.load(), DEADLINE)

    async with nvml.session():
        survey = await nvml.survey()
        library.event(1, XID, 79)
        library.event(0, XID, 31, (2, 0))

        assert await nvml.events() == (
            Xid(survey.gpus[1].id, 79),
            Xid(survey.gpus[0].id, 31, 2, 0),
        )


async def test_fails_and_works_again(library: NvmlLibrary) -> None:
    """A failure of one GPU's function fails that GPU's call, until the failure ends."""
    nvml = NvmlDriver(library.load(), DEADLINE)

    async with nvml.session():
        survey = await nvml.survey()
        one, other = (gpu.id for gpu in survey.gpus)
        library.fail("nvmlDeviceGetMemoryInfo_v2", 0, pynvml.NVML_ERROR_UNKNOWN)
        library.fail("nvmlDeviceGetMemoryInfo", 0, pynvml.NVML_ERROR_UNKNOWN)

        with pytest.raises(DriverError):
            await nvml.condition(one)
        await nvml.condition(other)
        library.work()
        await nvml.condition(one)


@pytest.mark.parametrize(
    ("code", "mig", "gone"),
    [
        (pynvml.NVML_ERROR_NOT_FOUND, 1, True),
        (pynvml.NVML_ERROR_INVALID_ARGUMENT, 1, False),
        (pynvml.NVML_ERROR_NOT_SUPPORTED, 1, False),
        (pynvml.NVML_ERROR_NOT_SUPPORTED, 0, True),
    ],
)
async def test_only_a_missing_instance_is_gone(
    library: NvmlLibrary, code: int, mig: int, *, gone: bool
) -> None:
    """An instance whose handle NVML refuses still exists, unless MIG is off."""
    library.set("mig", 0, mig)
    library.fail("nvmlDeviceGetGpuInstanceById", 0, code)
    nvml = NvmlDriver(library.load(), DEADLINE)

    async with nvml.session():
        gpu = (await nvml.survey()).gpus[0].id
        with nullcontext() if gone else pytest.raises(DriverError):
            await nvml.mig.destroy(gpu, 3)
