"""Kubernetes Events of pods whose GPU request no node could serve."""

from metagpu.plugins.cluster.event_reasons import EventReason
from metagpu.plugins.cluster.event_recorder import EventData, ObjectReference


def impossible_request_event(subject: ObjectReference, note: str) -> EventData:
    """Return the Event of a controller or a pod: one for each sentence, with a count."""
    reason = EventReason.GPU_REQUEST_IMPOSSIBLE
    return EventData(subject, reason, note, "Translate", warning=True, minor=True)
