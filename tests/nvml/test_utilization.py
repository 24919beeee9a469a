"""Utilization of GPUs by processes, from NVML's samples."""

from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from metagpu.core.errors import DriverError
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.spec import build_node
from tests.nvml.rig import altered_library, opened


async def test_busy_processes_are_listed_by_pid() -> None:
    """A process has the percentage of its samples; an idle process is not listed."""
    async with opened("a100-40gb:1") as (node, nvml, survey):
        gpu = survey.gpus[0].id
        assert await nvml.utilization(gpu) == {}

        for process in (SimProcess(7, 1, sm=30), SimProcess(8, 1), SimProcess(9, 1, sm=60)):
            node.start_process(node.gpu(0), process)
        assert await nvml.utilization(gpu) == {7: 30, 9: 60}


async def test_in_mig_mode_utilization_is_unknown() -> None:
    """In MIG mode, which NVML does not support here, utilization is unknown, not idle."""
    async with opened("a100-40gb:1") as (node, nvml, survey):
        node.gpu(0).mig.enabled = True
        assert await nvml.utilization(survey.gpus[0].id) is None


def answering(code: int, *samples: tuple[int, int, int]) -> Callable[..., int]:
    """Make NVML's function return a number of samples, then these samples and a code."""

    def function(_: object, into: Any, count: Any, since: Any) -> int:  # noqa: ANN401 - of ctypes
        if into is None:
            count._obj.value = len(samples) + 1
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE) if samples else code
        for entry, (pid, percent, age) in zip(into, samples, strict=False):
            entry.pid, entry.smUtil, entry.timeStamp = pid, percent, since.value + age
        return code

    return function


async def utilisation(function: Callable[..., int]) -> object:
    """Return the utilization of a GPU whose NVML has this function."""
    nvml = NvmlDriver(altered_library(build_node("t4:1"), nvmlDeviceGetProcessUtilization=function))
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        return await nvml.utilization(gpu.id)


async def test_samples_are_averaged_and_old_ones_dropped() -> None:
    """Several samples of a process are one average; older and empty ones do not count."""
    samples = [(7, 20, 1), (7, 60, 2), (8, 50, 5), (8, 90, -10)]
    assert await utilisation(answering(pynvml.NVML_SUCCESS, *samples)) == {7: 40, 8: 50}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (pynvml.NVML_SUCCESS, {}),
        (pynvml.NVML_ERROR_NOT_FOUND, {}),
        (pynvml.NVML_ERROR_NOT_SUPPORTED, None),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, None),
    ],
)
async def test_idle_and_unknown_differ(code: int, expected: object) -> None:
    """No samples is idle; a driver without an answer is unknown."""
    assert await utilisation(answering(code)) == expected


async def test_a_process_that_comes_meanwhile_leaves_it_unknown() -> None:
    """Samples that outgrow their buffer are unknown until the next query."""
    short = answering(pynvml.NVML_ERROR_INSUFFICIENT_SIZE, (7, 20, 1))
    assert await utilisation(short) is None


async def test_other_failures_are_errors() -> None:
    """A failure of the GPU is an error, and not idleness."""
    with pytest.raises(DriverError, match="nvmlDeviceGetProcessUtilization"):
        await utilisation(answering(pynvml.NVML_ERROR_NO_PERMISSION))
