"""Events of pods that no node could serve, about their controllers.

A pod under review is not stored yet, so its controller is what people can look at.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from metagpu.plugins.cluster.event_recorder import NOTE_LIMIT, EventData, ObjectReference
from metagpu.plugins.cluster.impossible_requests import impossible_request_event
from metagpu.webhook.reviews import ReviewRequest

BURST: Final = 50
"""Events that may follow each other at once, of all namespaces together."""
RATE: Final = 1.0
"""Events a second after a burst: clients may invent namespaces."""
_LONGEST: Final = 253
"""Characters of a name in Kubernetes. Nobody has checked those of a pod under review yet."""


class _Owner(msgspec.Struct):
    apiVersion: str = "v1"  # noqa: N815 - Kubernetes' key
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class _OwnedMetadata(msgspec.Struct):
    name: str = ""
    ownerReferences: list[_Owner] | None = None  # noqa: N815 - as above


class _OwnedPod(msgspec.Struct):
    metadata: _OwnedMetadata


_decode: Final = msgspec.json.Decoder(_OwnedPod).decode


class ImpossibleRequests:
    """Hands an Event of each pod that was admitted in vain to a recorder."""

    def __init__(self, record: Callable[[EventData], None]) -> None:
        self._record = record

    def report(self, request: ReviewRequest, reason: str) -> None:
        """Record why no node could serve the pod of a request; a dry run creates none."""
        if request.dry_run or not request.namespace:
            return
        subject = subject_of(request)
        if subject is not None:
            self._record(impossible_request_event(subject, reason[:NOTE_LIMIT]))


def subject_of(request: ReviewRequest) -> ObjectReference | None:
    """Return the controller of a pod, or the pod.

    `None` where neither has a name yet, or one that Kubernetes refuses.
    """
    try:
        metadata = _decode(request.object).metadata
    except msgspec.DecodeError:
        return None
    # The API server makes a name of generateName later.
    subject = ObjectReference("Pod", metadata.name, namespace=request.namespace)
    for it in metadata.ownerReferences or ():
        if it.controller and it.name:
            subject = ObjectReference(it.kind, it.name, it.uid, request.namespace, it.apiVersion)
    fits = all(len(it) <= _LONGEST for it in msgspec.structs.astuple(subject))
    return subject if subject.name and fits else None
