"""Who uses what, put together: the asking, the enforcing, the telling."""

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from metagpu.core.backend import Guard
from metagpu.core.census import Census, Findings, Looks
from metagpu.core.config import Config
from metagpu.core.driver import Driver
from metagpu.core.driver_limits import DriverLimits
from metagpu.core.endurance import enduring
from metagpu.core.enforcement import Enforcement, Policy
from metagpu.core.enforcer import Enforcer, Terms
from metagpu.core.gpu import GpuId
from metagpu.core.host import Host
from metagpu.core.layout import Layout
from metagpu.core.lost import LostWatch, Reader
from metagpu.core.registry import Registry
from metagpu.core.strangers import StrangerWatch
from metagpu.core.tally import tally_report
from metagpu.core.usage import Told
from metagpu.core.usage_report import Pod, Rules, pod_report, usage_report
from metagpu.core.wishing import WishWatch


def terms_in(config: Config, layout: Layout, gpu: GpuId) -> Enforcement:
    """Give what the pool of a GPU says about its memory; one in no pool is nobody's matter."""
    pools = {pool.name: pool.memory_enforcement for pool in config.envelope.pools}

    for assignment in layout.assignments:
        if assignment.gpu.id == gpu and assignment.pool in pools:
            return pools[assignment.pool]
    return Enforcement(policy=Policy.OFF)


class Oversight:
    """See the module.

    Args:
        guards: what guards the containers of each backend, by its name.
        given: reads what the kubelet keeps of its answers.
    """

    def __init__(
        self,
        driver: Driver,
        host: Host,
        registry: Registry,
        terms: Terms,
        guards: Mapping[str, Guard],
        *,
        given: Reader,
    ) -> None:
        self._registry = registry
        self._census = Census(driver, host, registry)
        self._limits = DriverLimits(driver, host, registry, self._census, guards)
        self._rules = Rules(terms, guards, self._limits.holds)
        self._enforcer = Enforcer(self._census, host, registry, terms, guards, limits=self._limits)
        self._looks = Looks(self._census)
        self._strangers = StrangerWatch(self._census, host, registry)
        self._wishes = WishWatch(registry, terms, guards)
        self._lost = LostWatch(driver, registry, given)

    @property
    def tasks(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        """What has to run: memory enforced; strangers, refused wishes and lost devices told of."""
        return (
            self._enforcer.run,
            partial(enduring, self._strangers.run, "watch for strangers"),
            partial(enduring, self._wishes.run, "watch over annotations"),
            partial(enduring, self._lost.run, "watch for lost devices"),
        )

    @property
    def tally(self) -> dict[str, Any]:
        """Say what was done about memory since the daemon's start, and who is over now."""
        return tally_report(self._enforcer.tally, self._registry.snapshot, self._limits.count)

    @property
    def lost(self) -> list[dict[str, Any]]:
        """Say which containers were given MIG devices that are no more."""
        return self._lost.report()

    @property
    def driver_limits(self) -> int:
        """How many limits of memory the driver keeps."""
        return self._limits.count

    def remember(self, told: Told) -> None:
        """Take in what containers that are older than this daemon were told of their memory."""
        self._census.told = told

    @property
    def rules(self) -> Rules:
        """What holds on this node, for who judges findings."""
        return self._rules

    async def latest(self) -> Findings:
        """Say who is on all GPUs, by a look that others of the same second share."""
        return await self._looks.latest()

    async def report(self) -> dict[str, Any]:
        """Look at all GPUs and say who uses what, and what was done about it so far."""
        findings = await self._census.take()
        snapshot = self._registry.snapshot

        return {
            "at": findings.at,
            **usage_report(snapshot, findings, self._rules),
            "enforcement": self.tally,
        }

    async def report_to(self, pod: Pod) -> dict[str, Any]:
        """Say to a pod what concerns it, by a look that others of the same second share."""
        findings = await self.latest()
        told = pod_report(self._registry.snapshot, findings, self._rules, pod)
        return {"at": findings.at, **told}
