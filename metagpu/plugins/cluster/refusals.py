"""Kubernetes Events of refused requests: of the pod, its controller and the Node.

Allocate names no pod. The kubelet copies the reason of a refusal into the status of the pod that it
rejects, so the pod is found by it. A ResourceClaim is named by its pods.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import anyio

from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import ResourceClaimRef, ResourceName
from metagpu.core.state.events import AllocationRefused, ResourceClaimRefused
from metagpu.plugins.cluster.event_recorder import EventData, EventReason, ObjectReference

REMEMBERED: Final = 16
"""Sentences of one resource and cause: the storm of another hides none of them."""
EXPIRES: Final = 60.0
"""Seconds that a refusal waits for the status of its pod, which follows within a second or so."""
CLAIM_LASTS: Final = 60.0
"""Seconds after which pods hear what would help: the kubelet's own Event of a claim is at once."""
CLAIM_FORGOTTEN: Final = 180.0
"""Seconds without a call after which a refusal has ended: the kubelet repeats it in 90 s."""


def node_refusal_event(refusal: AllocationRefused, node: ObjectReference) -> EventData:
    """Return the Event of the Node: one for each resource and cause, with a count."""
    return _event(refusal, node, _note(refusal), f"{refusal.resource} {refusal.cause}")


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
    of_pod = _event(refusal, subject, _note(refusal), f"pod: {key}", once_for=controller)
    if controller is None:
        return (of_pod,)
    note = f"pod {pod.name} on node {node}: {_note(refusal)}"
    return of_pod, _event(refusal, controller, note, key)


def claim_refusal_event(pod: KnownPod, refusal: ResourceClaimRefused) -> EventData:
    """Return the Event of a pod that waits for a refused ResourceClaim."""
    claim, remedy = refusal.claim.name, refusal.cause.remedy
    return EventData(
        ObjectReference("Pod", pod.name, pod.uid, pod.namespace),
        EventReason.GPU_CLAIM_REFUSED,
        f"the pod waits for ResourceClaim {claim}: " + _join(refusal.reason, remedy),
        "Prepare",
        warning=True,
        key=f"{claim} {refusal.cause.__name__}",
        minor=True,
    )


def controller_of(pod: KnownPod) -> ObjectReference | None:
    """Return the controller of a pod, `None` for a pod without one."""
    kind, _, name = pod.owner.partition("/")
    if not kind:
        return None
    return ObjectReference(kind, name, pod.owner_uid, pod.namespace, pod.owner_api or "v1")


@dataclass(eq=False)
class RefusalMatcher:
    """Joins refusals with the pods that the kubelet rejected for them.

    A pod is examined once, when its rejection is new: a storm leaves thousands of rejected pods,
    and each change of any pod lists all of them. Those of the first list are not new.

    Attributes:
        clock: returns the event loop's time.
    """

    clock: Callable[[], float] = anyio.current_time
    _refusals: defaultdict[tuple[ResourceName, str], dict[AllocationRefused, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _examined: frozenset[str] | None = None
    _claims: dict[ResourceClaimRef, tuple[float, float]] = field(default_factory=dict)

    def remember(self, refusal: AllocationRefused) -> None:
        """Remember a refusal until its pod is known."""
        alike = self._refusals[refusal.resource, refusal.cause]
        alike.pop(refusal, None)
        alike[refusal] = self.clock()
        if len(alike) > REMEMBERED:
            del alike[next(iter(alike))]

    def match(self, pods: Iterable[KnownPod]) -> list[tuple[KnownPod, AllocationRefused]]:
        """Return the newly rejected pods of the complete list, with their refusals."""
        rejected = {pod.uid: pod for pod in pods if pod.rejection is not None}
        examined, self._examined = self._examined, frozenset(rejected)
        if examined is None:
            return []
        new = [pod for uid, pod in rejected.items() if uid not in examined]
        recent = self._recent() if new else []
        return [(pod, it) for pod in new if (it := _refusal_of(pod, recent)) is not None]

    def match_claim(
        self, refusal: ResourceClaimRefused, pods: Iterable[KnownPod]
    ) -> list[KnownPod]:
        """Return the pods of a claim that has been refused for a minute."""
        now, claim = self.clock(), refusal.claim
        live = {it: (a, b) for it, (a, b) in self._claims.items() if now - b <= CLAIM_FORGOTTEN}
        since, _ = live.get(claim, (now, now))
        self._claims = {**live, claim: (since, now)}
        return [] if now - since < CLAIM_LASTS else [it for it in pods if _names(it, claim)]

    def forget_claim(self, claim: ResourceClaimRef) -> None:
        """Forget the refusals of a claim that is prepared, or that no pod waits for."""
        self._claims.pop(claim, None)

    def _recent(self) -> list[AllocationRefused]:
        """Return the refusals that have not expired, the latest first."""
        since = self.clock() - EXPIRES
        found = [(at, it) for alike in self._refusals.values() for it, at in alike.items()]
        recent = sorted((each for each in found if each[0] >= since), key=lambda each: -each[0])
        return [refusal for _, refusal in recent]


def _names(pod: KnownPod, claim: ResourceClaimRef) -> bool:
    """Return whether a container of a pod that has not ended names a claim."""
    named = {name for requests in pod.claims.values() for name, _ in requests}
    return pod.namespace == claim.namespace and not pod.ended and claim.name in named


def _refusal_of(pod: KnownPod, refusals: Iterable[AllocationRefused]) -> AllocationRefused | None:
    message = pod.rejection.message if pod.rejection else ""
    return next((it for it in refusals if it.reason in message), None)


def _event(
    refusal: AllocationRefused,
    subject: ObjectReference,
    note: str,
    key: str,
    once_for: ObjectReference | None = None,
) -> EventData:
    never = refusal.never  # on this node
    reason = EventReason.GPU_REQUEST_TOO_LARGE if never else EventReason.GPU_REQUEST_REFUSED
    return EventData(
        subject, reason, note, "Allocate", warning=True, key=key, minor=True, once_for=once_for
    )


def _note(refusal: AllocationRefused) -> str:
    return _join(refusal.reason, refusal.remedy)


def _join(reason: str, remedy: str) -> str:
    return "; ".join(filter(None, (reason, remedy)))


def impossible_request_event(subject: ObjectReference, note: str) -> EventData:
    """Return the Event of a pod, or its controller, that no node could serve."""
    reason = EventReason.GPU_REQUEST_IMPOSSIBLE
    return EventData(subject, reason, note, "Translate", warning=True, minor=True)
