"""Has the driver itself refuse what a container may not have, where it can.

Its limit is the enforcer's, set on the container's cgroup as soon as that is there. The enforcer
goes on looking: what a container had before, and managed memory, the driver does not refuse.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio
import structlog
from msgspec.structs import replace

from metagpu.core.backend import Guard
from metagpu.core.census import Census
from metagpu.core.driver import Driver
from metagpu.core.enforcement import Annotation, Enforcement, Policy
from metagpu.core.errors import DriverError, DriverUnavailable, Unsupported
from metagpu.core.gpu import MIB, GpuId
from metagpu.core.host import Container, Home, Host
from metagpu.core.model import Holder, Lease, Share, ShareId
from metagpu.core.registry import Registry
from metagpu.core.snapshot import Versions
from metagpu.core.usage import Usage
from metagpu.core.wishes import Settled, settle

RESTARTS: Final = 2.0
"""Seconds between two looks for containers that were started anew in their pods."""
EAGER: Final = 30.0
"""Seconds after a change of leases in which a container may start at any moment: until then each
look looks for those that have not."""
HEIR: Final = 120.0
"""Seconds in which limits of an earlier daemon are looked for where none is wanted any more: by
then the kubelet has told who is here from before."""
AGAIN: Final = 10.0
"""Seconds until a limit is tried again that could not be set."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Kept:
    """What is known of one GPU.

    Attributes:
        limits: in bytes, of the containers that the driver limits, and what they are called;
            `None` of one whose limit could not be changed: some limit is there, to be lifted.
        homes: of the containers that hold shares, as they were found at `at`.
        leases: as they were then, and have been `since`.
        without: the driver's version that knows no limits on this GPU.
        asked: those whom an earlier daemon may have limited, once that was asked.
        searched: the leases under which such were looked for last.
        until: when nobody of before is looked for any more.
        later: when to try a container again.
    """

    limits: dict[Container, tuple[Holder, int | None]] = field(default_factory=dict)
    homes: Sequence[Home] = ()
    leases: Mapping[ShareId, Lease] | None = None
    at: float = 0.0
    since: float = 0.0
    without: Versions | None = None
    later: dict[Container, float] = field(default_factory=dict)
    asked: set[Container] = field(default_factory=set)
    searched: Mapping[ShareId, Lease] | None = None
    until: float | None = None


class DriverLimits:
    """The limits that the driver was given, of all GPUs.

    Args:
        guards: what guards the containers of each backend, by its name: those that the enforcer
            guards are limited.
    """

    def __init__(
        self,
        driver: Driver,
        host: Host,
        registry: Registry,
        census: Census,
        guards: Mapping[str, Guard],
    ) -> None:
        self._driver = driver
        self._host = host
        self._registry = registry
        self._census = census
        self._guards = guards
        self._kept: defaultdict[GpuId, _Kept] = defaultdict(_Kept)
        self._told: dict[GpuId, str] = {}

    @property
    def count(self) -> int:
        """How many limits are in force: of a container on two GPUs there are two."""
        return sum(
            limit is not None for kept in self._kept.values() for _, limit in kept.limits.values()
        )

    def holds(self, usage: Usage) -> bool:
        """Tell whether the driver keeps a container within its limit on a GPU."""
        kept = self._kept.get(usage.gpu)
        return kept is not None and any(
            holder == usage.holder and usage.pod_uid in (None, container.pod_uid)
            for container, (holder, limit) in kept.limits.items()
            if limit is not None
        )

    def forget(self, gpu: GpuId) -> None:
        """Know nothing of a GPU any more: a driver that is loaded again knows no limits."""
        self._kept.pop(gpu, None)

    async def keep(self, gpu: GpuId, terms: Enforcement) -> None:
        """Limit the containers on a GPU as they are to be now, and no others.

        Raises:
            DriverUnavailable: if NVML is gone; nothing is known to be limited then.
        """
        kept = self._kept[gpu]
        versions = self._registry.snapshot.versions
        wanted = terms.by_driver or Annotation.POLICY in terms.allow_annotations
        if kept.without == versions:
            return

        try:
            if not terms.by_driver:
                await self._inherit(gpu, kept, terms)
            if not (wanted or kept.limits):
                return
            for home, limit in await self._due(gpu, kept, terms):
                await self._limit(gpu, kept, home, limit)
        except Unsupported as error:
            self._kept[gpu] = _Kept(without=versions)
            log.info("the driver does not limit memory; it is enforced without", why=str(error))
        except DriverUnavailable:
            self.forget(gpu)
            raise

    async def _inherit(self, gpu: GpuId, kept: _Kept, terms: Enforcement) -> None:
        """Find limits that an earlier daemon of ours has left, so that they are lifted.

        They are known by their value: exactly what we would set. Another limit is somebody else's,
        or from another headroom, and stays.
        """
        now = anyio.current_time()
        kept.until = now + HEIR if kept.until is None else kept.until
        leases = self._registry.snapshot.gpus[gpu].leases
        shares = self._wards(gpu)
        if not shares or leases is kept.searched or now >= kept.until:
            return  # who was limited before is running: a container that comes later was not

        kept.searched = leases
        await self._find(gpu, kept, shares)
        strict = replace(terms, policy=Policy.KILL)
        for home in kept.homes:
            if home.container in kept.asked or home.holder not in shares:
                continue
            try:
                there = await self._driver.memory_limit(gpu, home.cgroup)
            except DriverUnavailable:
                raise
            except DriverError:
                there = None  # also where no limit is set at all: what cannot be read is left
            kept.asked.add(home.container)
            ours = self._settled(gpu, home, shares[home.holder], strict).limit
            if there is not None and ours is not None and abs(there - ours) < MIB:
                kept.limits[home.container] = home.holder, there

    def _settled(
        self, gpu: GpuId, home: Home, shares: Sequence[Share], terms: Enforcement
    ) -> Settled:
        """Say what holds of a container."""
        uid, holder = home.container.pod_uid, home.holder
        told = self._census.told.get((uid, holder.container, gpu))
        usage = Usage(gpu, holder, uid, tuple(shares), told=told)
        return settle(usage, self._registry.snapshot, terms)

    async def _due(
        self, gpu: GpuId, kept: _Kept, terms: Enforcement
    ) -> Sequence[tuple[Home, int | None]]:
        """Find the containers whose limit is not what it should be, and what it should be."""
        now = anyio.current_time()
        shares = self._wards(gpu)
        await self._find(gpu, kept, shares)

        due: list[tuple[Home, int | None]] = []
        for home in kept.homes:
            holder = home.holder
            if holder not in shares or kept.later.get(home.container, 0.0) > now:
                continue
            settled = self._settled(gpu, home, shares[holder], terms)
            limit = settled.limit if settled.terms.by_driver else None
            wanted = None if limit is None else (holder, limit)
            if kept.limits.get(home.container) != wanted:
                due.append((home, limit))
        return due

    async def _find(self, gpu: GpuId, kept: _Kept, shares: Mapping[Holder, list[Share]]) -> None:
        """Find the cgroups of containers, if there may be others than those known."""
        leases, now = self._registry.snapshot.gpus[gpu].leases, anyio.current_time()
        if leases is not kept.leases:
            kept.leases, kept.since = leases, now
        elif now - kept.at < RESTARTS:
            unknown = shares.keys() - {home.holder for home in kept.homes}
            if not unknown or now - kept.since > EAGER:
                return

        kept.homes, kept.at = await self._host.homes(shares.keys()), now
        here = {home.container for home in kept.homes}
        kept.limits = {it: limit for it, limit in kept.limits.items() if it in here}
        kept.later = {it: at for it, at in kept.later.items() if it in here}

    async def _limit(self, gpu: GpuId, kept: _Kept, home: Home, limit: int | None) -> None:
        try:
            await self._driver.limit_memory(gpu, home.cgroup, limit)
        except (Unsupported, DriverUnavailable):
            raise
        except DriverError as error:
            if limit is not None and home.container in kept.limits:
                kept.limits[home.container] = home.holder, None
            kept.later[home.container] = anyio.current_time() + AGAIN
            self._tell(gpu, str(error))
            return

        if limit is None:
            del kept.limits[home.container]
            log.info("the driver limits a container no more", container=str(home.holder))
        else:
            kept.limits[home.container] = home.holder, limit
            mib = limit // MIB
            log.info("the driver limits a container", container=str(home.holder), limit_mib=mib)

    def _wards(self, gpu: GpuId) -> Mapping[Holder, list[Share]]:
        """Give what containers hold of a GPU whom nothing else keeps within their shares."""
        found: defaultdict[Holder, list[Share]] = defaultdict(list)
        for lease in self._registry.snapshot.gpus[gpu].leases.values():
            guard = self._guards.get(lease.share.backend)
            if lease.holder is not None and guard is Guard.ENFORCER:
                found[lease.holder].append(lease.share)
        return found

    def _tell(self, gpu: GpuId, why: str) -> None:
        """Say that a container is not limited by the driver, once for each reason."""
        if self._told.get(gpu) != why:
            self._told[gpu] = why
            log.warning("the driver does not limit a container; it is looked at", why=why)
