"""NVIDIA's own libnvidia-ml of several drivers, without a GPU: it loads, and lacks functions."""

import ctypes
from pathlib import Path

import pytest

from metagpu.core.contracts.driver import GpuProcess
from metagpu.core.errors import DriverUnavailable
from metagpu.nvml.driver import NvmlDriver
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.nvidia_packages import DRIVERS, NVML, provide
from tests.fuzz.test_nvml import FUNCTIONS
from tests.nvml.rig import DEADLINE
from tests.rigs.nvml_library import NAME, NvmlLibrary

GIB = 1 << 30
LOADED = Path("/proc/driver/nvidia/version")

pytestmark = pytest.mark.e2e


@pytest.fixture(params=DRIVERS)
def real(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Return NVIDIA's own library of a driver; skip the test with the reason if there is none."""
    try:
        [path] = provide(NVML, request.param).rglob(NAME)
    except RigError as error:
        pytest.skip(f"NVIDIA's library of driver {request.param} was not tested: {error}")
    return ctypes.CDLL(str(path))


@pytest.mark.skipif(LOADED.exists(), reason="this machine has a driver")
async def test_a_library_without_a_driver_has_a_fix(real: ctypes.CDLL) -> None:
    """NVIDIA's library says that no driver is loaded, and the message says how to load it."""
    with pytest.raises(DriverUnavailable, match="modprobe nvidia"):
        async with NvmlDriver(real, DEADLINE).session():
            pass


async def test_functions_that_a_driver_lacks(real: ctypes.CDLL, tmp_path: Path) -> None:
    """GPUs and processes are read by the functions of this driver alone."""
    missing = [name for name in FUNCTIONS if not hasattr(real, name)]
    library = NvmlLibrary(tmp_path / "nvml", missing)
    library.add_process(0, 4711, GIB)
    nvml = NvmlDriver(library.load(), DEADLINE)

    async with nvml.session():
        survey = await nvml.survey()
        assert not survey.unreadable
        for gpu in survey.gpus:
            await nvml.condition(gpu.id)
            await nvml.utilization(gpu.id)
            await nvml.compute_mode(gpu.id)
            assert await nvml.mig.instances(gpu.id) == ()
        assert await nvml.processes(survey.gpus[0].id) == (GpuProcess(4711, GIB),)
