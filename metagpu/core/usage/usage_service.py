"""The usage service: collection, enforcement and reports of GPU usage."""

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import structlog
from msgspec.structs import replace

from metagpu.core.config.memory import ComputeEnforcement
from metagpu.core.contracts.capabilities import MemoryGuard
from metagpu.core.contracts.driver import Driver
from metagpu.core.contracts.host import Host, StartingContainer
from metagpu.core.model.gpu import GpuId
from metagpu.core.reports.schema.daemon import (
    EnforcementReport,
    LostDevicesReport,
    MixedRequestReport,
)
from metagpu.core.reports.schema.usage import UsageReport
from metagpu.core.runtime.tasks import run_with_restart
from metagpu.core.state.registry import Registry
from metagpu.core.usage.accounting import PromisedMemory
from metagpu.core.usage.annotations import AnnotationWatch, UnmetPreferenceWatch
from metagpu.core.usage.collector import CachedUsage, NodeUsage, UsageCollector
from metagpu.core.usage.compute import ComputeWatch
from metagpu.core.usage.driver_limits import DriverLimits
from metagpu.core.usage.enforcer import EnforcementSettings, Enforcer, enforcement_report
from metagpu.core.usage.lease_differences import (
    AbsentContainerWatch,
    LeaseDifference,
    LeaseDifferenceKind,
    MixedRequestWatch,
    RunningHolders,
    UnauthorizedUseWatch,
    difference_of,
)
from metagpu.core.usage.lost_devices import AllocationReader, LostDeviceWatch
from metagpu.core.usage.report import ReportRules, RequestingPod, pod_report, usage_report
from metagpu.core.usage.timing import DEFAULT_TIMING, UsageTiming

log = structlog.get_logger()


class UsageService:
    """The collection, enforcement and reports of the usage of all GPUs.

    Args:
        settings: returns the present memory settings of a GPU's pool.
        guards: the guard of each backend's containers, by the backend's name.
        compute: returns the present compute settings of a GPU's pool.
        running: finds the containers that run.
        read_allocated: reads the allocations that the kubelet keeps.
        shows_one_answer: returns whether a container of several resources sees one's devices.
    """

    def __init__(
        self,
        driver: Driver,
        host: Host,
        registry: Registry,
        settings: EnforcementSettings,
        guards: Mapping[str, MemoryGuard],
        *,
        compute: Callable[[GpuId], ComputeEnforcement],
        running: RunningHolders,
        read_allocated: AllocationReader,
        shows_one_answer: Callable[[], bool],
        timing: UsageTiming = DEFAULT_TIMING,
    ) -> None:
        self._registry = registry
        self._host = host
        self._collector = UsageCollector(driver, host, registry, timing)
        self._limits = DriverLimits(driver, host, registry, self._collector, guards, timing=timing)
        self._enforcer = Enforcer(
            self._collector,
            host,
            registry,
            settings,
            guards,
            limits=self._limits,
            timing=timing,
        )
        self._cache = CachedUsage(self._collector, timing.cache_age)
        self._compute = ComputeWatch(registry, self.latest, compute, guards, timing)
        self._rules = ReportRules(
            settings, guards, self._limits.is_limited, lambda *key: self._compute.found.get(key)
        )
        self._unauthorized = UnauthorizedUseWatch(self._collector, host, registry, timing)
        self._absent = AbsentContainerWatch(registry, running, timing)
        self._annotations = AnnotationWatch(registry, settings, guards)
        self._preferences = UnmetPreferenceWatch(registry)
        self._lost = LostDeviceWatch(driver, registry, read_allocated, timing)
        self._mixed = MixedRequestWatch(registry, shows_one_answer, timing)

    @property
    def tasks(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        """Tasks to run: enforcement, and the watches."""
        return (
            self._enforcer.run,
            partial(run_with_restart, self._unauthorized.run, "watch for unauthorized use"),
            partial(run_with_restart, self._compute.run, "watch for excess compute"),
            partial(run_with_restart, self._absent.run, "watch for absent containers"),
            partial(run_with_restart, self._annotations.run, "watch for annotations"),
            partial(run_with_restart, self._preferences.run, "watch for preferences of GPUs"),
            partial(run_with_restart, self._lost.run, "watch for lost devices"),
            partial(run_with_restart, self._mixed.run, "watch for mixed requests"),
        )

    @property
    def enforcement_report(self) -> EnforcementReport:
        """Counters since the daemon's start, and the containers above their limit now."""
        return enforcement_report(
            self._enforcer.record, self._registry.snapshot, self._limits.count
        )

    @property
    def lease_differences(self) -> list[LeaseDifference]:
        """The differences between the leases and what processes and cgroups show."""
        snapshot = self._registry.snapshot
        found = [difference_of(use, snapshot) for use in self._unauthorized.found.values()]
        return found + [difference_of(absence, snapshot) for absence in self._absent.found.values()]

    @property
    def difference_counts(self) -> Mapping[LeaseDifferenceKind, int]:
        """The number of containers with a difference, those with lost devices too."""
        found = Counter(difference.kind for difference in self.lease_differences)
        found[LeaseDifferenceKind.LEASE_WITHOUT_DEVICE] = len(self.lost_devices)
        return {kind: found[kind] for kind in LeaseDifferenceKind}

    @property
    def lost_devices(self) -> list[LostDevicesReport]:
        """Containers that hold devices that no longer exist."""
        return self._lost.report()

    @property
    def mixed_requests(self) -> list[MixedRequestReport]:
        """Containers that hold shares of several resources, and see the devices of one."""
        return self._mixed.report()

    @property
    def driver_limits(self) -> int:
        """Number of memory limits in force in the driver."""
        return self._limits.count

    async def container_starting(
        self, starts: StartingContainer, read_leases: Callable[[], Awaitable[None]]
    ) -> Mapping[str, object]:
        """Name a container that has no process yet, and set its limits in the driver.

        Raises:
            HostError: it is not a container of a pod here.
            DriverError: a limit that it needs is not in force in time.
        """
        found = await self._host.starting(starts)
        limits = await self._limits.limit_starting(found, self._enforcer.settings, read_leases)
        log.info("container starting", container=str(found.holder), driver_limits=limits)
        return {"container": str(found.holder), "driverLimits": limits}

    def set_promised_memory(self, promised: PromisedMemory) -> None:
        """Set the memory promised to containers that are older than this daemon."""
        self._collector.set_promised_memory(promised)

    @property
    def rules(self) -> ReportRules:
        """Settings and guards of this node, for reports of usage."""
        return self._rules

    async def latest(self, *, sensors: bool = False) -> NodeUsage:
        """Return usage without details; callers of the same second share one collection."""
        return await self._cache.latest(sensors=sensors)

    async def report(self) -> UsageReport:
        """Collect and return the usage of all GPUs, with the enforcement so far."""
        usage = await self._collector.describe(await self._collector.collect())
        report = usage_report(self._registry.snapshot, usage, self._rules)
        return replace(report, enforcement=self.enforcement_report)

    async def report_for_pod(self, pod: RequestingPod) -> UsageReport:
        """Return a pod's own usage; callers of the same second share one collection."""
        usage = await self._collector.describe(await self.latest())
        return pod_report(self._registry.snapshot, usage, self._rules, pod)
