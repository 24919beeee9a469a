"""Recent events of the node as sentences, for people who open the page later.

Reasons and sentences are those of the Kubernetes Events; grants and ends of pods, which the kubelet
reports itself, and new layouts are added.
"""

import operator
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import anyio
import msgspec
from anyio import to_thread
from msgspec.structs import replace

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.quantities import iso_time
from metagpu.core.model.shares import Lease, Share, ShareId, holders_of
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.schema.daemon import EventReport
from metagpu.core.reports.schema.gpus import UsedGpuReport
from metagpu.core.runtime.tasks import run_with_restart
from metagpu.core.state.events import Event, LayoutApplied
from metagpu.core.state.facts import GpuCordoned, GpuUncordoned, SharesClaimed
from metagpu.core.state.registry import Registry
from metagpu.core.usage.report import RequestingPod
from metagpu.plugins.cluster.event_recorder import SEVERE, EventData, EventReason, ObjectReference
from metagpu.plugins.cluster.events import (
    NODE_EVENT_KINDS,
    POD_EVENT_KINDS,
    node_event_of,
    pod_event_of,
)

KEPT: Final = 50
"""Events of the node that are kept, and as many of pods: no pod hides a fault by its own."""
GRANTED: Final = "GPUSharesGranted"
FREED: Final = "GPUSharesFreed"
PERIOD: Final = 0.5
"""Seconds from one look at the leases, if they change, to the next."""
_OF_A_WHOLE_GPU: Final = frozenset(
    (
        *(EventReason.GPU_UNHEALTHY, EventReason.GPU_RECOVERED, EventReason.GPU_RESET_NEEDED),
        *(EventReason.GPU_CORDONED, EventReason.GPU_UNCORDONED),
    )
)
"""Events that every pod of the GPU may read: they name no pod and no MIG device."""
_OWN_KINDS: Final = (SharesClaimed, LayoutApplied, GpuCordoned, GpuUncordoned)

Held = Mapping[tuple[str, str], Mapping[ShareId, Share]]
"""The shares of each pod, by namespace and name."""


class RecentEvent(msgspec.Struct, frozen=True):
    """One event, as a sentence; `severity` is info, warning or error.

    Attributes:
        of_pod: whether pods cause it, as often as they like.
        pod: namespace and name of the pod that it is about, `None` for any other subject.
        device: the uuid of the MIG device that it is about alone, empty for none.
    """

    at: float
    gpu: int | None
    severity: str
    reason: str
    text: str
    of_pod: bool = False
    pod: tuple[str, str] | None = None
    device: str = ""

    def report(self, node: str) -> EventReport:
        """Return the event as a report has it."""
        at = iso_time(self.at)
        return EventReport(at, node, self.gpu, self.severity, self.reason, self.text)


class RecentEvents:
    """The last events of a node, from the event bus."""

    def __init__(self, registry: Registry, node: str) -> None:
        self._registry = registry
        self._node = ObjectReference("Node", node)
        self._kept = {of_pod: deque[RecentEvent](maxlen=KEPT) for of_pod in (False, True)}
        self._claimed: set[ShareId] = set()
        self._held: Held = {}
        self._leases: Sequence[Mapping[ShareId, Lease]] = ()

    async def run(self) -> None:
        """Keep events until cancelled; a failure here ends nothing else."""
        async with anyio.create_task_group() as group:
            group.start_soon(partial(run_with_restart, self._follow_leases, "events of leases"))
            group.start_soon(partial(run_with_restart, self._follow_bus, "recent events"))

    async def _follow_bus(self) -> None:
        registry, kinds = self._registry, {*NODE_EVENT_KINDS, *POD_EVENT_KINDS, *_OWN_KINDS}
        with registry.events.subscribe(*kinds) as events:
            async for event in events:
                if isinstance(event, SharesClaimed):
                    self._claimed.update(share.id for share in event.shares)
                elif found := describe_event(event, registry.snapshot, self._node):
                    self._add(found)

    async def _follow_leases(self) -> None:
        """Compare the leases; that the kubelet names a pod is no event of the bus."""
        snapshot = Snapshot()
        while True:
            snapshot = await self._registry.changed_since(snapshot)
            leases = [state.leases for state in snapshot.gpus.values()]
            if any(map(operator.is_not, leases, self._leases)) or len(leases) != len(self._leases):
                await self._compare(snapshot)
                self._leases = leases
            await anyio.sleep(PERIOD)

    async def _compare(self, snapshot: Snapshot) -> None:
        """Add grants and ends; a thread compares, as a node may have thousands of leases."""
        before, claimed = self._held, frozenset(self._claimed)

        def compare() -> tuple[Held, list[RecentEvent], frozenset[ShareId]]:
            held = pod_shares(snapshot)
            events = list(lease_events(before, held, claimed, snapshot))
            return held, events, claimed - unnamed_shares(snapshot)

        self._held, events, named = await to_thread.run_sync(compare)
        self._claimed -= named
        for event in events:
            self._add(event)

    def report(self) -> list[EventReport]:
        """Return the events, the latest first."""
        return [event.report(self._node.name) for event in self._latest_first()]

    def report_for_pod(
        self, pod: RequestingPod, gpus: Iterable[UsedGpuReport]
    ) -> list[EventReport]:
        """Return the events that are about a pod, or about the health of what it holds.

        Args:
            pod: the pod that asks.
            gpus: the GPUs of its report, with its MIG devices.
        """
        indices, devices = set[int](), set[str]()
        for gpu in gpus:
            indices.add(gpu.index)
            devices.update(device.device for device in gpu.devices or ())
        return [
            event.report(self._node.name)
            for event in self._latest_first()
            if event.pod == (pod.namespace, pod.name)
            or event.device in devices
            or (event.reason in _OF_A_WHOLE_GPU and event.gpu in indices)
        ]

    def _latest_first(self) -> list[RecentEvent]:
        found = [event for kept in self._kept.values() for event in kept]
        return sorted(found, key=lambda event: event.at, reverse=True)

    def _add(self, event: RecentEvent) -> None:
        kept = self._kept[event.of_pod]
        if kept and (kept[-1].reason, kept[-1].text) == (event.reason, event.text):
            kept.pop()  # what repeats has the time of its last occurrence
        kept.append(event)


def describe_event(event: Event, snapshot: Snapshot, node: ObjectReference) -> RecentEvent | None:
    """Return an event of the bus as a sentence, `None` for any other. Pure."""
    known = snapshot.gpus.get(GpuId(getattr(event, "gpu", None) or ""))
    index, now = known.gpu.index if known else None, time.time()
    match event:
        case LayoutApplied():
            offers = [f"{len(offer.shares)} {name}" for name, offer in snapshot.offers.items()]
            text = f"the configuration in force offers {', '.join(offers) or 'no shares'}"
            return RecentEvent(now, None, "info", EventReason.CONFIG_APPLIED, text)
        case GpuCordoned(reason=reason):
            text = f"GPU {index} accepts no new shares: {reason}"
            return RecentEvent(now, index, "info", EventReason.GPU_CORDONED, text)
        case GpuUncordoned() if known and known.cordon:
            return None  # another source keeps new pods away
        case GpuUncordoned():
            text = f"GPU {index} accepts new shares again"
            return RecentEvent(now, index, "info", EventReason.GPU_UNCORDONED, text)

    data = pod_event_of(event, snapshot) or node_event_of(event, snapshot, node)
    if data is None:
        return None
    return replace(_from_event_data(data, now, index), device=getattr(event, "device", ""))


def _from_event_data(data: EventData, at: float, gpu: int | None) -> RecentEvent:
    subject, severity = data.subject, "warning" if data.warning else "info"
    of_pod = subject.kind == "Pod"
    return RecentEvent(
        at,
        gpu,
        "error" if data.reason in SEVERE else severity,
        data.reason,
        f"{subject.namespace}/{subject.name}: {data.note}" if of_pod else data.note,
        of_pod=of_pod or data.minor,
        pod=(subject.namespace, subject.name) if of_pod else None,
    )


def pod_shares(snapshot: Snapshot) -> Held:
    """Return the shares of each pod that the kubelet has named. Pure."""
    held: defaultdict[tuple[str, str], dict[ShareId, Share]] = defaultdict(dict)
    for state in snapshot.gpus.values():
        for lease in state.leases.values():
            for holder in holders_of(lease):
                held[holder.namespace, holder.pod][lease.share.id] = lease.share
    return held


def unnamed_shares(snapshot: Snapshot) -> frozenset[ShareId]:
    """Return the claimed shares of which the kubelet has not named the pod yet. Pure."""
    return frozenset(
        lease.share.id
        for state in snapshot.gpus.values()
        for lease in state.leases.values()
        if lease.holder is None
    )


def lease_events(
    before: Held, now: Held, claimed: Iterable[ShareId], snapshot: Snapshot
) -> Iterator[RecentEvent]:
    """Yield grants and ends between two looks at the shares of pods. Pure.

    A share that nobody claimed since the daemon's start was granted before it: no event now.
    """
    new = frozenset(claimed)
    for pod, shares in now.items():
        known = before.get(pod, {})
        granted = [
            share for share_id, share in shares.items() if share_id in new and share_id not in known
        ]
        yield from _share_events(pod, granted, GRANTED, "has", snapshot)
    for pod, shares in before.items():
        present = now.get(pod, {})
        freed = [share for share_id, share in shares.items() if share_id not in present]
        yield from _share_events(pod, freed, FREED, "has given back", snapshot)


def _share_events(
    pod: tuple[str, str], shares: Iterable[Share], reason: str, verb: str, snapshot: Snapshot
) -> Iterator[RecentEvent]:
    by_gpu: defaultdict[tuple[int, str], int] = defaultdict(int)
    for share in shares:
        if (state := snapshot.gpus.get(share.gpu)) is not None:
            by_gpu[state.gpu.index, share.resource] += 1
    for (index, resource), count in by_gpu.items():
        what = f"{count} {'share' if count == 1 else 'shares'} of {resource}"
        text = f"{'/'.join(pod)} {verb} {what} on GPU {index}"
        yield RecentEvent(time.time(), index, "info", reason, text, of_pod=True, pod=pod)
