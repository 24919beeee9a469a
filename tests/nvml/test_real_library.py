"""NVIDIA's own libnvidia-ml of several drivers, without a GPU: it loads, and lacks functions."""

import ctypes
from pathlib import Path

import pynvml
import pytest
from anyio import to_thread

from metagpu.core.contracts.driver import GpuProcess
from metagpu.core.errors import DriverUnavailable
from metagpu.core.model.driver_roots import RootOptions
from metagpu.host.driver_roots import find_roots
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
def package(request: pytest.FixtureRequest) -> Path:
    """Return the files of a driver's package; skip the test with the reason if there are none."""
    try:
        return provide(NVML, request.param)
    except RigError as error:
        pytest.skip(f"NVIDIA's library of driver {request.param} was not tested: {error}")


@pytest.fixture
def real(package: Path) -> ctypes.CDLL:
    """Return NVIDIA's own library of a driver."""
    [path] = package.rglob(NAME)
    return ctypes.CDLL(str(path))


@pytest.mark.skipif(LOADED.exists(), reason="this machine has a driver")
async def test_it_is_found_below_a_root(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of Debian's package is found in its own folder, and loaded without a linker."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    named = RootOptions(driver="/run/nvidia/driver", container_driver=str(package))
    roots = await to_thread.run_sync(find_roots, named)
    assert roots.library.endswith("/nvidia/current/libnvidia-ml.so.1")

    with pytest.raises(DriverUnavailable, match="modprobe nvidia"):
        async with NvmlDriver(find_libraries=lambda: roots.libraries).session():
            pass
    assert pynvml.nvmlLib._name == roots.library


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
            await nvml.activity(gpu.id)
            await nvml.sensors(gpu.id)
            await nvml.compute_mode(gpu.id)
            assert await nvml.mig.instances(gpu.id) == ()
        assert await nvml.processes(survey.gpus[0].id) == (GpuProcess(4711, GIB),)
