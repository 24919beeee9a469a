"""Reads of the MIG instances of several GPUs at once."""

from collections.abc import Iterable, Mapping, Sequence

import anyio

from metagpu.core.contracts.driver import MigDriver
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.mig import MigInstance


async def read_instances(
    driver: MigDriver, gpus: Iterable[GpuId]
) -> Mapping[GpuId, Sequence[MigInstance] | DriverError]:
    """Read the instances of each GPU, or the error that the driver has for it.

    All GPUs are asked at once: those that hang cost one deadline together, and delay no answer of
    another. A cancelled caller leaves at once.
    """
    gpus = tuple(gpus)
    answers: dict[GpuId, Sequence[MigInstance] | DriverError] = {}

    async def read(gpu: GpuId) -> None:
        try:
            answers[gpu] = await driver.instances(gpu)
        except DriverError as error:
            answers[gpu] = error

    async with anyio.create_task_group() as group:
        for gpu in gpus:
            group.start_soon(read, gpu)
    return {gpu: answers[gpu] for gpu in gpus}
