"""Costly values are read of few GPUs at a scrape: the cost does not grow with the GPUs."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pynvml
import pytest

from metagpu.core.state.facts import GpusFound
from metagpu.core.usage.collector import CachedUsage, NodeUsage
from metagpu.plugins.metrics.exporter import DetailedSensorReader
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.nvml.library import SimLibrary
from tests.core.usage.test_collector import Ground, ground
from tests.rigs.waiting import skip

GPUS: Final = 8
PERIOD: Final = 30
ENERGY: Final = 100_000
"""Joules: a GPU takes a quarter of an hour for them."""
UTILIZATION: Final = "nvmlDeviceGetProcessUtilization"
FIELDS: Final = "nvmlDeviceGetFieldValues"
COSTLY: Final = frozenset(
    (pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER)
)


class Calls(Counter[str]):
    """The calls of what costs NVML much, by function: those of fields that name costly ones."""

    def take(self) -> tuple[int, int]:
        """Return the readings of costly fields and of utilization since the last time."""
        found = self[FIELDS], self[UTILIZATION]
        self.clear()
        return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Count the calls of the simulated library."""
    calls = Calls()

    def counted(name: str, is_costly: Callable[..., bool]) -> None:
        function = getattr(SimLibrary, name)

        def count(library: SimLibrary, *arguments: Any) -> int:  # noqa: ANN401 - of ctypes
            calls[name] += is_costly(*arguments)
            return int(function(library, *arguments))

        monkeypatch.setattr(SimLibrary, name, count)

    def names_costly(_: object, count: Any, values: Any) -> bool:  # noqa: ANN401 - of ctypes
        size = getattr(count, "value", count)
        wanted = COSTLY.intersection(value.fieldId for value in values._obj[:size])
        assert wanted in (COSTLY, set())
        return bool(wanted)

    counted(FIELDS, names_costly)
    # pynvml asks for the number of samples first.
    counted(UTILIZATION, lambda _device, samples, *_: samples is None)
    return calls


@asynccontextmanager
async def scraped(tmp_path: Path, calls: Calls, gpus: int = GPUS) -> AsyncIterator[Ground]:
    """Build a node of which one page was scraped."""
    async with ground(tmp_path, gpus=gpus) as live_ground:
        for number in range(gpus):
            live_ground.node.gpu(number).sensors.energy = ENERGY * 1000 * (number + 1)
            live_ground.node.gpu(number).sensors.pcie_replays = number
        await live_ground.collector.collect(sensors=True)
        assert calls.take() == (gpus, gpus)
        skip(PERIOD)
        yield live_ground


async def scrape(live_ground: Ground) -> NodeUsage:
    """Collect for a page, one period after the last one."""
    usage = await live_ground.collector.collect(sensors=True)
    assert not usage.failures
    skip(PERIOD)
    return usage


async def test_each_scrape_reads_few_gpus_and_has_the_values_of_all(
    tmp_path: Path, calls: Calls
) -> None:
    """Of eight GPUs a scrape reads the costly values of one, each kind once."""
    async with scraped(tmp_path, calls) as live_ground:
        for _ in range(GPUS):
            usage = await scrape(live_ground)
            assert calls.take() == (1, 1)
            assert len(usage.utilization) == len(usage.sensors or {}) == GPUS
            readings = [(usage.sensors or {})[gpu] for gpu in usage.gpus]  # in any order
            assert [found.pcie_replays for found in readings] == [*range(GPUS)]
            joules = [found.energy or 0 for found in readings]
            assert [each // ENERGY for each in joules] == [n + 1 for n in range(GPUS)]


async def test_a_node_of_two_gpus_has_fresh_values(tmp_path: Path, calls: Calls) -> None:
    """All GPUs are read at each scrape where there are few."""
    async with scraped(tmp_path, calls, gpus=2) as live_ground:
        live_ground.node.start_process(live_ground.node.gpu(0), SimProcess(7000, 2**30, sm=70))
        usage = await scrape(live_ground)
        assert calls.take() == (2, 2)
        assert [list(found.values()) for found in usage.utilization.values()] == [[70], [10]]


async def test_energy_never_goes_backwards(tmp_path: Path, calls: Calls) -> None:
    """From scrape to scrape the counter of a GPU grows or stays, until it was read again."""
    async with scraped(tmp_path, calls) as live_ground:
        pages = [(await scrape(live_ground)).sensors or {} for _ in range(2 * GPUS)]
    for gpu in pages[0]:
        values = [page[gpu].energy or 0 for page in pages]
        assert values == sorted(values)
        assert values[0] < values[-1]


async def test_a_process_that_came_is_read_at_once(tmp_path: Path, calls: Calls) -> None:
    """A process without a reading is not taken for idle, though it is another GPU's turn."""
    async with scraped(tmp_path, calls) as live_ground:
        last = [*live_ground.collector._registry.snapshot.gpus][-1]
        live_ground.node.start_process(
            live_ground.node.gpu(GPUS - 1), SimProcess(7999, 2**30, sm=55)
        )
        assert (await scrape(live_ground)).utilization[last] == {7000 + GPUS - 1: 10, 7999: 55}
        assert calls.take() == (1, 1)


async def test_a_process_that_ended_uses_nothing(tmp_path: Path, calls: Calls) -> None:
    """A GPU without processes is idle, and NVML is not asked for its utilization."""
    async with scraped(tmp_path, calls) as live_ground:
        for number in range(GPUS):
            live_ground.node.end_process(live_ground.node.gpu(number), 7000 + number)
        assert [*(await scrape(live_ground)).utilization.values()] == [{}] * GPUS
        assert calls.take() == (1, 0)


async def test_in_mig_mode_utilization_is_not_asked_for(tmp_path: Path, calls: Calls) -> None:
    """A GPU in MIG mode has no utilization, and takes no turn of another one."""
    async with scraped(tmp_path, calls) as live_ground:
        for number in range(GPUS):
            live_ground.node.gpu(number).mig.enabled = live_ground.node.gpu(number).mig.pending = (
                True
            )
        survey = await live_ground.nvml.survey()
        live_ground.collector._registry.apply(GpusFound(survey.gpus, at=0))
        assert (await scrape(live_ground)).utilization == {}
        assert calls.take() == (1, 0)


async def test_a_lost_gpu_loses_its_values(tmp_path: Path, calls: Calls) -> None:
    """A GPU that is lost has no value of before, and is read when it is back."""
    async with scraped(tmp_path, calls) as live_ground:
        last = [*live_ground.collector._registry.snapshot.gpus][-1]
        live_ground.node.gpu(GPUS - 1).failure = pynvml.NVML_ERROR_GPU_IS_LOST
        usage = await live_ground.collector.collect(sensors=True)
        assert last not in {**usage.utilization, **(usage.sensors or {})}
        live_ground.node.gpu(GPUS - 1).failure = None
        live_ground.node.gpu(GPUS - 1).sensors.energy = 0
        calls.clear()

        usage = await scrape(live_ground)
        assert calls.take() == (1, 1)
        assert last in usage.utilization
        assert 0 < ((usage.sensors or {})[last].energy or 0) < ENERGY


async def test_mgctl_gets_what_is_now(tmp_path: Path, calls: Calls) -> None:
    """A collection that is no scrape reads the utilization of every GPU with a process."""
    async with scraped(tmp_path, calls) as live_ground:
        for number in range(GPUS):
            live_ground.node.start_process(
                live_ground.node.gpu(number), SimProcess(7000 + number, 2**30, sm=70)
            )
        usage = await live_ground.collector.collect()
        assert [list(found.values()) for found in usage.utilization.values()] == [[70]] * GPUS
        assert calls.take() == (0, GPUS)


async def test_mgctl_reads_what_a_scrape_did_not(tmp_path: Path, calls: Calls) -> None:
    """Beside a scrape, the utilization of the other GPUs is read once, by the first who asks."""
    async with scraped(tmp_path, calls) as live_ground:
        for number in range(GPUS):
            live_ground.node.start_process(
                live_ground.node.gpu(number), SimProcess(7000 + number, 2**30, sm=70)
            )
        looks = CachedUsage(live_ground.collector, age=PERIOD - 1)
        page = await looks.latest(sensors=True)
        assert sorted(max(found.values()) for found in page.utilization.values()) == [
            *[10] * (GPUS - 1),
            70,
        ]
        calls.clear()
        for _ in range(2):
            usage = await looks.latest()
            assert [*usage.utilization.values()] == [{7000 + n: 70} for n in range(GPUS)]
        assert await looks.latest(sensors=True) is usage
        assert calls.take() == (0, GPUS - 1)


async def test_the_page_of_dcgm_exporter_reads_one_energy(tmp_path: Path, calls: Calls) -> None:
    """The detailed sensors have their turns too, and every GPU its energy."""
    async with ground(tmp_path, gpus=GPUS) as live_ground:
        reader = DetailedSensorReader(live_ground.collector._registry, live_ground.nvml.sensors)
        for expected in (GPUS, 1, 1):
            found = await reader.read()
            assert calls.take() == (expected, 0)
            assert [reading.energy is None for reading in found.values()] == [False] * GPUS
            skip(PERIOD)
