"""Sessions that cannot open, or lose the driver."""

import threading
from contextlib import AbstractAsyncContextManager

import anyio
import anyio.lowlevel
import pynvml
import pytest

from metagpu.core.errors import DriverTimeout, DriverUnavailable
from metagpu.nvml import Nvml
from metagpu.sim.library import Library
from metagpu.sim.spec import simulated
from tests.nvml.rig import DEADLINE, altered, hurried, opened


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


async def test_a_session_ends_although_a_gpu_hangs() -> None:
    """Leaving does not wait for a hung GPU, and the next session is not disturbed by it."""
    node = simulated("t4:2")
    nvml = Nvml(Library(node), DEADLINE)
    async with nvml.session():
        survey = await nvml.survey()
        node.hang(node.gpu(0), 600)
        async with hurried(nvml, "GPU 0"):
            with pytest.raises(DriverTimeout):
                await nvml.condition(survey.gpus[0].id)

    assert nvml.overdue
    node.recover(node.gpu(0))
    async with nvml.session():
        assert await nvml.survey() == survey


async def test_an_nvml_that_hangs_at_its_start_costs_one_thread() -> None:
    """Retries are refused at once until the first has come back, and it is named as overdue."""
    released = threading.Event()
    calls: list[object] = []
    node = simulated("t4:1")

    def start(*flags: object) -> int:
        calls.append(flags)
        released.wait()
        return real(*flags)

    library = altered(node)
    real = library.nvmlInitWithFlags
    library.nvmlInitWithFlags = start  # type: ignore[method-assign, assignment]
    nvml = Nvml(library, DEADLINE)
    async with hurried(nvml, "NVML"):
        with pytest.raises(DriverUnavailable, match="no answer"):
            await _enter(nvml.session())
    for _ in range(3):
        with pytest.raises(DriverUnavailable, match="has not come back"):
            await _enter(nvml.session())
    assert len(calls) == 1
    assert nvml.overdue == ["NVML"]

    released.set()
    with anyio.fail_after(30):
        while nvml.overdue:
            await anyio.lowlevel.checkpoint()
    async with nvml.session():
        assert (await nvml.survey()).gpus


async def _enter(session: AbstractAsyncContextManager[None]) -> None:
    async with session:
        pass
