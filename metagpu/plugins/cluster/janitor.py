"""The janitor: deletes pods of this node that were rejected, where opted in.

Kubernetes keeps a rejected pod until its garbage collection, which begins at thousands.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import anyio
import structlog

from metagpu.core.errors import ClusterError
from metagpu.core.model.offers import Api
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.event_recorder import EventData, EventReason
from metagpu.plugins.cluster.node_object import CONFLICT
from metagpu.plugins.cluster.reconciler import Reconciler
from metagpu.plugins.cluster.refusals import controller_of
from metagpu.plugins.cluster.settings import Feature

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

BURST: Final = 10
"""Pods that may be deleted at once."""
REFILL: Final = 1.0
"""Seconds for each pod after a burst. A storm may be faster: the rest goes after it."""
_NOT_FOUND: Final = 404
_OF_EVERY_POD: Final = frozenset((None, 401, 429, 503, 504))
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
        if (it := pod.rejection) is not None
        and it.version
        and pod.owner_uid
        and not it.resources.isdisjoint(served)
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

        for pod in sorted(found, key=lambda it: _version(it) in self._refused):
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
