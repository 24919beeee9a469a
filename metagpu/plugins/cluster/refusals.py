"""Refused requests: Events about them, and the janitor of rejected pods.

The Events are of the pod, its controller and the Node. Allocate names no pod. The kubelet copies
the reason of a refusal into the status of the pod that it rejects, so the pod is found by it. A
ResourceClaim is named by its pods.

The janitor deletes pods of this node that were rejected, where opted in: Kubernetes keeps a
rejected pod until its garbage collection, which begins at thousands.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import anyio
import structlog

from metagpu.core.errors import ClusterError
from metagpu.core.model.offers import Api
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import ResourceClaimRef, ResourceName
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.core.state.events import AllocationRefused, ResourceClaimRefused
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.event_recorder import EventData, EventReason, ObjectReference
from metagpu.plugins.cluster.node_object import CONFLICT
from metagpu.plugins.cluster.reconciler import Reconciler
from metagpu.plugins.cluster.settings import Feature

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient


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
        return [(pod, refused) for pod in new if (refused := _refusal_of(pod, recent)) is not None]

    def match_claim(
        self, refusal: ResourceClaimRefused, pods: Iterable[KnownPod]
    ) -> list[KnownPod]:
        """Return the pods of a claim that has been refused for a minute."""
        now, claim = self.clock(), refusal.claim
        live = {ref: (a, b) for ref, (a, b) in self._claims.items() if now - b <= CLAIM_FORGOTTEN}
        since, _ = live.get(claim, (now, now))
        self._claims = {**live, claim: (since, now)}
        return [] if now - since < CLAIM_LASTS else [pod for pod in pods if _names(pod, claim)]

    def forget_claim(self, claim: ResourceClaimRef) -> None:
        """Forget the refusals of a claim that is prepared, or that no pod waits for."""
        self._claims.pop(claim, None)

    def _recent(self) -> list[AllocationRefused]:
        """Return the refusals that have not expired, the latest first."""
        since = self.clock() - EXPIRES
        found = [
            (at, refused) for alike in self._refusals.values() for refused, at in alike.items()
        ]
        recent = sorted((each for each in found if each[0] >= since), key=lambda each: -each[0])
        return [refusal for _, refusal in recent]


def _names(pod: KnownPod, claim: ResourceClaimRef) -> bool:
    """Return whether a container of a pod that has not ended names a claim."""
    named = {name for requests in pod.claims.values() for name, _ in requests}
    return pod.namespace == claim.namespace and not pod.ended and claim.name in named


def _refusal_of(pod: KnownPod, refusals: Iterable[AllocationRefused]) -> AllocationRefused | None:
    message = pod.rejection.message if pod.rejection else ""
    return next((refusal for refusal in refusals if refusal.reason in message), None)


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


BURST: Final = 10
"""Pods that may be deleted at once."""
REFILL: Final = 1.0
"""Seconds for each pod after a burst. A storm may be faster: the rest goes after it."""
_NOT_FOUND: Final = 404
_OF_EVERY_POD: Final = frozenset((0, 401, 429, 503, 504))
"""Answers that the next pod would get too: there is none, or the API server is at its limit."""

log = structlog.get_logger()


def removable_pods(snapshot: Snapshot) -> tuple[KnownPod, ...]:
    """Return the pods that the janitor may delete.

    The kubelet rejected such a pod because of a device plugin and starts none of its containers,
    none runs from before, the pod requests a resource that metagpu serves, it has a controller and
    mirrors no static pod, and nobody deletes it yet.
    """
    served = snapshot.offers_of(Api.DEVICE_PLUGIN).keys() - snapshot.competing_plugins.keys()
    return tuple(
        pod
        for pod in snapshot.pods.by_uid.values()
        if (rejection := pod.rejection) is not None
        and rejection.version
        and pod.owner_uid
        and not rejection.resources.isdisjoint(served)
    )


@dataclass(eq=False)
class Janitor:
    """Deletes rejected pods some time after their rejection, at a limited rate.

    Attributes:
        record: records an Event.
        node: the name of this node.
        dry_run: whether the API server only checks the deletion, and deletes nothing.
        clock: returns the event loop's time.
        reconciler: runs `reconcile`.
    """

    client: "KubeClient"
    registry: Registry
    record: Callable[[EventData], None]
    node: str
    dry_run: bool = False
    clock: Callable[[], float] = anyio.current_time
    _first_seen: dict[str, float] = field(default_factory=dict)
    _finished: set[tuple[str, str]] = field(default_factory=set)
    _refused: set[tuple[str, str]] = field(default_factory=set)
    _rate: TokenBucket = field(default_factory=lambda: TokenBucket(BURST, 1 / REFILL))

    def __post_init__(self) -> None:
        self.reconciler = Reconciler(self.feature, self.reconcile, self.client.timing)

    @property
    def feature(self) -> Feature:
        """The feature that asks for this janitor."""
        return Feature.JANITOR_DRY_RUN if self.dry_run else Feature.JANITOR

    async def watch(self) -> None:
        """Trigger the reconciler whenever other pods are to be deleted, until cancelled."""
        async for _ in self.registry.watch(removable_pods):
            self.reconciler.trigger()

    async def reconcile(self) -> float | None:
        """Delete the pods that are due; return the seconds until the next one is.

        A pod whose deletion is refused, as by a webhook, holds up no other: it comes last in the
        next run.

        Raises:
            ClusterError: the API server refuses a deletion, or does not answer.
        """
        now, delay = self.clock(), self.client.timing.janitor_delay
        found = removable_pods(self.registry.snapshot)
        self._first_seen = {pod.uid: self._first_seen.get(pod.uid, now) for pod in found}
        versions = {_version(pod) for pod in found}
        self._finished &= versions
        self._refused &= versions
        waits, errors = [], []

        for pod in sorted(found, key=lambda known_pod: _version(known_pod) in self._refused):
            if _version(pod) in self._finished:
                continue
            wait = max(self._first_seen[pod.uid] + delay - now, self._rate.wait(now))
            if wait > 0:
                waits.append(wait)
                continue
            self._rate.reserve(now)
            try:
                await self._delete(pod)
            except ClusterError as error:
                if error.status in _OF_EVERY_POD:
                    raise
                self._refused.add(_version(pod))
                errors.append(error)
            else:
                self._finished.add(_version(pod))
        if errors:
            raise errors[0]
        return min(waits, default=None)

    async def _delete(self, pod: KnownPod) -> None:
        """Delete a pod, if it still is the very pod, in the very state, that was found."""
        assert pod.rejection is not None  # noqa: S101 - `removable_pods` has seen to it
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": pod.uid, "resourceVersion": pod.rejection.version},
            **({"dryRun": ["All"]} if self.dry_run else {}),
        }
        try:
            await self.client.call("DELETE", path, body=body)
        except ClusterError as error:
            if error.status not in (CONFLICT, _NOT_FOUND):
                raise
            return  # changed or gone meanwhile: the next report of the pod decides again
        log.info("rejected pod deleted", pod=str(pod), uid=pod.uid, dry_run=self.dry_run)
        if (event := janitor_event(pod, self.node, dry_run=self.dry_run)) is not None:
            self.record(event)


def janitor_event(pod: KnownPod, node: str, *, dry_run: bool) -> EventData | None:
    """Return the Event of the controller about its deleted pod."""
    controller = controller_of(pod)
    if controller is None or pod.rejection is None:
        return None
    done = "would be deleted (dry run)" if dry_run else "was deleted"
    note = (
        f"pod {pod.name} {done}: node {node} rejected it; the kubelet starts none of its "
        f"containers: {pod.rejection.message}"
    )
    reason = EventReason.REJECTED_POD_FOUND if dry_run else EventReason.REJECTED_POD_DELETED
    return EventData(controller, reason, note, "Delete", key=reason, minor=True)


def _version(pod: KnownPod) -> tuple[str, str]:
    return pod.uid, pod.rejection.version if pod.rejection else ""
