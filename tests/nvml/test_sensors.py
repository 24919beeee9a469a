"""Sensors: what a card does not report is absent, and a failure costs its own value alone."""

import time
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from metagpu.core.contracts.sensors import NvlinkError, ThrottleReason
from metagpu.core.errors import DriverError, GpuLost
from metagpu.core.model.mig import Placement
from metagpu.nvml.driver import NvmlDriver
from metagpu.nvml.sensors import WINDOW
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.load import SAMPLE_PERIOD
from metagpu.sim.machine.spec import build_node
from tests.nvml.rig import DEADLINE, altered_library, opened


async def test_values_are_nvmls_in_base_units() -> None:
    """Load, error counters and reasons of low clocks are those of the GPU."""
    async with opened("a100-40gb:1") as (node, nvml, survey):
        gpu, sensors = node.gpu(0), node.gpu(0).sensors
        node.start_process(gpu, SimProcess(7, 2**30, sm=100))
        sensors.nvlink_errors = {pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL: 3}
        sensors.pcie_replays, gpu.ecc_corrected = 5, 2
        sensors.throttle_reasons = (
            pynvml.nvmlClocksThrottleReasonSwPowerCap
            | pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting
        )
        detailed_sensors = await nvml.sensors(survey.gpus[0].id)

    assert (detailed_sensors.power, detailed_sensors.power_limit, detailed_sensors.sm_clock) == (
        400,
        400,
        1410e6,
    )
    assert (
        detailed_sensors.temperature,
        detailed_sensors.memory_temperature,
        detailed_sensors.utilization,
    ) == (68, 72, 1)
    assert detailed_sensors.nvlink_errors == dict.fromkeys(NvlinkError, 0) | {NvlinkError.REPLAY: 3}
    assert (
        detailed_sensors.pcie_replays,
        detailed_sensors.ecc_corrected,
        detailed_sensors.ecc_uncorrected,
    ) == (5, 2, 0)
    assert detailed_sensors.throttled == frozenset([ThrottleReason.POWER_CAP])
    assert detailed_sensors.memory_used == 2**30


async def test_what_a_card_does_not_report_is_absent() -> None:
    """A card without NVLink, memory sensor and remapped rows has none of these, not zero."""
    async with opened("t4:1") as (_, nvml, survey):
        sensors = await nvml.sensors(survey.gpus[0].id)
    assert (sensors.memory_temperature, sensors.rows_failed, sensors.nvlink_errors) == (
        None,
        None,
        {},
    )
    assert sensors.ecc_corrected == 0


async def test_mig_instances_have_memory_of_their_own() -> None:
    """Each instance has what its programs use, and the rest of its own part."""
    async with opened("a100-40gb:1") as (node, nvml, survey):
        gpu, mig = survey.gpus[0], node.gpu(0).mig
        assert await nvml.mig.sensors(gpu.id) == ()
        mig.enabled = mig.pending = True
        small, large = (
            next(profile for profile in gpu.mig_profiles if profile.name == name)
            for name in ("1g.5gb", "3g.20gb")
        )
        places = (small, Placement(0, 1)), (large, Placement(4, 4))
        made = [
            await nvml.mig.create(gpu.id, profile.number, at, DEADLINE) for profile, at in places
        ]
        used = SimProcess(7, 3 * 2**30, gi=made[1].number, ci=0)
        node.start_process(node.gpu(0), used)
        one, two = sorted(await nvml.mig.sensors(gpu.id), key=lambda sensors: sensors.memory_used)
    assert (one.number, one.profile, one.memory_used) == (made[0].number, small.number, 0)
    assert (two.number, two.profile, two.memory_used) == (made[1].number, large.number, 3 * 2**30)
    assert two.memory_free == large.memory - 3 * 2**30


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_TIMEOUT]
)
async def test_a_failure_costs_its_own_value_alone(code: int) -> None:
    """A function that fails leaves its value unknown, and the others are there."""

    def fail(*_: Any) -> int:  # noqa: ANN401 - of ctypes
        return code

    library = altered_library(
        build_node("a100-40gb:1"), nvmlDeviceGetPowerUsage=fail, nvmlDeviceGetFieldValues=fail
    )
    nvml = NvmlDriver(library, DEADLINE)
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        sensors = await nvml.sensors(gpu.id)
    assert (sensors.power, sensors.energy, sensors.nvlink_errors, sensors.ecc_corrected) == (
        None,
        None,
        {},
        None,
    )
    assert sensors.temperature == 32


async def test_a_lost_gpu_has_no_reading() -> None:
    """A lost GPU is an error, not a page of unknown values."""
    async with opened("a100-40gb:1") as (node, nvml, survey):
        node.gpu(0).failure = pynvml.NVML_ERROR_GPU_IS_LOST
        with pytest.raises(GpuLost):
            await nvml.sensors(survey.gpus[0].id)


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


def own_samples(*percents: int) -> Callable[..., int]:
    """Make NVML's function return samples of the GPU's own use, the idle moments too."""

    def function(_: object, kind: Any, since: Any, *out: Any) -> int:  # noqa: ANN401 - of ctypes
        assert kind.value == pynvml.NVML_GPU_UTILIZATION_SAMPLES
        value_type, count, into = out
        value_type._obj.value, count._obj.value = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, len(percents)
        for number, entry in enumerate(into or ()):
            entry.timeStamp = since.value + (number + 1) * SAMPLE_PERIOD
            entry.sampleValue.uiVal = percents[number]
        return int(pynvml.NVML_SUCCESS if percents else pynvml.NVML_ERROR_NOT_SUPPORTED)

    return function


async def utilisation(function: Callable[..., int], *percents: int, **others: Any) -> object:  # noqa: ANN401 - functions of ctypes
    """Return the utilization of a GPU with this function and these samples of its own use."""
    others = {
        "nvmlDeviceGetProcessUtilization": function,
        "nvmlDeviceGetSamples": own_samples(*percents),
        **others,
    }
    nvml = NvmlDriver(altered_library(build_node("t4:1"), **others), DEADLINE)
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        return await nvml.utilization(gpu.id)


def every(period: float, *samples: tuple[int, int], start: float = 0) -> list[tuple[int, int, int]]:
    """Return a sample of each pid and percent every `period` seconds of the window."""
    times = range(int(start * 1e6) + 1, int(WINDOW * 1e6), int(period * 1e6))
    return [(pid, percent, age) for age in times for pid, percent in samples]


STEADY = SAMPLE_PERIOD / 1e6
ONE_OF_SIX = (100, 0, 0, 0, 0, 0) * 3


@pytest.mark.parametrize(
    ("samples", "percents", "expected"),
    [
        pytest.param([(7, 40, 1), (8, 50, 5)], [90] * 18, {7: 40, 8: 50}, id="means-of-a-driver"),
        pytest.param([(8, 50, 5), (8, 90, -10)], [], {8: 50}, id="older-than-the-window"),
        pytest.param([(8, 90, -10)], [], {}, id="nothing-within-the-window"),
        pytest.param([*every(1, (7, 100))], ONE_OF_SIX, {7: 17}, id="bursts-alone"),
        pytest.param([(7, 100, 1)], [100] + [0] * 17, {7: 6}, id="one-burst"),
        pytest.param(
            [*every(1, (7, 100)), *every(1, (8, 100), start=0.5)],
            (100, 0, 0) * 6,
            {7: 17, 8: 17},
            id="bursts-in-turn",
        ),
        pytest.param(
            [*every(1, (7, 100)), *every(STEADY, (8, 60)), (9, 90, 1)],
            [],
            {7: 17, 8: 60, 9: 5},
            id="bursts-beside-a-steady-load",
        ),
        pytest.param([*every(STEADY, (7, 100))], [100] * 18, {7: 100}, id="busy-all-the-time"),
        pytest.param([(7, 40, 1)], [0] * 18, {7: 40}, id="a-gpu-that-contradicts"),
        pytest.param([(7, 4000, 1)], [], {7: 100}, id="a-value-that-cannot-be"),
    ],
)
async def test_utilization_is_a_part_of_all_time(
    samples: list[tuple[int, int, int]], percents: list[int], expected: object
) -> None:
    """Moments without a sample are idle, and processes have no more than the GPU altogether."""
    assert await utilisation(answering(pynvml.NVML_SUCCESS, *samples), *percents) == expected


@pytest.mark.parametrize("processes", [0, 2])
async def test_the_newer_function_answers_where_the_older_one_is_missing(processes: int) -> None:
    """Without `nvmlDeviceGetProcessUtilization`, NVML's other list of processes is read."""

    def newer(_: object, info: Any) -> int:  # noqa: ANN401 - of ctypes
        into, info._obj.processSamplesCount = info._obj.procUtilArray, processes
        if not processes:
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        if not into:
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        for number in range(processes):
            into[number].pid, into[number].smUtil = number + 7, 30
            into[number].timeStamp = info._obj.lastSeenTimeStamp + 1
        return int(pynvml.NVML_SUCCESS)

    older = answering(pynvml.NVML_ERROR_NOT_SUPPORTED)
    found = await utilisation(older, nvmlDeviceGetProcessesUtilizationInfo=newer)
    assert found == {number + 7: 30 for number in range(processes)}


async def test_a_process_that_pauses_has_the_mean_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that computes for a sixth of each second is shown with a sixth."""
    async with opened("a100-40gb:1") as (node, nvml, survey):
        monkeypatch.setattr(time, "time", lambda: node.now / 1e6)
        gpu = node.gpu(0)
        for process in (SimProcess(7, 1, sm=100), SimProcess(8, 1, sm=30)):
            node.start_process(gpu, process)
        for _ in range(6):
            node.set_frozen(gpu, 7, frozen=True)
            node.turn_clock(5 * SAMPLE_PERIOD / 1e6)
            node.set_frozen(gpu, 7, frozen=False)
            node.turn_clock(SAMPLE_PERIOD / 1e6)
        both = await nvml.utilization(survey.gpus[0].id)

    assert both is not None
    assert both[8] == 30
    assert 8 <= both[7] <= 14  # 70 % of the GPU in 3 of 18 moments


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
