"""GPUs that are not heard, with a C library of NVML: its wait cannot be interrupted."""

from pathlib import Path

import anyio
import pynvml
import pytest
from anyio import to_thread

from metagpu.core.contracts.driver import Xid
from metagpu.core.errors import DriverError
from metagpu.nvml.driver import NvmlDriver
from metagpu.nvml.session_gpu import NvmlTiming
from tests.nvml.rig import DEADLINE
from tests.rigs.nvml_library import NvmlLibrary

XID = pynvml.nvmlEventTypeXidCriticalError
TIMING = NvmlTiming(wait=0.1, event_retry=0.0)


async def test_a_gpu_whose_registration_fails_costs_the_other_no_event(tmp_path: Path) -> None:
    """Each XID of the healthy GPU is heard once, while the other's registration fails for ever."""
    library = await to_thread.run_sync(NvmlLibrary, tmp_path / "nvml")
    library.fail("nvmlDeviceRegisterEvents", 0, pynvml.NVML_ERROR_UNKNOWN)
    nvml, heard = NvmlDriver(library.load(), DEADLINE, TIMING), list[int]()

    async with nvml.session():
        refused, healthy = (gpu.id for gpu in (await nvml.survey()).gpus)
        while nvml.unheard.keys() != {refused}:
            await nvml.events()
        for code in range(40):
            library.event(1, XID, code)
            if code % 4 == 0:
                await nvml.survey()
                await nvml.renew_events()
            while code not in heard:
                events = await nvml.events()
                heard += [
                    event.code
                    for event in events
                    if isinstance(event, Xid) and event.gpu == healthy
                ]

    assert heard == list(range(40))


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("nvmlEventSetWait_v2", pynvml.NVML_ERROR_UNKNOWN),
        ("nvmlEventSetCreate", pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES),
    ],
)
async def test_a_library_without_events_is_heard_once_it_works(
    tmp_path: Path, function: str, code: int
) -> None:
    """Every GPU is unheard with NVML's call in the reason, and heard when the call works."""
    library = await to_thread.run_sync(NvmlLibrary, tmp_path / "nvml")
    library.fail(function, "-", code)
    nvml = NvmlDriver(library.load(), DEADLINE, TIMING)

    async with nvml.session():
        gpus = [gpu.id for gpu in (await nvml.survey()).gpus]
        for _ in range(3):
            try:
                assert not await nvml.events()
            except DriverError:
                assert "Wait" in function
        assert nvml.unheard.keys() == set(gpus)
        assert all(function in reason for reason in nvml.unheard.values())

        library.work()
        with anyio.fail_after(DEADLINE):
            while nvml.unheard:
                await nvml.events()
        library.event(0, XID, 79)
        assert Xid(gpus[0], 79) in await nvml.events()
