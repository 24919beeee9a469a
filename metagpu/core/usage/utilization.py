"""Utilization of GPUs by their processes: a scrape reads one, the oldest first."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import NamedTuple

import anyio

from metagpu.core.contracts.driver import Driver
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import GpuId
from metagpu.core.runtime.tasks import start_together
from metagpu.core.state.registry import Registry
from metagpu.core.usage.reading_turns import ReadingTurns
from metagpu.core.usage.timing import UsageTiming


class _Utilization(NamedTuple):
    """The percent of each process; the processes that the driver listed at that time."""

    percents: Mapping[int, int] | None
    pids: frozenset[int]


class UtilizationReader:
    """Reads how much of each GPU its processes use, and keeps it for scrapes."""

    def __init__(self, driver: Driver, registry: Registry, timing: UsageTiming) -> None:
        self._driver = driver
        self._registry = registry
        self._timing = timing
        self._turns = ReadingTurns[_Utilization](timing.costly_age)

    async def read(
        self, pids: Mapping[GpuId, Collection[int]], max_age: float | None
    ) -> dict[GpuId, Mapping[int, int]]:
        """Return percents by pid of those GPUs whose driver reports them.

        A GPU whose processes all have a reading may answer with that one. A GPU without a process
        is idle, and NVML is not asked; in MIG mode it has no answer.

        Args:
            pids: the processes that the driver lists now, of each GPU to read.
            max_age: seconds from which a reading is read again, `None` for turns of the GPUs.
        """
        gpus = [gpu for gpu in pids if self._is_whole(gpu)]
        for gpu in pids:
            known = self._turns.latest(gpu)
            if gpu not in gpus or (known and not known.pids.issuperset(pids[gpu])):
                self._turns.forget(gpu)
        busy = [gpu for gpu in gpus if pids[gpu] or self._turns.latest(gpu) is None]
        now = anyio.current_time()
        due = (
            self._turns.due(busy, now) if max_age is None else self._turns.older(busy, now, max_age)
        )

        async with anyio.create_task_group() as group:
            works = (partial(self._read_gpu, gpu, pids[gpu]) for gpu in busy if gpu in due)
            await start_together(group, works, self._timing.turn)
        return {
            gpu: {pid: percent for pid, percent in known.percents.items() if pid not in ended}
            for gpu in gpus
            if (known := self._turns.latest(gpu)) and known.percents is not None
            for ended in (known.pids.difference(pids[gpu]),)
        }

    def retain(self, gpus: Collection[GpuId]) -> None:
        """Forget all other GPUs."""
        self._turns.retain(gpus)

    async def _read_gpu(self, gpu: GpuId, pids: Collection[int]) -> None:
        began = anyio.current_time()
        try:
            percents = await self._driver.utilization(gpu)
        except DriverError:  # the health watch reports it
            self._turns.forget(gpu)
        else:
            self._turns.add(gpu, _Utilization(percents, frozenset(pids)), began)

    def _is_whole(self, gpu: GpuId) -> bool:
        state = self._registry.snapshot.gpus.get(gpu)
        return state is not None and not state.gpu.mig_enabled
