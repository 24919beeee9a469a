"""Memory limits in the driver, which refuses an allocation above a limit.

The limit is that of the enforcer, set on the container's cgroup as soon as the cgroup exists. The
enforcer goes on checking: the driver does not refuse managed memory, nor memory that a container
had before its limit.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio
import msgspec
import structlog
from msgspec.structs import replace

from metagpu.core.config.memory import AnnotationKind, EnforcementPolicy, MemoryEnforcement
from metagpu.core.contracts.capabilities import MemoryGuard
from metagpu.core.contracts.driver import LimitDriver
from metagpu.core.contracts.host import Container, ContainerCgroup, Host
from metagpu.core.errors import DriverError, DriverUnavailable, HostError, Unsupported
from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.shares import Holder, Lease, Share, ShareId
from metagpu.core.model.snapshot import Snapshot, Versions
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.core.state.registry import Registry
from metagpu.core.usage.accounting import ContainerUsage, allocated_shares, shares_of_claims
from metagpu.core.usage.annotations import effective_limit
from metagpu.core.usage.collector import UsageCollector
from metagpu.core.usage.policy import EffectiveLimit
from metagpu.core.usage.timing import DEFAULT_TIMING, UsageTiming

log = structlog.get_logger()


class _GpuLimits(msgspec.Struct):
    """The driver's limits on one GPU, and the search for containers to limit.

    Attributes:
        limits: holder and bytes of each container with a limit; `None` in place of the bytes where
            a limit could not be changed: some limit exists, and may have to be lifted.
        cgroups: of the containers that hold shares, as found at `searched_at`.
        leases: the leases of that search, unchanged since `leases_since`.
        unsupported_by: the driver's version that has no limits on this GPU.
        retry_at: when to try a container again whose limit could not be set.
        checked_for_inherited: containers whose limit by an earlier daemon has been read.
        inherited_leases: the leases of the last search for such limits.
        inherit_until: the end of the search for such limits.
    """

    limits: dict[Container, tuple[Holder, int | None]] = msgspec.field(default_factory=dict)
    cgroups: Sequence[ContainerCgroup] = ()
    leases: Mapping[ShareId, Lease] | None = None
    searched_at: float = 0.0
    leases_since: float = 0.0
    unsupported_by: Versions | None = None
    retry_at: dict[Container, float] = msgspec.field(default_factory=dict)
    checked_for_inherited: set[Container] = msgspec.field(default_factory=set)
    inherited_leases: Mapping[ShareId, Lease] | None = None
    inherit_until: float | None = None


class DriverLimits:
    """The memory limits set in the driver, on all GPUs.

    Args:
        guards: the guard of each backend's containers, by the backend's name. The containers that
            the enforcer guards get limits.
    """

    def __init__(
        self,
        driver: LimitDriver,
        host: Host,
        registry: Registry,
        collector: UsageCollector,
        guards: Mapping[str, MemoryGuard],
        *,
        timing: UsageTiming = DEFAULT_TIMING,
    ) -> None:
        self._driver = driver
        self._host = host
        self._registry = registry
        self._collector = collector
        self._guards = guards
        self._gpus: defaultdict[GpuId, _GpuLimits] = defaultdict(_GpuLimits)
        self._timing = timing
        self._logged = LogOnce()

    @property
    def count(self) -> int:
        """Number of limits in force: a container on two GPUs has two."""
        return sum(
            limit is not None for state in self._gpus.values() for _, limit in state.limits.values()
        )

    def is_limited(self, usage: ContainerUsage) -> bool:
        """Return whether the driver limits a container on a GPU."""
        state = self._gpus.get(usage.gpu)
        return state is not None and any(
            holder == usage.holder and usage.pod_uid in (None, container.pod_uid)
            for container, (holder, limit) in state.limits.items()
            if limit is not None
        )

    def forget(self, gpu: GpuId) -> None:
        """Forget the limits on a GPU: a driver that is loaded again has none."""
        self._gpus.pop(gpu, None)

    async def update(self, gpu: GpuId, settings: MemoryEnforcement) -> None:
        """Set the limits that the containers on a GPU need now, and lift all others.

        Raises:
            DriverUnavailable: NVML is gone; no limit is known to be in force then.
        """
        state = self._gpus[gpu]
        if state.unsupported_by == self._registry.snapshot.versions:
            return

        try:
            if not settings.uses_driver_limits:
                await self._inherit(gpu, state, settings)
            if not (self._may_limit(gpu, settings) or state.limits):
                return
            for target, limit in await self._pending_changes(gpu, state, settings):
                await self._set_limit(gpu, state, target, limit)
        except Unsupported as error:
            self._note_unsupported(gpu, error)
        except DriverUnavailable:
            self.forget(gpu)
            raise

    async def limit_starting(
        self,
        target: ContainerCgroup,
        settings: Callable[[GpuId], MemoryEnforcement],
        read_leases: Callable[[], Awaitable[None]],
    ) -> int:
        """Set the limits of a container that has no process yet; return their number.

        Where a GPU may need one, the wait is for the shares of the container to be known: the
        kubelet has all of them by now, and is asked. Those that are known count where it is silent.
        Where annotations may change the limit, it is for the API server to report the pod too.

        Raises:
            HostError: the name of the container is not certain, or its cgroup is not visible.
            DriverError: a limit that the container needs is not in force in time.
        """
        gpus = [gpu for gpu in self._registry.snapshot.gpus if self._may_limit(gpu, settings(gpu))]
        if not gpus or not (target.cgroup or target.hidden):
            return 0
        if target.hidden:
            raise HostError(f"the cgroup of container {target.container.id[:12]} is not visible")
        if not target.holder.container:
            raise HostError(f"the name of container {target.container.id[:12]} is not certain")
        with anyio.move_on_after(self._timing.start_deadline):
            with anyio.move_on_after(self._timing.start_deadline / 2):
                await read_leases()
            async for is_known in self._registry.watch(
                lambda now: any(_held_shares(now, gpu, target) for gpu in now.gpus)
            ):
                if is_known:
                    break
            limits = [await self._limit_starting(gpu, target, settings(gpu)) for gpu in gpus]
            return limits.count(True)
        allows = any(settings(gpu).allow_annotations for gpu in gpus)
        unreported = allows and not _is_reported(self._registry.snapshot, target)
        why = ": the API server has not reported the pod, which may change it" if unreported else ""
        raise DriverError(
            f"the memory limit of {target.holder} was not set within "
            f"{self._timing.start_deadline:g} s of its start{why}"
        )

    async def _limit_starting(
        self, gpu: GpuId, target: ContainerCgroup, settings: MemoryEnforcement
    ) -> bool:
        """Set the limit of a container on one GPU; return whether it has one.

        Raises:
            DriverError: the limit could not be set.
        """
        held = _held_shares(self._registry.snapshot, gpu, target)
        if not (shares := self._guarded(held)):
            return False
        if settings.allow_annotations:
            async for is_known in self._registry.watch(lambda now: _is_reported(now, target)):
                if is_known:
                    break
        effective = self._effective_limit(gpu, target, shares, settings)
        limit, state = effective.limit, self._gpus[gpu]
        if limit is None or not effective.settings.uses_driver_limits:
            return False
        try:
            await self._set_limit(gpu, state, target, limit)
        except Unsupported as error:
            self._note_unsupported(gpu, error)
            return False
        if state.limits.get(target.container) != (target.holder, limit):
            raise DriverError(f"the driver set no memory limit for {target.holder}")
        state.cgroups = [*state.cgroups, target]
        return True

    def _may_limit(self, gpu: GpuId, settings: MemoryEnforcement) -> bool:
        """Return whether containers on a GPU may need limits that the driver may have."""
        wanted = settings.uses_driver_limits or AnnotationKind.POLICY in settings.allow_annotations
        return wanted and self._gpus[gpu].unsupported_by != self._registry.snapshot.versions

    async def _inherit(self, gpu: GpuId, state: _GpuLimits, settings: MemoryEnforcement) -> None:
        """Find the limits that an earlier daemon has left, so that they are lifted.

        Such a limit is recognized by its value: exactly the limit that this daemon would set.
        Another limit belongs to another program, or to another headroom, and stays.
        """
        now = anyio.current_time()
        state.inherit_until = (
            now + self._timing.inherit_window
            if state.inherit_until is None
            else state.inherit_until
        )
        leases = self._registry.snapshot.gpus[gpu].leases
        if leases is state.inherited_leases or now >= state.inherit_until:
            return  # a container that starts after the daemon has no limit by an earlier one
        if not (shares := self._enforced_holders(gpu)):
            return

        state.inherited_leases = leases
        await self._find_cgroups(gpu, state, shares)
        strict = replace(settings, policy=EnforcementPolicy.KILL)
        for target in state.cgroups:
            if target.container in state.checked_for_inherited or target.holder not in shares:
                continue
            try:
                current = await self._driver.memory_limit(gpu, target.cgroup)
            except DriverUnavailable:
                raise
            except DriverError:
                current = None  # also where no limit is set; a limit that cannot be read stays
            state.checked_for_inherited.add(target.container)
            own_limit = self._effective_limit(gpu, target, shares[target.holder], strict).limit
            if current is not None and own_limit is not None and abs(current - own_limit) < MIB:
                state.limits[target.container] = target.holder, current

    def _effective_limit(
        self,
        gpu: GpuId,
        target: ContainerCgroup,
        shares: Sequence[Share],
        settings: MemoryEnforcement,
    ) -> EffectiveLimit:
        """Return the limit of a container."""
        uid, holder = target.container.pod_uid, target.holder
        promised = self._collector.promised_memory.get((uid, holder.container, gpu))
        usage = ContainerUsage(gpu, holder, uid, tuple(shares), promised_memory=promised)
        return effective_limit(usage, self._registry.snapshot, settings)

    async def _pending_changes(
        self, gpu: GpuId, state: _GpuLimits, settings: MemoryEnforcement
    ) -> Sequence[tuple[ContainerCgroup, int | None]]:
        """Return the containers whose limit has to change, each with its new limit."""
        now, shares = anyio.current_time(), self._enforced_holders(gpu)
        snapshot = self._registry.snapshot
        await self._find_cgroups(gpu, state, shares)

        due: list[tuple[ContainerCgroup, int | None]] = []
        for target in state.cgroups:
            holder = target.holder
            held = shares.get(holder) or self._guarded(_held_shares(snapshot, gpu, target))
            if not held or state.retry_at.get(target.container, 0.0) > now:
                continue
            effective = self._effective_limit(gpu, target, held, settings)
            limit = effective.limit if effective.settings.uses_driver_limits else None
            wanted = None if limit is None else (holder, limit)
            if state.limits.get(target.container) != wanted:
                due.append((target, limit))
        return due

    async def _find_cgroups(
        self, gpu: GpuId, state: _GpuLimits, shares: Mapping[Holder, Sequence[Share]]
    ) -> None:
        """Search for the containers' cgroups, if unknown ones may exist.

        The kubelet lists no init container: those with a limit are searched too.
        """
        leases, now = self._registry.snapshot.gpus[gpu].leases, anyio.current_time()
        if leases is not state.leases:
            state.leases, state.leases_since = leases, now
        elif now - state.searched_at < self._timing.cgroup_period:
            unknown = shares.keys() - {target.holder for target in state.cgroups}
            if not unknown or now - state.leases_since > self._timing.start_window:
                return

        limited = set(state.limits)
        holders = shares.keys() | {holder for holder, _ in state.limits.values()}
        state.cgroups, state.searched_at = await self._host.cgroups(holders), now
        started = state.limits.keys() - limited  # during the search
        present = started.union(target.container for target in state.cgroups)
        state.limits = {
            container: limit for container, limit in state.limits.items() if container in present
        }
        state.retry_at = {
            container: at for container, at in state.retry_at.items() if container in present
        }

    async def _set_limit(
        self, gpu: GpuId, state: _GpuLimits, target: ContainerCgroup, limit: int | None
    ) -> None:
        try:
            await self._driver.limit_memory(gpu, target.cgroup, limit)
        except (Unsupported, DriverUnavailable):
            raise
        except DriverError as error:
            if limit is not None and target.container in state.limits:
                state.limits[target.container] = target.holder, None
            state.retry_at[target.container] = anyio.current_time() + self._timing.limit_retry
            self._log_failure(gpu, error)
            return

        if limit is None:
            del state.limits[target.container]
            log.info("driver memory limit removed", container=str(target.holder))
        else:
            state.limits[target.container] = target.holder, limit
            mib = limit // MIB
            log.info("driver memory limit set", container=str(target.holder), limit_mib=mib)

    def _note_unsupported(self, gpu: GpuId, error: Unsupported) -> None:
        self._gpus[gpu] = _GpuLimits(unsupported_by=self._registry.snapshot.versions)
        log.info("driver memory limits unsupported", gpu=str(gpu), reason=str(error))

    def _enforced_holders(self, gpu: GpuId) -> Mapping[Holder, Sequence[Share]]:
        """Return the shares of each container on a GPU that the enforcer guards."""
        held = self._registry.snapshot.gpus[gpu].shares_by_holder
        found = {holder: self._guarded(shares) for holder, shares in held.items()}
        return {holder: shares for holder, shares in found.items() if shares}

    def _guarded(self, shares: Sequence[Share]) -> Sequence[Share]:
        backends = {share.backend for share in shares}
        ours = {
            backend for backend in backends if self._guards.get(backend) is MemoryGuard.ENFORCER
        }
        return shares if ours == backends else [share for share in shares if share.backend in ours]

    def _log_failure(self, gpu: GpuId, error: DriverError) -> None:
        if self._logged.is_new(gpu, str(error)):
            log.warning("driver memory limit failed", gpu=str(gpu), error=str(error))


def _is_reported(snapshot: Snapshot, target: ContainerCgroup) -> bool:
    """Return whether a container's pod is known, as far as an API server reports pods."""
    pods = snapshot.pods
    return not pods.awaited or pods.find(target.holder, target.container.pod_uid) is not None


def _held_shares(snapshot: Snapshot, gpu: GpuId, target: ContainerCgroup) -> Sequence[Share]:
    """Return the shares of a container on a GPU.

    The kubelet's checkpoint has the pod's uid, and names init containers; so do the claims of their
    Pods. The name alone counts for what the checkpoint does not have: an ended pod may have had the
    same name.
    """
    state, container = snapshot.gpus[gpu], target.container
    key = container.pod_uid, target.holder.container
    allocated = [share for share in allocated_shares(state) if key in state.allocated[share.id]]
    of_claims = shares_of_claims(snapshot, {container: target.holder}).get(container, ())
    named = (
        *state.shares_by_holder.get(target.holder, ()),
        *(share for share in of_claims if share.gpu == gpu),
    )
    return allocated or [share for share in named if share.id not in state.allocated]
