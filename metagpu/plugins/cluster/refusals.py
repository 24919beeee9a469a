"""Kubernetes Events of refused requests: of the pod, its controller and the Node.

Allocate names no pod. The kubelet copies the reason of a refusal into the status of the pod that it
rejects, so the pod is found by it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from metagpu.core.model.pods import KnownPod
from metagpu.core.state.events import AllocationRefused
from metagpu.plugins.cluster.event_recorder import EventData, ObjectReference

REFUSED: Final = "GPURequestRefused"
TOO_LARGE: Final = "GPURequestTooLarge"
"""The Event of a request that this node can never meet."""
REMEMBERED: Final = 64
"""Refusals that wait for the status of their pod, which follows within a second or so."""


def node_refusal_event(refusal: AllocationRefused, node: ObjectReference) -> EventData:
    """Return the Event of the Node: one for each resource and cause, with a count."""
    return EventData(
        node,
        _reason(refusal),
        _note(refusal),
        "Allocate",
        warning=True,
        key=f"{refusal.resource} {refusal.cause}",
        minor=True,
    )


def pod_refusal_events(
    pod: KnownPod, refusal: AllocationRefused, node: str
) -> tuple[EventData, ...]:
    """Return the Events of a rejected pod and its controller.

    A controller that creates pod after pod gets one Event for each cause, with their number, and
    the first of its pods one.
    """
    subject = ObjectReference("Pod", pod.name, pod.uid, pod.namespace)
    controller = controller_of(pod)
    key = f"{refusal.resource} {refusal.cause}"
    of_pod = EventData(
        subject,
        _reason(refusal),
        _note(refusal),
        "Allocate",
        warning=True,
        key=f"pod: {key}",
        minor=True,
        once_for=controller,
    )
    if controller is None:
        return (of_pod,)
    note = f"pod {pod.name} on node {node}: {_note(refusal)}"
    of_controller = EventData(
        controller, _reason(refusal), note, "Allocate", warning=True, key=key, minor=True
    )
    return of_pod, of_controller


def controller_of(pod: KnownPod) -> ObjectReference | None:
    """Return the controller of a pod, `None` for a pod without one."""
    kind, _, name = pod.owner.partition("/")
    if not kind:
        return None
    return ObjectReference(kind, name, pod.owner_uid, pod.namespace, pod.owner_api or "v1")


@dataclass(eq=False)
class RefusalMatcher:
    """Joins refusals with the pods that the kubelet rejected for them, each pod once."""

    _refusals: deque[AllocationRefused] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _matched: frozenset[str] = frozenset()

    def remember(self, refusal: AllocationRefused) -> None:
        """Remember a refusal until its pod is known."""
        if refusal not in self._refusals:
            self._refusals.append(refusal)

    def match(self, pods: Iterable[KnownPod]) -> Iterator[tuple[KnownPod, AllocationRefused]]:
        """Yield the newly rejected pods of the complete list, with their refusals."""
        rejected = {pod.uid: pod for pod in pods if pod.rejection is not None}
        found = [
            (pod, refusal)
            for uid, pod in rejected.items()
            if uid not in self._matched and (refusal := self._refusal_of(pod)) is not None
        ]
        self._matched = (self._matched & rejected.keys()) | {pod.uid for pod, _ in found}
        yield from found

    def _refusal_of(self, pod: KnownPod) -> AllocationRefused | None:
        message = pod.rejection.message if pod.rejection else ""
        return next((it for it in reversed(self._refusals) if it.reason in message), None)


def _reason(refusal: AllocationRefused) -> str:
    return TOO_LARGE if refusal.never else REFUSED


def _note(refusal: AllocationRefused) -> str:
    return "; ".join(filter(None, (refusal.reason, refusal.remedy)))
