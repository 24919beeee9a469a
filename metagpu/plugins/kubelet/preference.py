"""Preferred shares by the annotations of the pod that the kubelet asks for.

GetPreferredAllocation names no pod: the pod is one that is bound to the node, has still to be
admitted, and has a container with such a request. A preference is a hint: it fails no pod.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, cast

import anyio
import msgspec
import structlog

from metagpu.core.contracts.backend import Backend
from metagpu.core.model.gpu_preference import GpuPreference, parse_preference
from metagpu.core.model.shares import ResourceName, Share
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.events import PreferenceMissed
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet import fast_codec
from metagpu.plugins.kubelet.gpu_choice import SharesRequest, prefer_by_annotations
from metagpu.plugins.kubelet.timing import TIMING, KubeletTiming

AMBIGUOUS: Final = (
    "several pods with such a request were being admitted, which prefer different GPUs, and the "
    "kubelet does not say for which of them it asks; create them one after another"
)


log = structlog.get_logger()


class PendingContainer(msgspec.Struct, frozen=True):
    """A container that the kubelet may ask for: pod's uid, name, and preference."""

    uid: str
    name: str
    preference: GpuPreference


def pending_containers(
    resource: ResourceName, size: int, snapshot: Snapshot
) -> Iterator[PendingContainer]:
    """Yield the containers that may have still to get so many shares.

    Whether they hold shares is not looked at: those under the name of a pod that has still to be
    admitted are an earlier pod's.
    """
    for pod in snapshot.pods.by_uid.values():
        if pod.arriving:
            for name, requests in pod.containers.items():
                if requests.get(resource) == size:
                    preference = parse_preference(pod.gpu_annotations, name)
                    yield PendingContainer(pod.uid, name, preference)


class PreferenceMatcher:
    """Finds the container of a request, among the pods of this node.

    Args:
        resource: the resource that is asked for.
        registry: has the pods, and publishes what is not followed.
        clock: returns the event loop's time.
        timing: how long a request may wait for its pod.
    """

    def __init__(
        self,
        resource: ResourceName,
        registry: Registry,
        clock: Callable[[], float],
        timing: KubeletTiming = TIMING,
    ) -> None:
        self._resource = resource
        self._registry = registry
        self._clock = clock
        self._timing = timing
        self._preferring_until = 0.0
        self._answered: set[tuple[str, str]] = set()

    async def wait_known(self, sizes: Iterable[int]) -> None:
        """Wait a moment for the pods of some requests, if pods here name GPUs at all."""
        if not self._expects_preferences():
            return
        with anyio.move_on_after(self._timing.pod_wait):
            for size in sizes:
                while not self._unanswered(size, self._registry.snapshot):
                    await self._registry.changed_since(self._registry.snapshot)

    def match(self, size: int, snapshot: Snapshot) -> PendingContainer | None:
        """Return the container that the kubelet asks for; `None` without a preference.

        Where several containers may be meant, their preferences must agree. A container that had
        its answer is meant if no other is known.
        """
        pending = self._unanswered(size, snapshot) or list(
            pending_containers(self._resource, size, snapshot)
        )
        if len({it.preference for it in pending}) > 1:
            named = tuple((it.uid, it.name) for it in pending if it.preference)
            self._registry.events.publish(PreferenceMissed(named, AMBIGUOUS))
            return None
        if not pending:
            return None
        found = pending[0]
        pods = snapshot.pods.by_uid
        self._answered = {key for key in self._answered if key[0] in pods}
        self._answered.add((found.uid, found.name))
        return found if found.preference else None

    def report(self, container: PendingContainer, reason: str) -> None:
        """Report why the preference of a container is not followed."""
        named = ((container.uid, container.name),)
        self._registry.events.publish(PreferenceMissed(named, reason))

    def _expects_preferences(self) -> bool:
        now, pods = self._clock(), self._registry.snapshot.pods
        if pods.preferring:
            self._preferring_until = now + self._timing.preferring
        return pods.listed and now < self._preferring_until

    def _unanswered(self, size: int, snapshot: Snapshot) -> list[PendingContainer]:
        """Return the first container of each pod that had no answer."""
        found: dict[str, PendingContainer] = {}
        for it in pending_containers(self._resource, size, snapshot):
            if (it.uid, it.name) not in self._answered:
                found.setdefault(it.uid, it)
        return list(found.values())


class ShareChooser:
    """Chooses shares at GetPreferredAllocation, also by the pod's annotations.

    Args:
        resource: the resource that is asked for.
        registry: has the snapshots.
        backend: finds the resource's backend, at each call: a reload may change it.
        clock: returns the event loop's time.
        timing: how long a request may wait for its pod.
    """

    def __init__(
        self,
        resource: ResourceName,
        registry: Registry,
        backend: Callable[[ResourceName], Backend],
        clock: Callable[[], float],
        timing: KubeletTiming = TIMING,
    ) -> None:
        self._resource = resource
        self._registry = registry
        self._backend = backend
        self._matcher = PreferenceMatcher(resource, registry, clock, timing)
        self._log = log.bind(resource=resource)

    async def answer(self, request: bytes) -> bytes:
        """Answer a request of the kubelet, as soon as its pod is known."""
        asked = list(fast_codec.decode_preferred_request(request))
        await self._matcher.wait_known({it.size for it in asked})
        return fast_codec.encode_preferred_response(map(self.choose, asked))

    def choose(self, asked: fast_codec.PreferredAllocation) -> Sequence[str]:
        """Choose exactly as many ids as requested, with the required ones.

        This never fails: an error would fail the pod, and a preference is only a hint.
        """
        chosen: list[str] = []
        snapshot = self._registry.snapshot
        offer = snapshot.plugin_offer(self._resource)

        if offer is not None:
            known = cast("Mapping[str, Share]", offer.shares).get
            available = list(filter(None, map(known, asked.available)))
            # What the kubelet takes for free and is not is the last choice: Allocate refuses it.
            free = [it for it in available if not _is_unconfirmed(it, snapshot)]
            available = free if len(free) >= asked.size else available
            required = list(filter(None, map(known, asked.required)))
            wanted = SharesRequest(available, required, asked.size)
            try:
                backend = self._backend(self._resource)
                preferred = backend.prefer(available, required, asked.size, snapshot)
                chosen = [share.id for share in preferred]
                preferred = self._by_annotations(wanted, preferred, backend, snapshot)
                chosen = [share.id for share in preferred]
            except Exception:  # noqa: BLE001 - no error here may fail the pod
                self._log.exception(
                    "preferred allocation failed", effect="the kubelet's order is used"
                )

        if len(chosen) == asked.size:
            return chosen
        return list(dict.fromkeys([*asked.required, *chosen, *asked.available]))[: asked.size]

    def _by_annotations(
        self,
        asked: SharesRequest,
        default: Sequence[Share],
        backend: Backend,
        snapshot: Snapshot,
    ) -> Sequence[Share]:
        container = self._matcher.match(asked.size, snapshot)
        if container is None:
            return default
        preference = container.preference
        shares, reason = prefer_by_annotations(preference, asked, default, backend, snapshot)
        if reason:
            self._matcher.report(container, reason)
        return shares


def _is_unconfirmed(share: Share, snapshot: Snapshot) -> bool:
    lease = snapshot.gpus[share.gpu].leases.get(share.id)
    return lease is not None and lease.unconfirmed
