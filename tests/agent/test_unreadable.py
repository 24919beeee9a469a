"""GPUs that NVML counts and cannot describe, from the daemon's start on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pynvml
import pytest

from metagpu.core.errors import DriverReplaced
from metagpu.core.health.watch import HealthTiming
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.diagnosis import check_health
from metagpu.core.reports.reading import read_report
from metagpu.core.reports.schema.status import StatusReport
from metagpu.nvml.driver import NvmlDriver
from metagpu.nvml.session_gpu import NvmlTiming
from metagpu.sim.machine.spec import build_node
from tests.agent.test_daemon import PATIENT, daemon
from tests.agent.test_metrics import ANY, page_of
from tests.rigs.agent import Scene, agent_at_work
from tests.rigs.nvml_library import NvmlLibrary

LOST = pynvml.NVML_ERROR_GPU_IS_LOST


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo_v2"]
)
async def test_a_gpu_off_the_bus_is_somewhere(tmp_path: Path, function: str) -> None:
    """A GPU that fell off the bus before the start is in status, metrics and the doctor."""
    library = NvmlLibrary(tmp_path / "nvml")
    library.fail(function, 1, LOST)
    driver = NvmlDriver(library.load())

    async with agent_at_work(tmp_path, driver=driver, metrics=ANY) as scene:
        await scene.until(10, 10)
        status = await reported(scene)
        [missing] = status["unreadableGpus"]
        assert (missing["index"], "lost" in missing["reason"]) == (1, True)
        assert (await page_of(scene)).values("metagpu_unreadable_gpus") == [1]
        result, finding, *_ = check_health(read_report(status, StatusReport))
        assert (result, finding) == ("error", f"cannot be read: {missing['reason']}")

        library.work()
        await scene.until(20, 20)
        assert not (await reported(scene))["unreadableGpus"]


async def test_a_gpu_that_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    """The GPUs that answer are offered while another hangs, which is offered once it answers."""
    library = NvmlLibrary(tmp_path / "nvml")
    library.hang("nvmlDeviceGetUUID", 1)
    driver = NvmlDriver(library.load(), 600.0, NvmlTiming(straggler=0.0))

    async with agent_at_work(tmp_path, driver=driver) as scene:
        await scene.until(10, 10)
        assert driver.has_threads
        [missing] = (await reported(scene))["unreadableGpus"]
        assert missing["reason"] == "GPU 1: no answer from NVML yet"

        library.work()
        await scene.until(20, 20)


async def test_sigterm_ends_a_start_that_hangs(tmp_path: Path) -> None:
    """SIGTERM ends the daemon while every GPU hangs at its start."""
    library = NvmlLibrary(tmp_path / "nvml")
    library.hang("nvmlDeviceGetUUID", "*")

    async with daemon(tmp_path, program=PATIENT, library=library) as live_daemon:
        await library.hangs()
        assert await live_daemon.stop() == 0


async def reported(scene: Scene) -> dict[str, Any]:
    """Return the daemon's answer to `metagpu status`."""
    answer = await scene.status()
    assert isinstance(answer, dict)
    return answer


async def test_a_replaced_driver_ends_the_daemon(tmp_path: Path) -> None:
    """A library that stays unfit for the driver ends the daemon; status has the present reason."""
    timing = HealthTiming(retry=0.01, replaced=0.1)
    node = build_node("t4:2")

    async def replace_driver() -> None:
        async with agent_at_work(tmp_path, gpu_models=node, health_timing=timing) as scene:
            await scene.until(20, 20)
            node.unload_driver()
            await scene.wait_snapshot(reason_is("not loaded"))
            node.unload_driver(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
            await scene.wait_snapshot(reason_is("different versions"))
            await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup) as ended:
        await replace_driver()

    assert ended.group_contains(DriverReplaced, match="only its next start")


def reason_is(part: str) -> Callable[[Snapshot], bool]:
    """Return whether every GPU is out of service for a reason with this part."""
    return lambda now: all(part in state.verdict.reason for state in now.gpus.values())
