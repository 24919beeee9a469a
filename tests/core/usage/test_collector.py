"""Collections of usage: their number of calls, and one for all callers at about the same time."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pynvml
import pytest

from metagpu.core.model.shares import Holder
from metagpu.core.state.facts import GpusFound
from metagpu.core.state.registry import Registry
from metagpu.core.usage.collector import CachedUsage, NodeUsage, UsageCollector
from metagpu.core.usage.timing import UsageTiming
from metagpu.nvml.driver import NvmlDriver
from metagpu.nvml.worker import NvmlWorker
from metagpu.sim.machine.containers import SimHost
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node
from tests.core.usage.enforcer_rig import Watched
from tests.nvml.rig import DEADLINE, altered_library
from tests.rigs.waiting import becomes, skip

FURTHER = (
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetDecoderUtilization",
    "nvmlDeviceGetMemoryInfo_v2",
)
"""What the page of dcgm-exporter alone shows."""
GPUS = 3
PODS = tuple(Holder("default", f"pod-{number}", "main") for number in range(8))


class Ground(NamedTuple):
    """A node of simulated GPUs, with a process of a pod on each.

    Attributes:
        further: the functions of `FURTHER` that were called, in their order.
    """

    node: SimNode
    host: Watched
    further: list[str]
    collector: UsageCollector
    nvml: NvmlDriver


@asynccontextmanager
async def ground(
    tmp_path: Path,
    turn: float = 60,
    gpus: int = GPUS,
    recent: float = 0,
    **functions: Callable[..., int],
) -> AsyncIterator[Ground]:
    """Collect with some of NVML's functions replaced, and wait so long before the next GPU.

    A scrape takes processes from listings that are as recent as said.
    """
    node, machine, further = build_node(f"a100-40gb:{gpus}"), SimHost(tmp_path), list[str]()
    library = altered_library(node, **functions)

    def counted(name: str) -> Callable[..., int]:
        function = getattr(library, name)

        def count(*arguments: Any) -> int:  # noqa: ANN401 - of ctypes
            further.append(name)
            return int(function(*arguments))

        return count

    for name in FURTHER:
        setattr(library, name, counted(name))
    nvml = NvmlDriver(library, DEADLINE)
    host, registry = Watched(machine.host), Registry()
    for number, pod in enumerate(PODS[:gpus]):
        machine.add_container_process(7000 + number, pod, real=os.getpid())
        node.start_process(node.gpu(number), SimProcess(7000 + number, 2**30, sm=10))
    async with nvml.session():
        registry.apply(GpusFound((await nvml.survey()).gpus, at=0))
        further.clear()
        collector = UsageCollector(nvml, host, registry, UsageTiming(turn=turn, recent=recent))
        yield Ground(node, host, further, collector, nvml)


async def test_a_scrape_has_one_job_for_each_gpu_and_one_look_at_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes and sensors are read together, and no function is called in vain.

    The GPUs whose turn it is have a second job, for the utilization.
    """
    jobs, work = 0, NvmlWorker.call_alone

    async def count(*arguments: Any, short: bool) -> Any:  # noqa: ANN401 - as the worker's own
        nonlocal jobs
        jobs += short  # those that share a thread
        return await work(*arguments, short=short)

    async with ground(tmp_path) as live_ground:
        monkeypatch.setattr(NvmlWorker, "call_alone", count)
        await live_ground.collector.collect(sensors=True)
        assert (jobs, live_ground.host.looks, live_ground.further) == (6, 1, [])
        usage = await live_ground.collector.collect(sensors=True)
        assert (jobs, live_ground.host.looks, live_ground.further) == (6 + 4, 2, [])

    assert usage.sensors is not None
    assert [sensor.power for sensor in usage.sensors.values()] == [94, 94, 94]
    assert [list(found.values()) for found in usage.utilization.values()] == [[10]] * 3
    assert [found.unauthorized[0].holder for found in usage.gpus.values()] == [*PODS[:3]]


async def test_without_sensors_none_is_read(tmp_path: Path) -> None:
    """A collection for `mgctl` has the processes and their utilization alone."""
    calls = []

    def count(*arguments: Any) -> int:  # noqa: ANN401 - of ctypes
        calls.append(arguments)
        return int(pynvml.NVML_ERROR_UNKNOWN)

    async with ground(tmp_path, nvmlDeviceGetPowerUsage=count) as live_ground:
        usage = await live_ground.collector.collect()
    assert (usage.sensors, usage.failures, calls) == (None, {}, [])


async def test_while_a_gpu_hangs_the_processes_of_the_others_are_identified(tmp_path: Path) -> None:
    """A process that ends before NVML answers for another GPU is still known."""
    found = NodeUsage()

    async with ground(tmp_path, turn=0.02) as live_ground:
        live_ground.node.hang_gpu(live_ground.node.gpu(0), 60.0)

        async def collect() -> None:
            nonlocal found
            found = await live_ground.collector.collect(sensors=True)

        async with anyio.create_task_group() as group:
            group.start_soon(collect)
            await becomes(lambda: live_ground.host.looks >= 1)
            assert not found.gpus
            live_ground.node.hang_gpu(live_ground.node.gpu(0), 0.0)

    assert live_ground.host.looks >= 2  # on a busy machine others are late too
    assert [len(usage.unauthorized) for usage in found.gpus.values()] == [1, 1, 1]
    assert found.sensors is not None
    assert found.sensors.keys() == found.gpus.keys()


async def test_a_scrape_lists_no_processes_that_were_listed_just_now(tmp_path: Path) -> None:
    """Between two checks of the enforcer a scrape reads sensors and utilization alone."""
    async with ground(tmp_path, recent=60) as live_ground:
        gpus = tuple(live_ground.collector._registry.snapshot.gpus)
        checked = [await live_ground.collector.collect_gpu(gpu) for gpu in gpus]
        looks = live_ground.host.looks
        usage = await live_ground.collector.collect(sensors=True)
        assert live_ground.host.looks == looks
        assert [*usage.gpus.values()] == checked
        assert [list(found.values()) for found in usage.utilization.values()] == [[10]] * 3

        live_ground.node.start_process(live_ground.node.gpu(0), SimProcess(7999, 2**30))
        assert (await live_ground.collector.collect()).gpus[gpus[0]] != checked[0]
        skip(61)
        assert (await live_ground.collector.collect(sensors=True)).gpus[gpus[0]] != checked[0]


async def test_a_sensor_that_fails_costs_no_process(tmp_path: Path) -> None:
    """Processes and utilization of a GPU are read though its power cannot be."""

    def fails(*_: object) -> int:
        return int(pynvml.NVML_ERROR_RESET_REQUIRED)

    async with ground(tmp_path, nvmlDeviceGetPowerUsage=fails) as live_ground:
        usage = await live_ground.collector.collect(sensors=True)
        assert not usage.failures
        assert not usage.sensors
        assert [len(of_gpu.unauthorized) for of_gpu in usage.gpus.values()] == [1, 1, 1]


async def test_a_gpu_without_a_list_of_processes_has_its_sensors(tmp_path: Path) -> None:
    """A failure of the list leaves the usage unknown, and costs no sensor."""

    def fail(*_: Any) -> int:  # noqa: ANN401 - of ctypes
        return int(pynvml.NVML_ERROR_UNKNOWN)

    async with ground(tmp_path, nvmlDeviceGetComputeRunningProcesses_v3=fail) as live_ground:
        usage = await live_ground.collector.collect(sensors=True)

    assert len(usage.failures) == 3
    assert usage.sensors is not None
    assert usage.sensors.keys() == usage.failures.keys()


class SlowCollector(UsageCollector):
    """A collector that waits for the test, and counts."""

    def __init__(self) -> None:
        self.begun = 0
        self.with_sensors = 0
        self.may_end = anyio.Event()

    async def collect(self, *, sensors: bool = False) -> NodeUsage:
        """Return no usage."""
        self.begun += 1
        self.with_sensors += sensors
        await self.may_end.wait()
        return NodeUsage(at=self.begun, sensors={} if sensors else None)


async def test_callers_share_a_collection() -> None:
    """All callers during a collection share its result."""
    census = SlowCollector()
    looks, heard = CachedUsage(census, age=60), []

    async def ask() -> None:
        heard.append((await looks.latest()).at)

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        census.may_end.set()

    assert (census.begun, set(heard)) == (1, {1})


async def test_an_old_result_is_collected_again() -> None:
    """A result beyond its age is collected again."""
    census = SlowCollector()
    census.may_end.set()
    looks = CachedUsage(census, age=0)

    assert [(await looks.latest()).at for _ in range(3)] == [1, 2, 3]


async def test_a_cancelled_caller_leaves_the_collection_to_others() -> None:
    """A caller that is cancelled during a collection costs the others no answer."""
    census = SlowCollector()
    looks, heard = CachedUsage(census, age=60), []

    async def ask() -> None:
        heard.append((await looks.latest()).at)

    async with anyio.create_task_group() as group:
        first = anyio.CancelScope()

        async def leave() -> None:
            with first:
                await ask()

        group.start_soon(leave)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(ask)
        first.cancel()
        census.may_end.set()

    assert heard == [2]


@pytest.mark.parametrize("first", [False, True], ids=["a viewer first", "a scrape first"])
async def test_scrapes_and_others_share_a_collection(tmp_path: Path, *, first: bool) -> None:
    """In any order, they look at the processes once, and read the sensors of a GPU once."""
    async with ground(tmp_path, recent=60) as live_ground:
        looks = CachedUsage(live_ground.collector, age=60)
        usages = [await looks.latest(sensors=wanted) for wanted in (first, not first) * 3]

    assert live_ground.host.looks == 1
    assert len({id(gpu) for usage in usages for gpu in usage.gpus.values()}) == GPUS
    assert len({id(usage.sensors) for usage in usages if usage.sensors is not None}) == 1
    assert all(len(usage.utilization) == GPUS for usage in usages)
