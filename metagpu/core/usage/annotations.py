"""Annotations of a pod about its GPU memory, and the limits that follow. Pure.

gpu-mem-limit.cnvrg.io/metagpu: "50"      the memory of 50 shares, in MetaGPU's form
gpu-mem-limit.cnvrg.io/metagpu: 16Gi      this amount of each of the container's GPUs
metagpu.io/memory-policy: report          another policy than the pool's
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from metagpu.core.config.memory import AnnotationKind, EnforcementPolicy, MemoryEnforcement
from metagpu.core.config.units import Bytes
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import Holder, ResourceName
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.usage.accounting import ContainerUsage
from metagpu.core.usage.policy import memory_limit

LIMIT_PREFIX: Final = "gpu-mem-limit."
"""Prefix of a limit's annotation; the resource's name follows."""
POLICY: Final = "metagpu.io/memory-policy"
MAX_ANNOTATIONS: Final = 16
MAX_LENGTH: Final = 64
"""Number of annotations of one pod that are read, and of characters of each: Kubernetes allows
256 KiB of annotations in a pod, and every rejected annotation is reported."""


class EffectiveLimit(msgspec.Struct, frozen=True):
    """Memory limit of one container on one GPU.

    Attributes:
        settings: the pool's settings, with the policy that the pod has chosen.
        limit: bytes; `None` where the container's share is unknown, or there is no limit.
        rejected: a sentence for each annotation that has no effect.
    """

    settings: MemoryEnforcement
    limit: int | None
    rejected: tuple[str, ...] = ()


class _RejectedError(Exception):
    """An annotation that has no effect, with the reason."""


def memory_annotations(annotations: Mapping[str, str]) -> Mapping[str, str]:
    """Return a pod's annotations about GPU memory, cut to the length that is read."""
    names = sorted(it for it in annotations if it == POLICY or it.startswith(LIMIT_PREFIX))
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

    if pod is not None and POLICY in pod.memory_annotations:
        try:
            settings = _with_policy(settings, pod.memory_annotations[POLICY])
        except _RejectedError as error:
            rejected.append(f"{POLICY}: {error}; the policy of the GPU's pool stays")

    limit = (
        None
        if settings.policy is EnforcementPolicy.OFF
        else memory_limit(usage, gpu, settings.headroom)
    )
    key = f"{LIMIT_PREFIX}{usage.shares[0].resource}"
    if pod is not None and key in pod.memory_annotations:
        try:
            requested = _requested_memory(pod.memory_annotations[key], usage, snapshot, settings)
        except _RejectedError as error:
            rejected.append(f"{key}: {error}; the limit of the container's shares stays")
        else:
            limit = limit and _limit_for(usage, gpu, requested, settings.headroom)
    return EffectiveLimit(settings, limit, tuple(rejected))


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
    return msgspec.structs.replace(settings, policy=policy)


def _requested_memory(
    value: str, usage: ContainerUsage, snapshot: Snapshot, settings: MemoryEnforcement
) -> int:
    """Return the bytes of this GPU that a pod requests in place of its shares."""
    if AnnotationKind.LIMIT not in settings.allow_annotations:
        raise _RejectedError("the GPU's pool does not allow it (`allowAnnotations: [limit]`)")
    try:
        amount = int(value) if value.isdecimal() else int(Bytes.parse(value))
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
