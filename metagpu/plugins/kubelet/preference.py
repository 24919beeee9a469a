"""Preferred shares by the annotations of the pod that the kubelet asks for.

GetPreferredAllocation names no pod: the pod is one that is bound to the node, has still to be
admitted, and has a container with such a request. A preference is a hint: it fails no pod. As much
of it counts as the free shares allow, and the backend chooses among GPUs that it does not tell
apart, so that each way of sharing keeps its own rules.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Final, cast

import anyio
import msgspec
import structlog

from metagpu.core.availability.reasons import open_to, refuse
from metagpu.core.contracts.backend import Backend
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.gpu_preference import (
    GpuPreference,
    are_equal_parts,
    by_fullness,
    parse_preference,
)
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import ResourceName, Share, by_gpu
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.events import PreferenceMissed
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet import fast_codec
from metagpu.plugins.kubelet.timing import TIMING, KubeletTiming


class SharesRequest(msgspec.Struct, frozen=True):
    """A request of the kubelet for preferred shares, and what it is answered from.

    Attributes:
        backend: the backend of the shares, which chooses among equal GPUs.
        snapshot: everything known now.
        available: the shares that the kubelet has free.
        required: the shares that must be chosen.
        size: the number of shares to choose, the required ones included.
        rooms: shares that one GPU should have free, for later containers of the pod, best first.
    """

    backend: Backend
    snapshot: Snapshot
    available: Sequence[Share]
    required: Sequence[Share]
    size: int
    rooms: tuple[int, ...] = ()

    def prefer(
        self, available: Sequence[Share], required: Sequence[Share], size: int
    ) -> Sequence[Share]:
        """Return the backend's choice, wherever there is room for it."""
        return self.backend.prefer(available, required, size, self.snapshot)

    def prefer_with_room(self, available: Sequence[Share]) -> Sequence[Share]:
        """Return the backend's choice, on a GPU with room if there is one."""
        for room in self.rooms:
            if shares := self.prefer_in_room(room, available):
                return shares
        return self.prefer(available, self.required, self.size)

    def prefer_in_room(self, room: int, available: Sequence[Share]) -> Sequence[Share]:
        """Return shares of the GPU where a request as large as the room would go."""
        there = self.prefer(available, self.required, room)
        if len(there) != room or len(by_gpu(there)) != 1:
            return ()
        here = [share for share in available if share.gpu == there[0].gpu]
        return self.prefer(here, self.required, self.size)


def prefer_by_annotations(
    preference: GpuPreference, asked: SharesRequest, default: Sequence[Share]
) -> tuple[Sequence[Share], str]:
    """Choose shares by a preference: as much of it as can be followed.

    Args:
        preference: the preference of the pod's annotations.
        asked: the kubelet's request.
        default: the choice without a preference.

    Returns:
        The shares, and why the preference is not followed in full; empty where it is.
    """
    choice = _Choice(preference, asked, default)
    if len(choice.usable) < asked.size:
        return default, choice.too_few()

    reason = ""
    if preference.parts is not None:
        for shares in (choice.by_default(), choice.in_parts(preference.parts)):
            counts = map(len, by_gpu(shares).values())
            if are_equal_parts(counts, preference.parts):
                if not (refusal := choice.refusal(shares)):
                    return shares, ""
                reason = reason or f"the pool grants no such parts: {refusal}"
        reason = reason or choice.no_parts(preference.parts)
    for shares in (*choice.by_policy(), choice.by_default()):
        if choice.keeps_to(shares) and not choice.refusal(shares):
            return shares, reason
    return default, reason or "the free shares of these GPUs cannot be granted together"


class _Choice:
    """The shares of one request that a preference allows.

    Attributes:
        usable: the shares of GPUs that the preference names and that are open, and required ones.
    """

    def __init__(
        self, preference: GpuPreference, asked: SharesRequest, default: Sequence[Share]
    ) -> None:
        self._preference = preference
        self._asked = asked
        self._default_gpus = len(by_gpu(default))
        self._snapshot = asked.snapshot
        self._named = {
            gpu
            for gpu, state in asked.snapshot.gpus.items()
            if not preference.misfit(state.gpu) and open_to(state, asked.backend.name)
        }
        possible = (share for share in asked.available if share.gpu in self._named)
        self.usable = list(dict.fromkeys([*asked.required, *possible]))

    def by_default(self) -> Sequence[Share]:
        """Return the backend's own choice among the usable shares."""
        return self._asked.prefer_with_room(self.usable)

    def by_policy(self) -> Iterator[Sequence[Share]]:
        """Yield choices on equally full GPUs each, the first by the policy first.

        A policy spreads no request over more GPUs than it has without one.
        """
        if self._preference.policy is None or self._asked.required:
            return  # where a share is required, its GPU is chosen
        levels = list(by_fullness(self._fullness(self.usable), self._preference.policy))
        for room, gpus in product((*self._asked.rooms, self._asked.size), levels):
            level = [share for share in self.usable if share.gpu in gpus]
            if room == self._asked.size:
                shares = self._asked.prefer(level, (), room)
            else:
                shares = self._asked.prefer_in_room(room, level)
            if shares and len(by_gpu(shares)) <= self._default_gpus:
                yield shares

    def in_parts(self, parts: int) -> Sequence[Share]:
        """Return equal parts of so many GPUs, each where the policy puts it; or nothing."""
        each, rest = divmod(self._asked.size, parts)
        if rest or not each:
            return ()
        required = by_gpu(self._asked.required)
        left, chosen = self.usable, list[Share]()
        for _ in range(parts):
            must = next(
                (shares for gpu, shares in required.items() if gpu in {s.gpu for s in left}), ()
            )
            part = self._one_part(left, must, each)
            if len(part) != each:
                return ()
            chosen += part
            left = [share for share in left if share.gpu != part[0].gpu]
        return chosen

    def keeps_to(self, shares: Sequence[Share]) -> bool:
        """Return whether shares are as many as requested, with the required ones."""
        wanted = self._asked
        return len(shares) == wanted.size and set(wanted.required) <= set(shares)

    def refusal(self, shares: Sequence[Share]) -> str:
        """Return why Allocate would refuse these shares; empty where it grants them."""
        if not self.keeps_to(shares):
            return "they are not those that the kubelet requires"
        try:
            refuse(shares, self._snapshot)
            self._asked.backend.check(shares, self._snapshot)
        except RequestError as error:
            return str(error)
        return ""

    def too_few(self) -> str:
        """Return why the usable shares do not suffice."""
        resource = self._backend_resource()
        offer = self._snapshot.offers.get(resource) if resource else None
        gpus = [self._snapshot.gpus[gpu_id].gpu for gpu_id in offer.by_gpu] if offer else []
        if not [gpu for gpu in gpus if not self._preference.misfit(gpu)]:
            return (
                f"no GPU of this node that offers {resource} is one of them; choose nodes by a "
                "nodeSelector, such as the label nvidia.com/gpu.product"
            )
        return (
            f"they have {len(self.usable)} of {self._asked.size} shares on offer; wait for a pod "
            "to end there, or name more GPUs"
        )

    def no_parts(self, parts: int) -> str:
        """Return why there are no equal parts of so many GPUs."""
        if self._asked.size % parts:
            return f"{self._asked.size} shares have no {parts} equal parts; request a multiple"
        return (
            f"fewer than {parts} of these GPUs have {self._asked.size // parts} shares on offer; "
            "wait for a pod to end there, or request less"
        )

    def _backend_resource(self) -> ResourceName | None:
        shares = (*self._asked.available, *self._asked.required)
        return shares[0].resource if shares else None

    def _one_part(self, left: Sequence[Share], must: Sequence[Share], size: int) -> Sequence[Share]:
        """Return shares of one GPU, the one of the required shares if there are any."""
        enough = {gpu: there for gpu, there in by_gpu(left).items() if len(there) >= size}
        if must:
            enough = {gpu: there for gpu, there in enough.items() if gpu == must[0].gpu}
        if not enough:
            return ()
        policy = self._preference.policy
        if policy is not None:
            first = next(
                by_fullness(self._fullness([s for there in enough.values() for s in there]), policy)
            )
            enough = {gpu: there for gpu, there in enough.items() if gpu in first}
        shares = self._asked.prefer(
            [share for those in enough.values() for share in those], must, size
        )
        if not shares:
            return ()
        # A backend may take one share from each GPU: ask it again for the first alone.
        gpu = shares[0].gpu
        return shares if len(by_gpu(shares)) == 1 else self._asked.prefer(enough[gpu], must, size)

    def _fullness(self, shares: Sequence[Share]) -> Mapping[GpuId, tuple[int, int]]:
        if not shares:
            return {}
        on_offer = self._snapshot.offers[shares[0].resource].ids
        return {gpu: (len(there), len(on_offer[gpu])) for gpu, there in by_gpu(shares).items()}


AMBIGUOUS: Final = (
    "several pods with such a request were being admitted, which prefer different GPUs, and the "
    "kubelet does not say for which of them it asks; create them one after another"
)


log = structlog.get_logger()


class PendingContainer(msgspec.Struct, frozen=True):
    """A container that may be meant: pod's uid, name, preference, rooms."""

    uid: str
    name: str
    preference: GpuPreference
    rooms: tuple[int, ...] = ()


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
                    rooms = pod.rooms(name, resource)
                    yield PendingContainer(pod.uid, name, preference, rooms)


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
        """Wait a moment for the pods of some requests, if it matters for pods here at all."""
        if not self._expects_pods():
            return
        with anyio.move_on_after(self._timing.pod_wait):
            for size in sizes:
                while not self._unanswered(size, self._registry.snapshot):
                    await self._registry.changed_since(self._registry.snapshot)

    def rooms(self, size: int, snapshot: Snapshot) -> tuple[int, ...]:
        """Return the rooms of all containers that may be meant, largest first.

        More room than needed costs no container its shares.
        """
        pending = self._pending(size, snapshot)
        return tuple(
            sorted({room for container in pending for room in container.rooms}, reverse=True)
        )

    def match(self, size: int, snapshot: Snapshot) -> PendingContainer | None:
        """Return the container that the kubelet asks for; `None` without a preference.

        Where several containers may be meant, their preferences must agree. A container that had
        its answer is meant if no other is known.
        """
        pending = self._pending(size, snapshot)
        if len({container.preference for container in pending}) > 1:
            named = tuple(
                (container.uid, container.name) for container in pending if container.preference
            )
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

    def _expects_pods(self) -> bool:
        now, pods = self._clock(), self._registry.snapshot.pods
        if pods.preferring or any(
            pod.rooms(name, self._resource)
            for pod in pods.by_uid.values()
            for name in pod.handing_on
        ):
            self._preferring_until = now + self._timing.preferring
        return pods.listed and now < self._preferring_until

    def _pending(self, size: int, snapshot: Snapshot) -> list[PendingContainer]:
        return self._unanswered(size, snapshot) or list(
            pending_containers(self._resource, size, snapshot)
        )

    def _unanswered(self, size: int, snapshot: Snapshot) -> list[PendingContainer]:
        """Return the first container of each pod that had no answer."""
        found: dict[str, PendingContainer] = {}
        for container in pending_containers(self._resource, size, snapshot):
            if (container.uid, container.name) not in self._answered:
                found.setdefault(container.uid, container)
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
        await self._matcher.wait_known({allocation.size for allocation in asked})
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
            free = [share for share in available if not _is_unconfirmed(share, snapshot)]
            available = free if len(free) >= asked.size else available
            required = list(filter(None, map(known, asked.required)))
            rooms = self._matcher.rooms(asked.size, snapshot)
            try:
                backend = self._backend(self._resource)
                wanted = SharesRequest(backend, snapshot, available, required, asked.size, rooms)
                preferred = wanted.prefer_with_room(available)
                chosen = [share.id for share in preferred]
                preferred = self._by_annotations(wanted, preferred)
                chosen = [share.id for share in preferred]
            except Exception:  # noqa: BLE001 - no error here may fail the pod
                self._log.exception(
                    "preferred allocation failed", effect="the kubelet's order is used"
                )

        if len(chosen) == asked.size:
            return chosen
        return list(dict.fromkeys([*asked.required, *chosen, *asked.available]))[: asked.size]

    def _by_annotations(self, asked: SharesRequest, default: Sequence[Share]) -> Sequence[Share]:
        container = self._matcher.match(asked.size, asked.snapshot)
        if container is None:
            return default
        shares, reason = prefer_by_annotations(container.preference, asked, default)
        if reason:
            self._matcher.report(container, reason)
        return shares


def _is_unconfirmed(share: Share, snapshot: Snapshot) -> bool:
    lease = snapshot.gpus[share.gpu].leases.get(share.id)
    return lease is not None and lease.unconfirmed
