"""Kubernetes Events of pods, about their GPU memory and devices: pure functions."""

from typing import Final

from metagpu.core.model.gpu import MIB
from metagpu.core.model.shares import Holder
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.events import (
    AnnotationRejected,
    ContainerAbsent,
    DevicesLost,
    Event,
    MemoryExceeded,
    MixedRequestFound,
    PreferenceNotMet,
    ProcessSignalled,
    UnauthorizedUseFound,
)
from metagpu.core.usage.lease_differences import (
    describe_absence,
    describe_gpu,
    describe_unauthorized_use,
)
from metagpu.core.usage.lost_devices import describe_loss
from metagpu.core.usage.mixed_requests import describe_mixed_request
from metagpu.plugins.cluster.event_reasons import EventReason
from metagpu.plugins.cluster.event_recorder import EventData, ObjectReference

POD_EVENT_KINDS: Final = (
    MemoryExceeded,
    ProcessSignalled,
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
            return EventData(
                _pod(event.holder.namespace, event.holder.pod, event.pod_uid),
                EventReason.GPU_MEMORY_EXCEEDED,
                f"container {_name(event.holder)} uses more memory of "
                f"{describe_gpu(event.gpu, snapshot)} than it may: {_amounts(event)}; {then}",
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
                f"{describe_gpu(event.gpu, snapshot)}, and the container more than it may: "
                f"{_amounts(event)}",
                "EnforceMemory",
                warning=True,
                key=f"{event.holder.container} {event.gpu} {event.signal}",
            )
        case UnauthorizedUseFound():
            return _unauthorized_use(event, snapshot)
        case AnnotationRejected() | PreferenceNotMet():
            return _annotation_event(event)
        case ContainerAbsent() | DevicesLost() | MixedRequestFound():
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
    event: ContainerAbsent | DevicesLost | MixedRequestFound, snapshot: Snapshot
) -> EventData:
    holder = event.holder
    if isinstance(event, DevicesLost):
        reason, note = (
            EventReason.GPU_DEVICE_LOST,
            describe_loss(holder.container, event.devices, event.fix),
        )
    elif isinstance(event, MixedRequestFound):
        reason, note = EventReason.GPU_NOT_VISIBLE, describe_mixed_request(event)
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
    return (
        f"its share is {event.share // MIB} MiB, its limit {event.limit // MIB} MiB, and all its "
        f"processes together use {event.used // MIB} MiB"
    )


def _name(holder: Holder) -> str:
    return holder.container or "of unknown name"
