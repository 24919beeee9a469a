"""Annotations of a pod about its GPU memory, the limits that follow, and watches.

gpu-mem-limit.cnvrg.io/metagpu: "50"      the memory of 50 shares, in MetaGPU's form
gpu-mem-limit.cnvrg.io/metagpu: 16Gi      this amount of each of the container's GPUs
metagpu.io/memory-policy: report          another policy than the pool's

The watches report once what is rejected, or not met.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from time import time
from typing import Final

import anyio
import structlog
from msgspec.structs import replace

from metagpu.core.config.memory import (
    LIMIT_PREFIX,
    AnnotationKind,
    EnforcementPolicy,
    MemoryEnforcement,
)
from metagpu.core.config.units import Quantity
from metagpu.core.contracts.capabilities import MemoryGuard
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.gpu_preference import parse_preference, unmet
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder, Lease, ResourceName, Share, holders_of
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.events import (
    AnnotationRejected,
    Event,
    PreferenceMissed,
    PreferenceNotMet,
)
from metagpu.core.state.registry import Registry, Subscription
from metagpu.core.usage.accounting import ContainerUsage
from metagpu.core.usage.policy import EffectiveLimit, memory_limit

POLICY: Final = "metagpu.io/memory-policy"
MAX_ANNOTATIONS: Final = 16
MAX_LENGTH: Final = 64
"""Number of annotations of one pod that are read, and of characters of each: Kubernetes allows
256 KiB of annotations in a pod, and every rejected annotation is reported."""


class _RejectedError(Exception):
    """An annotation that has no effect, with the reason."""


def memory_annotations(annotations: Mapping[str, str]) -> Mapping[str, str]:
    """Return a pod's annotations about GPU memory, cut to the length that is read."""
    names = sorted(
        annotation
        for annotation in annotations
        if annotation == POLICY or annotation.startswith(LIMIT_PREFIX)
    )
    # The policy's annotation sorts last: it is never among those left out.
    kept = {name: str(annotations[name]) for name in names[-MAX_ANNOTATIONS:]}
    return {
        name: text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 1]}…"
        for name, text in kept.items()
    }


def effective_limit(
    usage: ContainerUsage, snapshot: Snapshot, settings: MemoryEnforcement
) -> EffectiveLimit:
    """Return the limit of a container, by its GPU pool and by its pod's annotations."""
    gpu = snapshot.gpus[usage.gpu].gpu
    pod = snapshot.pods.find(usage.holder, usage.pod_uid)
    rejected = []

    if pod is None and snapshot.pods.awaited and settings.allow_annotations and settings.is_active:
        # The API server has not reported it yet: its annotations may allow more.
        settings = replace(settings, policy=EnforcementPolicy.REPORT, burst=None)
    if pod is not None and POLICY in pod.memory_annotations:
        try:
            settings = _with_policy(settings, pod.memory_annotations[POLICY])
        except _RejectedError as error:
            rejected.append(f"{POLICY}: {error}; the policy of the GPU's pool stays")

    own = (
        None
        if settings.policy is EnforcementPolicy.OFF
        else memory_limit(usage, gpu, settings.headroom)
    )
    limit, lends = own, settings.burst if gpu.memory else None
    if own and lends and gpu.memory:
        allowed = gpu.memory if lends.limit is None else lends.limit
        limit = max(own, _limit_for(usage, gpu, allowed, settings.headroom))
    key = f"{LIMIT_PREFIX}{usage.shares[0].resource}"
    if pod is not None and key in pod.memory_annotations:
        try:
            requested = _requested_memory(pod.memory_annotations[key], usage, snapshot, settings)
        except _RejectedError as error:
            whose = "pool" if lends else "container's shares"
            rejected.append(f"{key}: {error}; the limit of the {whose} stays")
        else:
            limit = limit and _limit_for(usage, gpu, requested, settings.headroom)
    request = min(own, limit) if lends and own and limit else limit
    return EffectiveLimit(settings, limit, request, tuple(rejected))


def count_held(snapshot: Snapshot, holder: Holder, resource: ResourceName) -> int:
    """Count the shares of a resource that a container holds, on all GPUs."""
    return sum(
        lease.holder is not None
        and holder.covers(lease.holder)
        and lease.share.resource == resource
        for state in snapshot.gpus.values()
        for lease in state.leases.values()
    )


def limited_resources(annotations: Mapping[str, str]) -> Mapping[str, ResourceName]:
    """Return the resource of each limit annotation, by the annotation's key."""
    return {
        key: ResourceName(key.removeprefix(LIMIT_PREFIX))
        for key in annotations
        if key.startswith(LIMIT_PREFIX)
    }


def _with_policy(settings: MemoryEnforcement, value: str) -> MemoryEnforcement:
    if AnnotationKind.POLICY not in settings.allow_annotations:
        raise _RejectedError("the GPU's pool does not allow it (`allowAnnotations: [policy]`)")
    try:
        policy = EnforcementPolicy(value)
    except ValueError:
        raise _RejectedError(
            f"{value!r} is not a policy; allowed: {', '.join(EnforcementPolicy)}"
        ) from None
    burst = settings.burst if policy is EnforcementPolicy.KILL else None
    return replace(settings, policy=policy, burst=burst)


def _requested_memory(
    value: str, usage: ContainerUsage, snapshot: Snapshot, settings: MemoryEnforcement
) -> int:
    """Return the bytes of this GPU that a pod requests in place of its shares."""
    if AnnotationKind.LIMIT not in settings.allow_annotations:
        raise _RejectedError("the GPU's pool does not allow it (`allowAnnotations: [limit]`)")
    try:
        amount = int(value) if value.isdecimal() else int(Quantity.parse(value))
    except ValueError:  # also for thousands of digits, which Python does not parse
        amount = 0
    if amount <= 0:
        raise _RejectedError(
            f"{value!r} is neither a number of shares such as 50 nor an amount of memory such as "
            "16Gi"
        )
    if not value.isdecimal():
        return amount
    # The parts of a container on several GPUs grow, or shrink, by the same factor.
    held = count_held(snapshot, usage.holder, usage.shares[0].resource) or len(usage.shares)
    return (usage.share_memory or 0) * amount // held


def _limit_for(usage: ContainerUsage, gpu: Gpu, requested: int, headroom: int) -> int:
    """Return the limit for a requested amount of memory, at most the GPU's memory."""
    limit = memory_limit(replace(usage, promised_memory=requested), gpu, headroom) or requested
    return limit if gpu.memory is None else min(gpu.memory, limit)


_LATE: Final = (
    "metagpu heard of the pod after the kubelet had asked, or its annotations were changed later; "
    "create the pod again"
)
_CLAIM: Final = (
    "the scheduler chooses the devices of a ResourceClaim: name the GPU in a selector of the claim"
)
_HeldLease = tuple[Holder, Lease]
"""A lease, and one of the containers that hold it."""
_LeasesByPod = Mapping[tuple[str, str], Sequence[_HeldLease]]

log = structlog.get_logger()


class AnnotationWatch:
    """A watch on the pods, their annotations, and their leases."""

    def __init__(
        self,
        registry: Registry,
        settings: Callable[[GpuId], MemoryEnforcement],
        guards: Mapping[str, MemoryGuard],
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._guards = guards

    async def run(self) -> None:
        """Report every rejected annotation once while it is rejected, until cancelled."""
        reported: AbstractSet[tuple[str, str]] = frozenset()

        async for pods, _ in self._registry.watch(_relevant):
            snapshot = self._registry.snapshot
            leases = _leases_by_pod(snapshot) if pods else {}
            rejected = {
                (pod.uid, reason): pod
                for pod in pods
                for reason in rejected_annotations(
                    pod, _leases_of(pod, leases), snapshot, self._settings, self._guards
                )
            }
            for (uid, reason), pod in rejected.items():
                if (uid, reason) not in reported:
                    log.warning("annotation rejected", pod=str(pod), reason=reason)
                    self._registry.events.publish(AnnotationRejected(pod, reason, at=time()))
            reported = rejected.keys()


class UnmetPreferenceWatch:
    """A watch on the GPUs that pods prefer, and on those that they got.

    The kubelet does not say for which pod it asks, and may choose other shares: what a pod got is
    known once the kubelet lists it.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._reasons: dict[tuple[str, str], str] = {}

    async def run(self) -> None:
        """Report each container once whose preference is not met, until cancelled."""
        with self._registry.events.subscribe(PreferenceMissed) as missed:
            async with anyio.create_task_group() as group:
                group.start_soon(self._remember, missed)
                await self._watch()

    async def _remember(self, missed: Subscription[Event]) -> None:
        async for event in missed:
            if isinstance(event, PreferenceMissed):
                self._reasons |= dict.fromkeys(event.containers, event.reason)

    async def _watch(self) -> None:
        reported: AbstractSet[tuple[str, str, str]] = frozenset()
        async for pods, _ in self._registry.watch(_preferring):
            known = {pod.uid for pod in pods}
            self._reasons = {key: why for key, why in self._reasons.items() if key[0] in known}
            found = {
                (pod.uid, container, words): (pod, why)
                for pod, container, words, why in unmet_preferences(pods, self._registry.snapshot)
            }
            for key in found.keys() - reported:
                (pod, why), (uid, container, words) = found[key], key
                why = why or self._reasons.get((uid, container), _LATE)
                reason = f"container {container} {words}: {why}"
                log.warning("gpu preference not met", pod=str(pod), reason=reason)
                event = PreferenceNotMet(pod, container, reason, at=time())
                self._registry.events.publish(event)
            reported = found.keys()


def unmet_preferences(
    pods: Iterable[KnownPod], snapshot: Snapshot
) -> Iterator[tuple[KnownPod, str, str, str]]:
    """Yield containers whose shares their pods do not prefer.

    Of each the pod, its name, how the shares differ, and why. The last is empty where the shares do
    not show it. An annotation that is not followed is such a difference too.
    """
    gpus = {gpu: state.gpu for gpu, state in snapshot.gpus.items()}
    leases = _leases_by_pod(snapshot)
    for pod in pods:
        held: dict[tuple[str, ResourceName, bool], Counter[GpuId]] = {}
        for holder, lease in _leases_of(pod, leases):
            if holder.container:
                key = holder.container, lease.share.resource, lease.resource_claim is not None
                held.setdefault(key, Counter())[lease.share.gpu] += 1
        for (container, _, of_claim), counts in held.items():
            preference = parse_preference(pod.gpu_annotations, container)
            for problem in preference.problems:
                yield pod, container, "has an annotation without effect", problem
            if words := unmet(preference, container, counts, gpus):
                yield pod, container, words, _CLAIM if of_claim else ""


def _preferring(snapshot: Snapshot) -> tuple[tuple[KnownPod, ...], object]:
    """Return the data that a preference depends on; no leases if no pod prefers GPUs."""
    if not snapshot.pods.preferring:
        return (), ()
    pods = tuple(
        pod for pod in snapshot.pods.by_uid.values() if pod.gpu_annotations and not pod.ended
    )
    return pods, tuple(state.leases for state in snapshot.gpus.values()) if pods else ()


def rejected_annotations(
    pod: KnownPod,
    leases: Iterable[_HeldLease],
    snapshot: Snapshot,
    settings: Callable[[GpuId], MemoryEnforcement],
    guards: Mapping[str, MemoryGuard],
) -> tuple[str, ...]:
    """Return a sentence for each rejected annotation; empty before the pod has shares.

    Args:
        pod: a pod with annotations about GPU memory.
        leases: all leases of its containers.
        snapshot: everything known now.
        settings: returns the settings of a GPU's pool.
        guards: what keeps the memory limits of each backend.
    """
    found: list[str] = []
    held: set[str] = set()
    by_container: defaultdict[tuple[GpuId, Holder], list[Share]] = defaultdict(list)
    for holder, lease in leases:
        if holder == lease.holder:
            by_container[lease.share.gpu, holder].append(lease.share)

    for (gpu, holder), shares in by_container.items():
        resource, backend = shares[0].resource, shares[0].backend
        held.add(resource)
        if guards.get(backend) is MemoryGuard.ENFORCER:
            usage = ContainerUsage(gpu, holder, pod.uid, tuple(shares))
            found += effective_limit(usage, snapshot, settings(gpu)).rejected
        elif any(
            limited == resource for limited in limited_resources(pod.memory_annotations).values()
        ):
            found.append(f"{resource} is shared by {backend}, whose limits no annotation changes")

    for key, resource in limited_resources(pod.memory_annotations).items():
        if held and resource not in held:
            found.append(f"{key}: the pod holds no {resource}")
    return tuple(dict.fromkeys(found))


def _leases_by_pod(snapshot: Snapshot) -> _LeasesByPod:
    """Return the leases of each pod, by its namespace and name."""
    found: dict[tuple[str, str], list[_HeldLease]] = {}
    for state in snapshot.gpus.values():
        for lease in state.leases.values():
            for holder in holders_of(lease):
                found.setdefault((holder.namespace, holder.pod), []).append((holder, lease))
    return found


def _leases_of(pod: KnownPod, leases: _LeasesByPod) -> Sequence[_HeldLease]:
    """Return the leases of a pod, none before the kubelet has admitted it.

    What is leased under its name until then is an earlier pod's, which is not released yet.
    """
    return () if pod.arriving else leases.get((pod.namespace, pod.name), ())


def _relevant(snapshot: Snapshot) -> tuple[tuple[KnownPod, ...], object]:
    """Return the data that a rejection depends on; no leases if no pod is annotated."""
    pods = snapshot.pods.annotated
    return pods, tuple(state.leases for state in snapshot.gpus.values()) if pods else ()
