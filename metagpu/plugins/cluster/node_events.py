"""Kubernetes Events of the node, from the events of its GPUs: pure functions."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import CordonSource, ResourceName
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.events import AllocationRefused, ConfigRejected, Event, UnauthorizedUseFound
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
    RegistrationProblemFound,
    UnreadableGpusFound,
)
from metagpu.core.usage.lease_differences import describe_unauthorized_use
from metagpu.plugins.cluster.event_reasons import EventReason
from metagpu.plugins.cluster.event_recorder import EventData, ObjectReference
from metagpu.plugins.cluster.pod_events import pod_event_of
from metagpu.plugins.cluster.refusals import node_refusal_event

NODE_EVENT_KINDS: Final = (
    *(GpuFaulted, GpuRecovered, GpuUnheard, InstanceFaulted, InstanceRecovered),
    *(GpuCordoned, GpuUncordoned, CompetingPluginFound, BackendSuspended, UnauthorizedUseFound),
    *(ConfigRejected, RegistrationProblemFound, UnreadableGpusFound, AllocationRefused),
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
        case ConfigRejected(reason):
            note = f"{reason}; the last good configuration stays"
            return EventData(node, EventReason.CONFIG_REJECTED, note, "Configure", warning=True)
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
            message = f"its XIDs are not heard: {reason}"
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
        UnreadableGpusFound({i: it.reason for i, it in snapshot.unreadable_gpus.items()}, at=0),
        *(
            BackendSuspended(gpu, backend, pause.reason, pause.since, until_reset=True)
            for gpu, state in snapshot.gpus.items()
            for backend, pause in state.suspended.items()
            if pause.until_reset
        ),
    ]
    found = (node_event_of(event, snapshot, node) for event in events)
    return [data for data in found if data is not None]
