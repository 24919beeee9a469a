"""Kubernetes Events of the Node and of pods, from the events of this daemon.

Pure functions choose each Event; tasks feed the recorders.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.shares import CordonSource, Holder, ResourceName
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.events import (
    AllocationRefused,
    AnnotationRejected,
    ClaimRefusalEnded,
    ConfigRejected,
    ContainerAbsent,
    DaemonNotReady,
    DevicesLost,
    Event,
    MemoryExceeded,
    MixedRequestFound,
    PreferenceNotMet,
    ProcessSignalled,
    ResourceClaimRefused,
    TimeExceeded,
    UnauthorizedUseFound,
)
from metagpu.core.state.facts import (
    BackendSuspended,
    CompetingPluginFound,
    GpuCordoned,
    GpuFaulted,
    GpuRecovered,
    GpuUncordoned,
    GpuUnheard,
    InstanceFaulted,
    InstanceRecovered,
    PodsListed,
    RegistrationProblemFound,
    UnreadableGpusFound,
)
from metagpu.core.state.registry import Registry
from metagpu.core.usage.compute import describe_excess
from metagpu.core.usage.lease_differences import (
    describe_absence,
    describe_gpu,
    describe_mixed_request,
    describe_unauthorized_use,
)
from metagpu.core.usage.lost_devices import describe_loss
from metagpu.plugins.cluster.event_recorder import (
    EventData,
    EventReason,
    EventRecorder,
    ObjectReference,
)
from metagpu.plugins.cluster.held_gpus import Troubles, gpu_events_between, troubles_of
from metagpu.plugins.cluster.node_object import KubeObject
from metagpu.plugins.cluster.refusals import (
    RefusalMatcher,
    claim_refusal_event,
    node_refusal_event,
    pod_refusal_events,
)

NODE_EVENT_KINDS: Final = (
    *(GpuFaulted, GpuRecovered, GpuUnheard, InstanceFaulted, InstanceRecovered),
    *(GpuCordoned, GpuUncordoned, CompetingPluginFound, BackendSuspended, UnauthorizedUseFound),
    *(ConfigRejected, RegistrationProblemFound, UnreadableGpusFound, AllocationRefused),
    DaemonNotReady,
)
"""The events that become Events of the node."""


def node_event_of(  # noqa: PLR0911 - one return for each kind of event
    event: Event,
    snapshot: Snapshot,
    node: ObjectReference,
    competitor_of: Callable[[ResourceName], str] = lambda _: "another device plugin",
) -> EventData | None:
    """Return the Event of the node, `None` for an event of something else.

    `competitor_of` names the competing plugin that serves a resource.
    """
    match event:
        case ConfigRejected(reason, _, effect):
            note = f"{reason}; {effect}"
            return EventData(node, EventReason.CONFIG_REJECTED, note, "Configure", warning=True)
        case DaemonNotReady(reason):
            return EventData(node, EventReason.DAEMON_NOT_READY, reason, "Start", warning=True)
        case CompetingPluginFound(resource, sockets):
            note = f"{resource} is served by {competitor_of(resource)} on {sockets}, not by metagpu"
            return EventData(node, EventReason.COMPETING_PLUGIN, note, "Register", warning=True)
        case RegistrationProblemFound(resource, problem):
            note = f"{resource}: {problem}"
            return EventData(node, EventReason.REGISTRATION_PROBLEM, note, "Register", warning=True)
        case UnreadableGpusFound(reasons) if reasons:
            note = f"NVML counts GPUs that cannot be read: {'; '.join(reasons.values())}"
            return EventData(node, EventReason.GPU_UNREADABLE, note, "CheckHealth", warning=True)
        case AllocationRefused():
            return node_refusal_event(event, node)
        case UnauthorizedUseFound() if pod_event_of(event, snapshot) is None:
            use = describe_unauthorized_use(event, snapshot)
            note = f"{use}; its pod has the uid {event.pod_uid}"
            reason = EventReason.GPU_USED_WITHOUT_SHARE
            return EventData(node, reason, note, "CheckUsage", warning=True, minor=True)

    data = _gpu_event_of(event)
    if data is None:
        return None
    known = snapshot.gpus.get(data.gpu)
    note = f"GPU {known.gpu if known else data.gpu}: {data.message}"
    return EventData(node, data.reason, note, "CheckHealth", warning=data.warning)


class _GpuEvent(NamedTuple):
    """An event of one GPU."""

    reason: EventReason
    gpu: GpuId
    message: str
    warning: bool = False


def _gpu_event_of(event: Event) -> _GpuEvent | None:
    data: _GpuEvent | None = None

    match event:
        case GpuFaulted(gpu, reason):
            data = _GpuEvent(EventReason.GPU_UNHEALTHY, gpu, reason, warning=True)
        case GpuRecovered(gpu, reason):
            data = _GpuEvent(EventReason.GPU_RECOVERED, gpu, reason)
        case InstanceFaulted(gpu, device, reason):
            message = f"MIG device {device} alone: {reason}"
            data = _GpuEvent(EventReason.MIG_DEVICE_UNHEALTHY, gpu, message, warning=True)
        case InstanceRecovered(gpu, device, reason):
            data = _GpuEvent(
                EventReason.MIG_DEVICE_RECOVERED, gpu, f"MIG device {device}: {reason}"
            )
        case GpuUnheard(gpu, reason):
            message = f"NVML does not report its XIDs: {reason}"
            data = _GpuEvent(EventReason.GPU_EVENTS_UNAVAILABLE, gpu, message, warning=True)
        case GpuCordoned(gpu, reason, source=CordonSource.OPERATOR | CordonSource.NODE):
            data = _GpuEvent(EventReason.GPU_CORDONED, gpu, reason)
        case GpuUncordoned(gpu, source=CordonSource.OPERATOR | CordonSource.NODE):
            data = _GpuEvent(EventReason.GPU_UNCORDONED, gpu, "accepts new shares again")
        case BackendSuspended(gpu, reason=reason, until_reset=True):
            data = _GpuEvent(EventReason.GPU_RESET_NEEDED, gpu, reason, warning=True)
    return data


def standing_problems(snapshot: Snapshot, node: ObjectReference) -> Sequence[EventData]:
    """Return Events of GPUs that cannot be read, or wait for a reset already.

    A start of the daemon reads GPUs, and may enable MIG mode, before the API server's side runs.
    """
    events: list[Event] = [
        UnreadableGpusFound(
            {i: verdict.reason for i, verdict in snapshot.unreadable_gpus.items()}, at=0
        ),
        *(
            BackendSuspended(gpu, backend, pause.reason, pause.since, until_reset=True)
            for gpu, state in snapshot.gpus.items()
            for backend, pause in state.suspended.items()
            if pause.until_reset
        ),
    ]
    found = (node_event_of(event, snapshot, node) for event in events)
    return [data for data in found if data is not None]


POD_EVENT_KINDS: Final = (
    MemoryExceeded,
    ProcessSignalled,
    TimeExceeded,
    UnauthorizedUseFound,
    ContainerAbsent,
    AnnotationRejected,
    PreferenceNotMet,
    DevicesLost,
    MixedRequestFound,
)
"""The events that become Events of a pod."""


def pod_event_of(event: Event, snapshot: Snapshot) -> EventData | None:
    """Return the Event of the pod; `None` where the pod's name is unknown.

    Events that differ in numbers alone share a key, and so become one Event with a count: a
    container that restarts again and again does the same again and again.
    """
    match event:
        case MemoryExceeded():
            then = "its processes end if it stays so" if event.will_end else "it keeps running"
            exceeded, needed = EventReason.GPU_MEMORY_EXCEEDED, EventReason.GPU_MEMORY_NEEDED
            than = "its share, and others need it" if event.borrowed else "it may"
            return EventData(
                _pod(event.holder.namespace, event.holder.pod, event.pod_uid),
                needed if event.borrowed else exceeded,
                f"container {_name(event.holder)} uses more memory of "
                f"{describe_gpu(event.gpu, snapshot)} than {than}: {_amounts(event)}; {then}",
                "EnforceMemory",
                warning=True,
                key=f"{event.holder.container} {event.gpu}",
            )
        case ProcessSignalled():
            return EventData(
                _pod(event.holder.namespace, event.holder.pod, event.pod_uid),
                EventReason.GPU_PROCESS_SIGNALED,
                f"process {event.pid} (on the node) of container {_name(event.holder)} "
                f"was sent {event.signal}: it had {event.memory // MIB} MiB of "
                f"{describe_gpu(event.gpu, snapshot)}, and "
                f"{'others need it' if event.borrowed else 'the container more than it may'}: "
                f"{_amounts(event)}",
                "EnforceMemory",
                warning=True,
                key=f"{event.holder.container} {event.gpu} {event.signal}",
            )
        case UnauthorizedUseFound():
            return _unauthorized_use(event, snapshot)
        case AnnotationRejected() | PreferenceNotMet():
            return _annotation_event(event)
        case ContainerAbsent() | DevicesLost() | MixedRequestFound() | TimeExceeded():
            return _holder_event(event, snapshot)
    return None


def _annotation_event(event: AnnotationRejected | PreferenceNotMet) -> EventData:
    pod = event.pod
    reason = (
        EventReason.GPU_PREFERENCE_NOT_MET
        if isinstance(event, PreferenceNotMet)
        else EventReason.GPU_MEMORY_ANNOTATION_REJECTED
    )
    return EventData(
        _pod(pod.namespace, pod.name, pod.uid),
        reason,
        event.reason,
        "Configure",
        warning=True,
        minor=True,
    )


def _holder_event(
    event: ContainerAbsent | DevicesLost | MixedRequestFound | TimeExceeded, snapshot: Snapshot
) -> EventData:
    holder = event.holder
    if isinstance(event, DevicesLost):
        reason, note = (
            EventReason.GPU_DEVICE_LOST,
            describe_loss(holder.container, event.devices, event.fix),
        )
    elif isinstance(event, MixedRequestFound):
        reason, note = EventReason.GPU_NOT_VISIBLE, describe_mixed_request(event)
    elif isinstance(event, TimeExceeded):
        note = describe_excess(event, snapshot)
        reason = EventReason.GPU_TIME_EXCEEDED
    else:
        reason, note = EventReason.GPU_SHARE_WITHOUT_CONTAINER, describe_absence(event, snapshot)
    return EventData(
        _pod(holder.namespace, holder.pod, event.pod_uid),
        reason,
        note,
        "CheckUsage",
        warning=True,
        key=holder.container,
        minor=not isinstance(event, DevicesLost),
    )


def _unauthorized_use(event: UnauthorizedUseFound, snapshot: Snapshot) -> EventData | None:
    known, holder = snapshot.pods.by_uid.get(event.pod_uid), event.holder
    if known is not None:
        subject = _pod(known.namespace, known.name, known.uid)
    elif holder is not None:
        subject = _pod(holder.namespace, holder.pod, event.pod_uid)
    else:
        return None

    return EventData(
        subject,
        EventReason.GPU_USED_WITHOUT_SHARE,
        describe_unauthorized_use(event, snapshot),
        "CheckUsage",
        warning=True,
        key=f"{event.container_id} {event.gpu}",
        minor=True,
    )


def _pod(namespace: str, name: str, uid: str | None) -> ObjectReference:
    return ObjectReference("Pod", name, uid or "", namespace)


def _amounts(event: MemoryExceeded | ProcessSignalled) -> str:
    borrowed = f"it has borrowed {event.borrowed // MIB} MiB, "
    return (
        f"{borrowed if event.borrowed else ''}"
        f"its share is {event.share // MIB} MiB, its limit {event.limit // MIB} MiB, and all its "
        f"processes together use {event.used // MIB} MiB"
    )


def _name(holder: Holder) -> str:
    return holder.container or "of unknown name"


@dataclass(eq=False)
class NodeEvents:
    """The Events of this node's Node.

    Attributes:
        node: the Node's name.
        enabled: whether the feature is in use; without it nothing is recorded.
    """

    node: str
    recorder: EventRecorder
    enabled: bool
    _uid: str = ""

    @property
    def reference(self) -> ObjectReference:
        """The Node; its uid is known once the API server has answered."""
        return ObjectReference("Node", self.node, self._uid)

    def take_in(self, node: KubeObject | None) -> None:
        """Note the uid of the Node that is there now."""
        self._uid = str(node["metadata"].get("uid", "")) if node else ""

    def record(
        self, reason: EventReason, note: str, action: str, *, warning: bool = False, key: str = ""
    ) -> None:
        """Record an Event of the Node."""
        if self.enabled:
            self.recorder.record(EventData(self.reference, reason, note, action, warning, key))


async def record_node_events(
    registry: Registry, node: NodeEvents, name_competitor: Callable[[ResourceName], str]
) -> None:
    """Record Events of the Node until cancelled, first those of standing problems."""
    with registry.events.subscribe(*NODE_EVENT_KINDS) as events:
        for data in standing_problems(registry.snapshot, node.reference):
            node.recorder.record(data)
        async for event in events:
            found = node_event_of(event, registry.snapshot, node.reference, name_competitor)
            if found is not None:
                node.recorder.record(found)


async def record_empty_resources(registry: Registry, node: NodeEvents) -> None:
    """Record an Event of each resource that no GPU provides, until cancelled."""
    before = frozenset[ResourceName]()
    async for empty in registry.watch(_empty_resources):
        for resource in sorted(empty - before):
            note = (
                f"{resource} has the amount 0, because no GPU provides it; `metagpu status` on "
                "this node has the reason for each GPU"
            )
            node.record(EventReason.RESOURCE_EMPTY, note, "Configure", warning=True, key=resource)
        before = empty


def _empty_resources(snapshot: Snapshot) -> frozenset[ResourceName]:
    return frozenset(name for name, offer in snapshot.offers.items() if not offer.shares)


async def record_pod_events(registry: Registry, recorder: EventRecorder) -> None:
    """Record Events about the memory and the MIG devices of pods until cancelled."""
    with registry.events.subscribe(*POD_EVENT_KINDS) as events:
        async for event in events:
            if (data := pod_event_of(event, registry.snapshot)) is not None:
                recorder.record(data)


async def record_refusals(
    registry: Registry, recorder: EventRecorder, matcher: RefusalMatcher, node: str
) -> None:
    """Record Events of refused pods, their controllers, and pods of refused claims."""
    kinds = AllocationRefused, ResourceClaimRefused, ClaimRefusalEnded, PodsListed
    with registry.events.subscribe(*kinds) as events:
        async for event in events:
            match event:
                case AllocationRefused():
                    matcher.remember(event)
                case ResourceClaimRefused():
                    for pod in matcher.match_claim(event, registry.snapshot.pods.by_uid.values()):
                        recorder.record(claim_refusal_event(pod, event))
                case ClaimRefusalEnded(claim):
                    matcher.forget_claim(claim)
                case PodsListed(pods):
                    for pod, refusal in matcher.match(pods):
                        for data in pod_refusal_events(pod, refusal, node):
                            recorder.record(data)


@dataclass(eq=False)
class GpuEventFeed:
    """Records Events of pods whose GPU or MIG device leaves service or returns.

    It outlives a connection: what was recorded before is not recorded again.
    """

    registry: Registry
    _before: Troubles = field(default_factory=dict)

    async def run(self, recorder: EventRecorder) -> None:
        """Record Events until cancelled."""
        async for troubles in self.registry.watch(troubles_of):
            for data in gpu_events_between(self._before, troubles, self.registry.snapshot):
                recorder.record(data)
            self._before = troubles
