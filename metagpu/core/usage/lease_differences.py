"""Differences between leases and containers: values, sentences, and watches.

Unauthorized use: a container that sets `NVIDIA_VISIBLE_DEVICES` by itself, or is privileged, sees
GPUs that the kubelet did not allocate to it. The use is reported once for each container and GPU;
the daemon does nothing about it.

Absent containers: the kubelet keeps a share for its container as long as it lists the pod, also
while the container fails again and again, or while the kubelet waits for a container runtime that
does not answer. Only the kubelet can end such a lease: the watch reports it.

Mixed requests: by the strategy `envvar` each answer to Allocate sets NVIDIA_VISIBLE_DEVICES, and
the kubelet keeps one of the values, by chance, at each start of the container. Allocate names no
container, so the answer cannot join them; PodResources shows the container when it is admitted.
"""

import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import StrEnum
from time import time

import anyio
import msgspec
import structlog

from metagpu.core.contracts.host import Container, HostProcesses
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.mig import is_mig, slot_of
from metagpu.core.model.offers import Api
from metagpu.core.model.shares import UNKNOWN_BACKEND, Holder, ResourceName, Share, ShareId
from metagpu.core.model.snapshot import Snapshot, once
from metagpu.core.reports.schema.daemon import LeaseDifferenceReport, MixedRequestReport
from metagpu.core.state.events import ContainerAbsent, MixedRequestFound, UnauthorizedUseFound
from metagpu.core.state.registry import Registry
from metagpu.core.usage.accounting import UnauthorizedProcess
from metagpu.core.usage.collector import UsageCollector
from metagpu.core.usage.timing import DEFAULT_TIMING, UsageTiming


class LeaseDifferenceKind(StrEnum):
    """Kinds of differences: the side that lacks the other."""

    USE_WITHOUT_LEASE = "use_without_lease"
    LEASE_WITHOUT_CONTAINER = "lease_without_container"
    LEASE_WITHOUT_DEVICE = "lease_without_device"


class LeaseDifference(msgspec.Struct, frozen=True):
    """A difference that stays.

    Attributes:
        container: the holder, or the pod's uid where the container's names are unknown.
        pod_uid: the uid of its pod, `None` where it is unknown.
        reason: a sentence without the pod's name.
    """

    kind: LeaseDifferenceKind
    container: str
    pod_uid: str | None
    reason: str

    def report(self) -> LeaseDifferenceReport:
        """Return the difference as the status has it."""
        return LeaseDifferenceReport(str(self.kind), self.container, self.pod_uid, self.reason)


def difference_of(
    event: UnauthorizedUseFound | ContainerAbsent, snapshot: Snapshot
) -> LeaseDifference:
    """Return the difference that an event has reported."""
    if isinstance(event, ContainerAbsent):
        return LeaseDifference(
            LeaseDifferenceKind.LEASE_WITHOUT_CONTAINER,
            str(event.holder),
            event.pod_uid,
            describe_absence(event, snapshot),
        )
    return LeaseDifference(
        LeaseDifferenceKind.USE_WITHOUT_LEASE,
        str(event.holder or f"pod {event.pod_uid}"),
        event.pod_uid,
        describe_unauthorized_use(event, snapshot),
    )


def describe_unauthorized_use(event: UnauthorizedUseFound, snapshot: Snapshot) -> str:
    """Describe the use of a GPU by a container that holds no share of the GPU."""
    name = (event.holder.container if event.holder else "") or event.container_id[:12]
    uses = "some memory" if event.memory is None else f"{event.memory // MIB} MiB"
    return (
        f"container {name} uses {uses} of {describe_gpu(event.gpu, snapshot)} and holds no share "
        "of it: Kubernetes did not allocate this GPU to it"
    )


def describe_absence(event: ContainerAbsent, snapshot: Snapshot) -> str:
    """Describe shares of which no container runs."""
    held = " and ".join(
        f"{count} {'share' if count == 1 else 'shares'} of {describe_gpu(gpu, snapshot)}"
        for gpu, count in event.shares.items()
    )
    return (
        f"container {event.holder.container or 'of unknown name'} holds {held}, and no process of "
        f"it has run for {event.seconds / 60:.0f} min: the kubelet lists it as the holder still"
    )


def describe_gpu(gpu: GpuId, snapshot: Snapshot) -> str:
    """Return the name of a GPU in sentences."""
    known = snapshot.gpus.get(gpu)
    return f"GPU {known.gpu if known else gpu}"


def shares_of_holders(snapshot: Snapshot) -> Mapping[Holder, Mapping[GpuId, int]]:
    """Count the shares of each holder on each GPU."""
    found: dict[Holder, dict[GpuId, int]] = {}
    for gpu, state in snapshot.gpus.items():
        for lease in state.leases.values():
            if lease.holder is not None:
                counts = found.setdefault(lease.holder, {})
                counts[gpu] = counts.get(gpu, 0) + 1
    return found


@once
def claims_of_holders(snapshot: Snapshot) -> Mapping[Holder, frozenset[tuple[ShareId, float]]]:
    """Return the shares of each holder with the times of their claims.

    A pod that is created again under its name has other claims than the pod before.
    """
    found: dict[Holder, set[tuple[ShareId, float]]] = {}
    for state in snapshot.gpus.values():
        for share, lease in state.leases.items():
            if lease.holder is not None:
                found.setdefault(lease.holder, set()).add((share, lease.since))
    return {holder: frozenset(claims) for holder, claims in found.items()}


log = structlog.get_logger()

RunningHolders = Callable[[Collection[Holder]], Awaitable[Collection[Holder]]]
"""Returns those of some holders whose containers are seen to run."""


class AbsentContainerWatch:
    """A watch for holders whose cgroup has gone, or has no process.

    A holder that was never seen to run is unknown: its cgroup may not be visible, and its image may
    still be on its way. So is a holder whose pod was created again under its name.

    Attributes:
        last_seen: the event loop's time when each holder was last seen to run.
        found: the holders that are absent now.
    """

    def __init__(
        self, registry: Registry, running: RunningHolders, timing: UsageTiming = DEFAULT_TIMING
    ) -> None:
        self.last_seen: dict[Holder, float] = {}
        self.found: dict[Holder, ContainerAbsent] = {}
        self._claims = claims_of_holders(registry.snapshot)
        self._registry = registry
        self._running = running
        self._timing = timing

    async def run(self) -> None:
        """Check all holders periodically, until cancelled."""
        while True:
            await anyio.sleep(self._timing.absent_period)
            await self._check()

    async def _check(self) -> None:
        asked = claims_of_holders(self._registry.snapshot)
        running = await self._running(asked.keys()) if asked else ()
        now, claims = anyio.current_time(), claims_of_holders(self._registry.snapshot)
        self.last_seen = {
            absent_holder: seen
            for absent_holder, seen in self.last_seen.items()
            if claims.get(absent_holder) == self._claims.get(absent_holder)
        }
        self.last_seen |= {
            present: now
            for present in running
            if present in claims and claims[present] == asked.get(present)
        }
        self._claims = claims
        absent = {
            absent_holder: now - seen
            for absent_holder, seen in self.last_seen.items()
            if now - seen >= self._timing.absent_after
        }
        self.found = {
            absent_holder: event
            for absent_holder, event in self.found.items()
            if absent_holder in absent
        }
        for holder in absent.keys() - self.found.keys():
            self._report(holder, absent[holder])

    def _report(self, holder: Holder, seconds: float) -> None:
        snapshot = self._registry.snapshot
        shares = shares_of_holders(snapshot)[holder]
        pod = snapshot.pods.find(holder, None)
        event = ContainerAbsent(holder, pod.uid if pod else None, shares, seconds, at=time())
        self.found[holder] = event
        log.warning(
            "container of a lease absent",
            container=str(holder),
            reason=describe_absence(event, snapshot),
            fix=f"kubectl describe pod -n {holder.namespace} {holder.pod}",
        )
        self._registry.events.publish(event)


@once
def find_mixed_requests(snapshot: Snapshot) -> Mapping[Holder, Mapping[ResourceName, str]]:
    """Return the containers whose resources name different devices. Pure."""
    held: dict[Holder, dict[ResourceName, dict[str, None]]] = {}
    for state in snapshot.gpus.values():
        for lease in state.leases.values():
            if lease.holder is not None and lease.share.backend != UNKNOWN_BACKEND:
                devices = held.setdefault(lease.holder, {}).setdefault(lease.share.resource, {})
                devices[_device(lease.share, state.gpu.index)] = None
    return {
        holder: {name: " and ".join(devices) for name, devices in sorted(by_name.items())}
        for holder, by_name in held.items()
        if len({tuple(devices) for devices in by_name.values()}) > 1
    }


def _holders_by_variable(snapshot: Snapshot) -> set[Holder]:
    """Return the containers with shares of pools whose GPUs CDI does not name anyway."""
    return {
        lease.holder
        for state in snapshot.gpus.values()
        if state.api is Api.DEVICE_PLUGIN
        for lease in state.leases.values()
        if lease.holder is not None and lease.resource_claim is None
    }


def _device(share: Share, index: int) -> str:
    return f"{slot_of(share.id)} of GPU {index}" if is_mig(share.id) else f"GPU {index}"


def describe_mixed_request(event: MixedRequestFound) -> str:
    """Describe which devices a container does not see, and how to ask for them."""
    held = ", ".join(f"{devices} by {name}" for name, devices in event.devices.items())
    return (
        f"container {event.holder.container or 'of unknown name'} holds {held}, and sees what one "
        "of these resources gives, by chance at each start: deviceListStrategy envvar names GPUs "
        "in one variable. Request each resource in a container of its own, or let the operator "
        "set deviceListStrategy to cdi-cri, cdi-annotations or volume-mounts"
    )


class MixedRequestWatch:
    """A watch for containers that see the devices of one resource alone.

    Attributes:
        found: these containers, as they were reported.

    Args:
        hides: returns whether a container sees one of several answers now, in a pool of the API of
            device plugins.
    """

    def __init__(
        self,
        registry: Registry,
        hides: Callable[[], bool],
        timing: UsageTiming = DEFAULT_TIMING,
    ) -> None:
        self.found: dict[Holder, MixedRequestFound] = {}
        self._claims = claims_of_holders(registry.snapshot)
        self._registry = registry
        self._hides = hides
        self._timing = timing

    async def run(self) -> None:
        """Check all leases periodically, until cancelled."""
        while True:
            # First a wait: after a start, the writer of Events is a moment behind the leases.
            await anyio.sleep(self._timing.mixed_period)
            self._check()

    def report(self) -> list[MixedRequestReport]:
        """Return the containers."""
        return [
            MixedRequestReport(
                str(request.holder),
                request.pod_uid,
                describe_mixed_request(request),
            )
            for request in self.found.values()
        ]

    def _check(self) -> None:
        snapshot = self._registry.snapshot
        mixed, before = find_mixed_requests(snapshot), self._claims
        claims = self._claims = claims_of_holders(snapshot)
        # A container keeps the answers of its admission: a later strategy changes nothing for it.
        self.found = {
            holder: event
            for holder, event in self.found.items()
            if holder in mixed and claims[holder] == before.get(holder)
        }
        hidden = _holders_by_variable(snapshot) if self._hides() else set()
        for holder in (mixed.keys() - self.found.keys()) & hidden:
            pod = snapshot.pods.find(holder, None)
            event = MixedRequestFound(holder, pod.uid if pod else None, mixed[holder], at=time())
            self.found[holder] = event
            log.warning(
                "container sees the devices of one resource alone",
                container=str(holder),
                reason=describe_mixed_request(event),
            )
            self._registry.events.publish(event)


ContainerOnGpu = tuple[GpuId, Container]


def by_container(
    processes: Iterable[UnauthorizedProcess],
) -> Mapping[ContainerOnGpu, UnauthorizedProcess]:
    """Return the first unauthorized process of each container on each GPU.

    A process outside of pods is left out: programs of the host beside Kubernetes are allowed.
    """
    found: dict[ContainerOnGpu, UnauthorizedProcess] = {}
    for unauthorized in processes:
        identity = unauthorized.process.identity
        if identity is not None and identity.container is not None:
            found.setdefault((unauthorized.gpu, identity.container), unauthorized)
    return found


class UnauthorizedUseWatch:
    """A watch on all GPUs for processes of containers that hold no share.

    Attributes:
        found: the use that was reported and lasts, by GPU and container.
    """

    def __init__(
        self,
        collector: UsageCollector,
        host: HostProcesses,
        registry: Registry,
        timing: UsageTiming = DEFAULT_TIMING,
    ) -> None:
        self.found: dict[ContainerOnGpu, UnauthorizedUseFound] = {}
        self._collector = collector
        self._host = host
        self._registry = registry
        self._timing = timing

    async def run(self) -> None:
        """Check all GPUs periodically, until cancelled."""
        since: dict[ContainerOnGpu, float] = {}
        own_identities = await self._host.identify([os.getpid()])
        # The MPS servers that the daemon starts run in the daemon's own container.
        own = {identity.container for identity in own_identities.values()}

        while True:
            await anyio.sleep(self._timing.unauthorized_period)
            seen, unknown = await self._check()
            now = anyio.current_time()

            # A process on a GPU that NVML cannot read now is not taken for gone: no second report.
            since = {
                place: since.get(place, now)
                for place in {*since, *seen}
                if place in seen or place[0] in unknown
            }
            self.found = {place: use for place, use in self.found.items() if place in since}
            for place in seen.keys() - self.found.keys():
                admitted = now - since[place] >= self._timing.admission_window
                if place[1] not in own and admitted:
                    self.found[place] = self._report_use(seen[place], place[1])

    async def _check(
        self,
    ) -> tuple[Mapping[ContainerOnGpu, UnauthorizedProcess], AbstractSet[GpuId]]:
        """Return the unauthorized processes in pods, and the GPUs that cannot be read."""
        seen: dict[ContainerOnGpu, UnauthorizedProcess] = {}
        unknown: set[GpuId] = set()

        async def ask(gpu: GpuId) -> None:
            try:
                usage = await self._collector.collect_gpu(gpu)
            except DriverError:
                unknown.add(gpu)  # the health watch reports the error
            else:
                seen.update(by_container(usage.unauthorized))

        async with anyio.create_task_group() as group:
            for gpu, state in self._registry.snapshot.gpus.items():
                if state.kubelet.mig_devices_of_other_plugins is None:
                    unknown.add(gpu)  # the kubelet has not listed its pods yet: no holder is known
                else:
                    group.start_soon(ask, gpu)
        return seen, unknown

    def _report_use(
        self, unauthorized: UnauthorizedProcess, container: Container
    ) -> UnauthorizedUseFound:
        log.warning(
            "unauthorized gpu use",
            gpu=str(self._registry.snapshot.gpus[unauthorized.gpu].gpu),
            container=container.id[:12],
            pod_uid=container.pod_uid,
            pid=unauthorized.process.pid,
            used_mib=(unauthorized.process.memory or 0) // MIB,
            reason=unauthorized.reason,
        )
        use = UnauthorizedUseFound(
            unauthorized.gpu,
            unauthorized.holder,
            container.id,
            container.pod_uid,
            unauthorized.process.pid,
            unauthorized.process.memory,
            at=time(),
        )
        self._registry.events.publish(use)
        return use
