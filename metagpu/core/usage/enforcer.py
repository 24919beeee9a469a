"""Enforcement of memory limits: check containers, warn, and signal processes."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from random import SystemRandom
from signal import Signals
from time import time
from typing import Final

import anyio
import msgspec
import structlog
from anyio.lowlevel import checkpoint

from metagpu.core.config.memory import EnforcementPolicy, MemoryEnforcement
from metagpu.core.contracts.capabilities import MemoryGuard
from metagpu.core.contracts.host import HostProcesses
from metagpu.core.errors import DriverError, DriverUnavailable, HostError
from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.shares import Holder
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.reports.schema.daemon import EnforcementReport, OverLimitReport
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.core.runtime.tasks import run_with_restart
from metagpu.core.state.events import MemoryExceeded, ProcessSignalled
from metagpu.core.state.registry import Registry
from metagpu.core.usage.accounting import (
    ContainerUsage,
    GpuUsage,
    ProcessUsage,
    allocated_shares,
)
from metagpu.core.usage.annotations import effective_limit
from metagpu.core.usage.collector import UsageCollector
from metagpu.core.usage.driver_limits import DriverLimits
from metagpu.core.usage.policy import (
    Account,
    LimitViolation,
    Reclaim,
    borrowed_memory,
    decide,
    reclaim,
)
from metagpu.core.usage.timing import DEFAULT_TIMING, UsageTiming


class EnforcementRecord(msgspec.Struct):
    """The enforcement since the daemon's start, and containers above their limits.

    Attributes:
        warnings: how often a container was warned.
        signals: how often each signal was sent.
        over_limit: bytes above its limit, for each container that is above it now, by GPU.
    """

    warnings: int = 0
    signals: dict[Signals, int] = msgspec.field(
        default_factory=lambda: {Signals.SIGTERM: 0, Signals.SIGKILL: 0}
    )
    over_limit: dict[GpuId, Mapping[Holder, int]] = msgspec.field(default_factory=dict)


def enforcement_report(
    record: EnforcementRecord, snapshot: Snapshot, driver_limits: int = 0
) -> EnforcementReport:
    """Return the record of the enforcement.

    `driver_limits` is the number of limits that the driver has been given.
    """
    return EnforcementReport(
        driver_limits=driver_limits,
        warnings=record.warnings,
        signals={signal.name: count for signal, count in record.signals.items()},
        over_limit=[
            OverLimitReport(snapshot.gpus[gpu].gpu.index, str(holder), excess // MIB)
            for gpu, containers in record.over_limit.items()
            for holder, excess in containers.items()
        ],
    )


log = structlog.get_logger()

EnforcementSettings = Callable[[GpuId], MemoryEnforcement]
"""Returns the present memory settings of a GPU's pool."""

_Key = tuple[Holder, str | None]
_TURN: Final = 32
"""Containers that are judged at once: then the kubelet's requests have their turn."""
_chance: Final = SystemRandom()


def memory_guard_of(usage: ContainerUsage, guards: Mapping[str, MemoryGuard]) -> MemoryGuard | None:
    """Return what keeps a container within its memory, `None` if backends differ."""
    backends = {share.backend for share in usage.shares}
    found = {guards.get(backend) for backend in backends}
    return found.pop() if len(found) == 1 else None


class CheckMoments:
    """The moments of checks: one in each period, the same for all GPUs of this period.

    Checks at one moment share one change of threads for NVML, and one for /proc. Each moment is
    drawn at random from its period: a container that could compute the moments would be within its
    limit at these alone.
    """

    _EARLY: Final = 0.02
    """The part of a period by which a timer may end early: a check does not follow itself."""

    def __init__(self) -> None:
        self._drawn: dict[float, dict[int, float]] = {}

    def seconds_to_next(self, period: float) -> float:
        """Return the seconds to the next moment, two periods at most and a little.

        Where a check has taken nearly until the next moment, that one is left out.
        """
        now = anyio.current_time()
        number = int(now // period)
        known = self._drawn.get(period, {})
        drawn = {
            period_number: known.get(period_number) or _chance.random()
            for period_number in range(number, number + 3)
        }
        self._drawn[period] = drawn
        waits = ((period_number + part) * period - now for period_number, part in drawn.items())
        return next(wait for wait in waits if wait >= self._EARLY * period)


class Enforcer:
    """The enforcer of memory limits on all GPUs.

    Each GPU has a task of its own: a GPU that hangs delays no other GPU.

    Args:
        guards: the guard of each backend's containers, by the backend's name.
        limits: the limits in the driver, updated before each check; `None` for no such limits.

    Attributes:
        settings: returns a pool's present settings.
        record: counters since the daemon's start, and the containers above their limits now.
    """

    def __init__(
        self,
        collector: UsageCollector,
        host: HostProcesses,
        registry: Registry,
        settings: EnforcementSettings,
        guards: Mapping[str, MemoryGuard],
        *,
        limits: DriverLimits | None = None,
        timing: UsageTiming = DEFAULT_TIMING,
    ) -> None:
        self.settings = settings
        self.record = EnforcementRecord()
        self._collector = collector
        self._host = host
        self._registry = registry
        self._guards = guards
        self._limits = limits
        self._timing = timing
        self._reclaimed: dict[GpuId, Reclaim] = {}
        self._moments = CheckMoments()
        self._logged = LogOnce()
        self._warnings_logged = False

    async def run(self) -> None:
        """Keep containers within their limits, until cancelled."""
        watched: set[GpuId] = set()

        async with anyio.create_task_group() as group:
            async for gpus in self._registry.watch(lambda snapshot: frozenset(snapshot.gpus)):
                for gpu in gpus - watched:
                    name = f"memory enforcement of {gpu}"
                    group.start_soon(run_with_restart, partial(self._watch_gpu, gpu), name)
                watched |= gpus

    async def _watch_gpu(self, gpu: GpuId) -> None:
        violations: dict[_Key, LimitViolation] = {}

        while True:
            settings = self.settings(gpu)
            if settings.needs_watch and self._has_enforced_containers(
                self._registry.snapshot.gpus[gpu]
            ):
                pause = await self._check(gpu, settings, violations)
            else:
                violations.clear()
                self._reclaimed.pop(gpu, None)
                self.record.over_limit.pop(gpu, None)
                await self._update_limits(gpu, settings)
                pause = self._moments.seconds_to_next(self._timing.idle_period)
            await anyio.sleep(pause)

    async def _update_limits(self, gpu: GpuId, settings: MemoryEnforcement) -> None:
        """Update the driver's limits; the check that follows reports an NVML that is gone."""
        if self._limits is not None:
            with suppress(DriverUnavailable):
                await self._limits.update(gpu, settings)

    def _has_enforced_containers(self, state: GpuState) -> bool:
        """Return whether a container on the GPU has the enforcer as its only guard.

        The kubelet's checkpoint and the Pods' claims alone name init containers.
        """
        listed = (
            lease.share for lease in state.leases.values() if lease.holder or lease.resource_claim
        )
        return any(
            self._guards.get(share.backend) is MemoryGuard.ENFORCER
            for share in chain(listed, allocated_shares(state))
        )

    async def _check(
        self, gpu: GpuId, settings: MemoryEnforcement, violations: dict[_Key, LimitViolation]
    ) -> float:
        """Check one GPU and act on the result; return the seconds until the next check."""
        await self._log_warnings()
        await self._update_limits(gpu, settings)
        try:
            gpu_usage = await self._collector.collect_gpu(gpu)
            free = await self._collector.free_memory(gpu) if settings.burst else None
        except DriverError as error:
            self.record.over_limit.pop(gpu, None)
            if self._limits is not None and isinstance(error, DriverUnavailable):
                self._limits.forget(gpu)
            self._log_failure(gpu, error)
            return self._moments.seconds_to_next(settings.period)
        self._logged.clear(gpu)

        found: dict[_Key, LimitViolation] = {}
        over: dict[Holder, int] = {}
        pauses = []
        accounts: list[Account] = []
        async for usage in self._enforced(gpu_usage, idle=settings.burst is not None):
            key = usage.holder, usage.pod_uid
            effective = effective_limit(usage, self._registry.snapshot, settings)
            accounts.append((usage, effective))
            limit, own = (
                effective.limit if effective.settings.is_active else None,
                effective.settings,
            )
            decision = decide(usage, limit, violations.get(key), own, anyio.current_time())

            if decision.violation is not None:
                found[key] = decision.violation
            if limit is not None and usage.memory > limit:
                over[usage.holder] = usage.memory - limit
                if decision.warn:
                    self._warn((usage, effective))
                for process, signal in decision.signals:
                    await self._signal((usage, effective), process, signal)
            if decision.next_check is not None:
                pauses.append(decision.next_check)

        violations.clear()
        violations.update(found)
        self.record.over_limit[gpu] = over
        if settings.burst is None:
            self._reclaimed.pop(gpu, None)
        else:
            before, now = self._reclaimed.get(gpu, Reclaim()), anyio.current_time()
            reclaimed = reclaim(accounts, free, settings, before, now, violations=found.values())
            await self._carry_out(gpu, reclaimed)
            pauses += [] if reclaimed.next_check is None else [reclaimed.next_check]
        return min([self._moments.seconds_to_next(settings.period), *pauses])

    async def _carry_out(self, gpu: GpuId, decision: Reclaim) -> None:
        """Make borrowers give back what others need."""
        self._reclaimed[gpu] = decision
        for account in decision.warn:
            self._warn(account, borrowed=borrowed_memory(account))
        for account, process, signal in decision.signals:
            await self._signal(account, process, signal, borrowed=borrowed_memory(account))

    async def _enforced(self, gpu_usage: GpuUsage, *, idle: bool) -> AsyncIterator[ContainerUsage]:
        """Yield the containers that the enforcer guards; other tasks run in between.

        A container without a process uses no memory, whatever its limit: it is left out unless
        `idle` ones count too.
        """
        for number, usage in enumerate(gpu_usage.containers):
            if number % _TURN == 0:
                await checkpoint()
            has_part = idle or usage.processes
            if has_part and memory_guard_of(usage, self._guards) is MemoryGuard.ENFORCER:
                yield usage

    def _warn(self, account: Account, *, borrowed: int = 0) -> None:
        usage, terms = account
        will_end = terms.settings.policy is EnforcementPolicy.KILL and not terms.settings.dry_run
        self.record.warnings += 1
        keys, policy = self._log_keys(account, borrowed), str(terms.settings.policy)
        if borrowed:
            log.warning("borrowed gpu memory needed", **keys, policy=policy)
        else:
            log.warning("gpu memory limit exceeded", **keys, policy=policy)
        self._registry.events.publish(
            MemoryExceeded(
                usage.gpu,
                usage.holder,
                usage.pod_uid,
                used=usage.memory,
                share=usage.share_memory or 0,
                limit=terms.limit or 0,
                will_end=will_end,
                at=time(),
                borrowed=borrowed,
            )
        )

    async def _signal(
        self, account: Account, process: ProcessUsage, signal: Signals, *, borrowed: int = 0
    ) -> None:
        usage, terms = account
        bound = log.bind(
            pid=process.pid,
            process_mib=(process.memory or 0) // MIB,
            signal=signal.name,
            **self._log_keys(account, borrowed),
        )
        if terms.settings.dry_run:
            bound.warning("process not signalled in a dry run")
            return
        if process.identity is None:
            return

        try:
            if not await self._host.signal(process.identity, signal):
                bound.info("process already gone")
                return
        except HostError as error:
            bound.error("process signal failed", error=str(error))
            return

        self.record.signals[signal] += 1
        bound.warning("process signalled")
        self._registry.events.publish(
            ProcessSignalled(
                usage.gpu,
                usage.holder,
                usage.pod_uid,
                process.pid,
                signal.name,
                memory=process.memory or 0,
                used=usage.memory,
                share=usage.share_memory or 0,
                limit=terms.limit or 0,
                at=time(),
                borrowed=borrowed,
            )
        )

    def _log_keys(self, account: Account, borrowed: int) -> dict[str, object]:
        usage, terms = account
        return {
            "container": str(usage.holder),
            "gpu": str(self._registry.snapshot.gpus[usage.gpu].gpu),
            "share_mib": (usage.share_memory or 0) // MIB,
            "limit_mib": (terms.limit or 0) // MIB,
            "used_mib": usage.memory // MIB,
            **({"borrowed_mib": borrowed // MIB} if borrowed else {}),
        }

    def _log_failure(self, gpu: GpuId, error: DriverError) -> None:
        if self._logged.is_new(gpu, str(error)):
            log.warning("gpu memory not enforced", gpu=str(gpu), error=str(error))

    async def _log_warnings(self) -> None:
        """Log once why processes cannot be attributed to containers."""
        if self._warnings_logged:
            return
        self._warnings_logged = True
        for warning in await self._host.hints():
            log.warning("gpu memory not enforced", reason=warning)
