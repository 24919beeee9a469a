"""Watches the memory of containers, and ends processes of those that use too much of it."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from signal import Signals
from time import time
from typing import Final

import anyio
import structlog

from metagpu.core.backend import Guard
from metagpu.core.census import Census
from metagpu.core.driver_limits import DriverLimits
from metagpu.core.endurance import enduring
from metagpu.core.enforcement import Enforcement, Excess, Policy, rule
from metagpu.core.errors import DriverError, DriverUnavailable, HostError
from metagpu.core.gpu import MIB, GpuId
from metagpu.core.host import Host
from metagpu.core.model import Holder
from metagpu.core.news import MemoryExceeded, ProcessSignalled
from metagpu.core.registry import Registry
from metagpu.core.snapshot import GpuState
from metagpu.core.tally import Tally
from metagpu.core.usage import Process, Usage
from metagpu.core.wishes import settle

log = structlog.get_logger()

Terms = Callable[[GpuId], Enforcement]
"""What the pool of a GPU says about its memory, at this moment."""

_Key = tuple[Holder, str | None]
IDLE_PERIOD: Final = 0.5
"""Seconds between two glances at a GPU that nobody has to be kept within limits on."""


def guarded(usage: Usage, guards: Mapping[str, Guard]) -> Guard | None:
    """Tell what keeps a container within its shares of a GPU; `None` when nothing does."""
    found = {guards.get(share.backend) for share in usage.shares}
    return found.pop() if len(found) == 1 else None


class Enforcer:
    """Looks at every GPU whose pool wants it, each in a task of its own: a hang delays no other.

    Args:
        guards: what guards the containers of each backend, by its name.
        limits: the driver's own, which are kept beside; `None` for none.

    Attributes:
        terms: replaced when the configuration changes.
        tally: for who wants to count.
    """

    def __init__(
        self,
        census: Census,
        host: Host,
        registry: Registry,
        terms: Terms,
        guards: Mapping[str, Guard],
        *,
        limits: DriverLimits | None = None,
    ) -> None:
        self.terms = terms
        self.tally = Tally()
        self._census = census
        self._host = host
        self._registry = registry
        self._guards = guards
        self._limits = limits
        self._told: dict[GpuId, str] = {}
        self._hinted = False

    async def run(self) -> None:
        """Keep containers within their limits, until cancelled."""
        watched: set[GpuId] = set()

        async with anyio.create_task_group() as group:
            async for gpus in self._registry.watch(lambda snapshot: frozenset(snapshot.gpus)):
                for gpu in gpus - watched:
                    name = f"memory enforcement of {gpu}"
                    group.start_soon(enduring, partial(self._watch, gpu), name)
                watched |= gpus

    async def _watch(self, gpu: GpuId) -> None:
        excesses: dict[_Key, Excess] = {}

        while True:
            terms = self.terms(gpu)
            if terms.watches and self._has_wards(self._registry.snapshot.gpus[gpu]):
                pause = await self._look(gpu, terms, excesses)
            else:
                excesses.clear()
                self.tally.over.pop(gpu, None)
                await self._limit(gpu, terms)
                pause = IDLE_PERIOD
            await anyio.sleep(pause)

    async def _limit(self, gpu: GpuId, terms: Enforcement) -> None:
        """Have the driver's limits as they should be; what hinders that is told with the look."""
        if self._limits is not None:
            with suppress(DriverUnavailable):
                await self._limits.keep(gpu, terms)

    def _has_wards(self, state: GpuState) -> bool:
        """Tell whether a container is on a GPU that only the enforcer keeps within its limit."""
        return any(
            lease.holder is not None and self._guards.get(lease.share.backend) is Guard.ENFORCER
            for lease in state.leases.values()
        )

    async def _look(self, gpu: GpuId, terms: Enforcement, excesses: dict[_Key, Excess]) -> float:
        """Look at one GPU and do what follows; give the seconds until the next look."""
        await self._hint()
        await self._limit(gpu, terms)
        try:
            account = await self._census.account(gpu)
        except DriverError as error:
            self.tally.over.pop(gpu, None)
            if self._limits is not None and isinstance(error, DriverUnavailable):
                self._limits.forget(gpu)
            self._tell(gpu, str(error))
            return terms.period
        self._told.pop(gpu, None)

        found: dict[_Key, Excess] = {}
        over: dict[Holder, int] = {}
        pauses = [float(terms.period)]
        for usage in account.usages:
            if guarded(usage, self._guards) is not Guard.ENFORCER:
                continue
            key = usage.holder, usage.pod_uid
            settled = settle(usage, self._registry.snapshot, terms)
            limit, own = settled.limit if settled.terms.acts else None, settled.terms
            ruling = rule(usage, limit, excesses.get(key), own, anyio.current_time())

            if ruling.excess is not None:
                found[key] = ruling.excess
            if limit is not None and usage.memory > limit:
                over[usage.holder] = usage.memory - limit
                if ruling.warn:
                    self._warn(usage, limit, own)
                for process, signal in ruling.signals:
                    await self._signal(usage, limit, process, signal, dry=terms.dry_run)
            if ruling.due is not None:
                pauses.append(ruling.due)

        excesses.clear()
        excesses.update(found)
        self.tally.over[gpu] = over
        return min(pauses)

    def _warn(self, usage: Usage, limit: int, terms: Enforcement) -> None:
        will_end = terms.policy is Policy.KILL and not terms.dry_run
        self.tally.warnings += 1
        log.warning(
            "a container uses more GPU memory than it may",
            **self._told_of(usage, limit),
            policy=str(terms.policy),
        )
        self._registry.news.publish(
            MemoryExceeded(
                usage.gpu,
                usage.holder,
                usage.pod_uid,
                used=usage.memory,
                share=usage.share or 0,
                limit=limit,
                will_end=will_end,
                at=time(),
            )
        )

    async def _signal(
        self, usage: Usage, limit: int, process: Process, signal: Signals, *, dry: bool
    ) -> None:
        bound = log.bind(
            pid=process.pid,
            process_mib=(process.memory or 0) // MIB,
            signal=signal.name,
            **self._told_of(usage, limit),
        )
        if dry:
            bound.warning("dry run: a process would be ended, its container uses too much")
            return
        if process.who is None:
            return

        try:
            if not await self._host.signal(process.who, signal):
                bound.info("a process that was to be ended has gone by itself")
                return
        except HostError as error:
            bound.error("a process could not be ended", error=str(error))
            return

        self.tally.signals[signal] += 1
        bound.warning("a process is being ended: its container uses more GPU memory than it may")
        self._registry.news.publish(
            ProcessSignalled(
                usage.gpu,
                usage.holder,
                usage.pod_uid,
                process.pid,
                signal.name,
                memory=process.memory or 0,
                used=usage.memory,
                share=usage.share or 0,
                limit=limit,
                at=time(),
            )
        )

    def _told_of(self, usage: Usage, limit: int) -> dict[str, object]:
        return {
            "container": str(usage.holder),
            "gpu": str(self._registry.snapshot.gpus[usage.gpu].gpu),
            "share_mib": (usage.share or 0) // MIB,
            "limit_mib": limit // MIB,
            "used_mib": usage.memory // MIB,
        }

    def _tell(self, gpu: GpuId, why: str) -> None:
        """Say that a GPU is not watched, once for each reason."""
        if self._told.get(gpu) != why:
            self._told[gpu] = why
            log.warning("memory is not enforced on a GPU: NVML does not say who is on it", why=why)

    async def _hint(self) -> None:
        """Say, once, what keeps us from knowing whose processes are whose."""
        if self._hinted:
            return
        self._hinted = True
        for hint in await self._host.hints():
            log.warning("memory cannot be enforced", why=hint)
