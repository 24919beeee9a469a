"""Times of NVML's calls on this machine's first GPU, through metagpu's own driver.

    $ python -m bench.nvml_calls

Each row is one call as the daemon makes it, with the hand-over to the GPU's thread: the median
time, the longest one, and the median processor time. Nothing is changed on the GPU.
"""

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

import anyio

from metagpu.core.contracts.driver import Driver
from metagpu.core.model.gpu import GpuId
from metagpu.nvml.driver import NvmlDriver

CALLS: Final = 50


def calls(driver: Driver, gpu: GpuId) -> Mapping[str, Callable[[], Awaitable[object]]]:
    """Return the calls to measure, by their purpose."""
    return {
        "survey of all GPUs": driver.survey,
        "condition": partial(driver.condition, gpu),
        "processes (enforcement)": partial(driver.processes, gpu),
        "utilization of processes": partial(driver.utilization, gpu),
        "sensors (a scrape)": partial(
            driver.activity, gpu, processes=False, sensors=True, costly=False
        ),
        "the same with the costly ones": partial(
            driver.activity, gpu, processes=False, sensors=True
        ),
        "detailed sensors": partial(driver.sensors, gpu),
        "compute mode": partial(driver.compute_mode, gpu),
        "MIG mode": partial(driver.mig.mode, gpu),
        "MIG instances": partial(driver.mig.instances, gpu),
    }


async def measure(call: Callable[[], Awaitable[object]]) -> str:
    """Measure one call many times, and return the numbers in a line."""
    took, cpu = [], []
    for _ in range(CALLS):
        began, began_cpu = time.perf_counter(), time.process_time()
        await call()
        took.append((time.perf_counter() - began) * 1e3)
        cpu.append((time.process_time() - began_cpu) * 1e3)
    median, median_cpu = statistics.median(took), statistics.median(cpu)
    return f"{median:8.2f} ms  {max(took):8.2f} ms at most  {median_cpu:8.2f} ms of a processor"


async def main() -> None:
    """Print a line for each call.

    Raises:
        DriverUnavailable: there is no driver here.
    """
    driver = NvmlDriver()
    async with driver.session():
        survey = await driver.survey()
        gpu = survey.gpus[0]
        print(f"{gpu.name}, driver {survey.driver_version}")
        for name, call in calls(driver, gpu.id).items():
            print(f"{name:34}{await measure(call)}")


if __name__ == "__main__":
    anyio.run(main)
