"""Sessions that cannot open, or lose the driver."""

import threading
from contextlib import AbstractAsyncContextManager

import anyio
import anyio.lowlevel
import pynvml
import pytest

from metagpu.core.errors import DriverTimeout, DriverUnavailable
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.nvml.rig import DEADLINE, altered_library, opened, skip_deadlines


async def test_a_lost_driver_is_one_error_and_a_new_session_works() -> None:
    """Without a driver every call raises DriverUnavailable; after a reload a new session works."""
    async with opened() as (node, nvml, before):
        node.unload_driver()
        for call in (nvml.survey(), nvml.condition(before.gpus[0].id), nvml.events()):
            with pytest.raises(DriverUnavailable, match="modprobe nvidia"):
                await call
        node.load_driver()
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
async def test_a_session_that_cannot_open_has_a_fix(code: int, advice: str) -> None:
    """Each reason for which NVML does not start becomes a message with a fix."""
    node = build_node("t4:1")
    node.unload_driver(code)

    with pytest.raises(DriverUnavailable, match=advice):
        await _enter(NvmlDriver(SimLibrary(node)).session())


async def test_a_missing_library_has_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without libnvidia-ml the message names the package to install or the folder to mount."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    with pytest.raises(DriverUnavailable, match=r"no-such-nvml\.so: cannot open.* --driver-root"):
        await _enter(NvmlDriver(find_libraries=lambda: ["no-such-nvml.so"]).session())


async def test_two_libraries_at_once_are_refused() -> None:
    """A second library is refused, as pynvml knows one library per process."""
    async with opened():
        with pytest.raises(RuntimeError, match="another NVML library"):
            await _enter(NvmlDriver(SimLibrary(build_node("t4:1"))).session())


async def test_pynvml_is_left_as_it_was() -> None:
    """After a session pynvml has the library that it had before."""
    before = pynvml.nvmlLib
    async with opened():
        assert isinstance(pynvml.nvmlLib, SimLibrary)

    assert pynvml.nvmlLib is before


async def test_a_session_ends_although_a_gpu_hangs() -> None:
    """A session ends without waiting for a hung GPU, and the next session works."""
    node = build_node("t4:2")
    nvml = NvmlDriver(SimLibrary(node), DEADLINE)
    async with nvml.session():
        survey = await nvml.survey()
        node.hang_gpu(node.gpu(0), 600)
        async with skip_deadlines(nvml, "GPU 0"):
            with pytest.raises(DriverTimeout):
                await nvml.condition(survey.gpus[0].id)

    assert nvml.unanswered_calls
    node.reset_gpu(node.gpu(0))
    async with nvml.session():
        assert await nvml.survey() == survey


async def test_an_nvml_that_hangs_at_its_start_costs_one_thread() -> None:
    """Later starts are refused until the first returns, which is reported as overdue."""
    released = threading.Event()
    calls: list[object] = []
    node = build_node("t4:1")

    def start(*flags: object) -> int:
        calls.append(flags)
        released.wait()
        return real(*flags)

    library = altered_library(node)
    real = library.nvmlInitWithFlags
    library.nvmlInitWithFlags = start  # type: ignore[method-assign, assignment]
    nvml = NvmlDriver(library, DEADLINE)
    async with skip_deadlines(nvml, "NVML"):
        with pytest.raises(DriverUnavailable, match="no answer"):
            await _enter(nvml.session())
    for _ in range(3):
        with pytest.raises(DriverUnavailable, match="has not returned"):
            await _enter(nvml.session())
    assert len(calls) == 1
    assert nvml.unanswered_calls == ["NVML"]

    released.set()
    with anyio.fail_after(30):
        while nvml.unanswered_calls:
            await anyio.lowlevel.checkpoint()
    async with nvml.session():
        assert (await nvml.survey()).gpus


async def _enter(session: AbstractAsyncContextManager[None]) -> None:
    async with session:
        pass
