"""What a pod says for itself about its GPU memory, by annotations, and what comes of it: pure.

gpu-mem-limit.cnvrg.io/metagpu: "50"      the memory of 50 shares, as MetaGPU's users have it
gpu-mem-limit.cnvrg.io/metagpu: 16Gi      so much of each of its GPUs
metagpu.io/memory-policy: report          another policy than its pool's
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from metagpu.core.enforcement import Annotation, Enforcement, Policy, limit_of
from metagpu.core.gpu import Gpu
from metagpu.core.model import Holder, ResourceName
from metagpu.core.snapshot import Snapshot
from metagpu.core.units import Bytes
from metagpu.core.usage import Usage

LIMIT: Final = "gpu-mem-limit."
"""Begins the annotation of a limit; the resource's name follows."""
POLICY: Final = "metagpu.io/memory-policy"
MOST: Final = 16
LONGEST: Final = 64
"""Wishes of one pod that are kept, and characters of each that are read: Kubernetes lets a pod have
256 KiB of annotations, and each that is refused is told."""


class Settled(msgspec.Struct, frozen=True):
    """What holds for one container on one GPU.

    Attributes:
        terms: the pool's, with the policy that the pod has chosen.
        limit: bytes that it may use; `None` where nobody knows its share, or there is no limit.
        refused: what the pod wished and does not get, and why.
    """

    terms: Enforcement
    limit: int | None
    refused: tuple[str, ...] = ()


class _RefusedError(Exception):
    """Raised for a wish that is not granted; says why."""


def wishes_in(annotations: Mapping[str, str]) -> Mapping[str, str]:
    """Give those of a pod's annotations that speak of GPU memory, as much of them as is read."""
    names = sorted(it for it in annotations if it == POLICY or it.startswith(LIMIT))
    kept = {name: str(annotations[name]) for name in names[-MOST:]}  # a policy is the last of all
    return {
        name: text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
        for name, text in kept.items()
    }


def settle(usage: Usage, snapshot: Snapshot, terms: Enforcement) -> Settled:
    """Say what holds for a container, by its pool and by what its pod may and does wish."""
    gpu = snapshot.gpus[usage.gpu].gpu
    pod = snapshot.pods.find(usage.holder, usage.pod_uid)
    refused = []

    if pod is not None and POLICY in pod.wishes:
        try:
            terms = _with_policy(terms, pod.wishes[POLICY])
        except _RefusedError as error:
            refused.append(f"{POLICY}: {error}; the policy of its pool stays")

    limit = None if terms.policy is Policy.OFF else limit_of(usage, gpu, terms.headroom)
    key = f"{LIMIT}{usage.shares[0].resource}"
    if pod is not None and key in pod.wishes:
        try:
            wished = _wished(pod.wishes[key], usage, snapshot, terms)
        except _RefusedError as error:
            refused.append(f"{key}: {error}; the limit of its shares stays")
        else:
            limit = limit and _raised(usage, gpu, wished, terms.headroom)
    return Settled(terms, limit, tuple(refused))


def held_by(snapshot: Snapshot, holder: Holder, resource: ResourceName) -> int:
    """Count the shares of a resource that a container holds, of all GPUs."""
    return sum(
        lease.holder == holder and lease.share.resource == resource
        for state in snapshot.gpus.values()
        for lease in state.leases.values()
    )


def wished_resources(wishes: Mapping[str, str]) -> Mapping[str, ResourceName]:
    """Name the resources whose limits a pod wishes to be others, by their annotations."""
    return {key: ResourceName(key.removeprefix(LIMIT)) for key in wishes if key.startswith(LIMIT)}


def _with_policy(terms: Enforcement, wish: str) -> Enforcement:
    if Annotation.POLICY not in terms.allow_annotations:
        raise _RefusedError("its pool lets no pod say so (`allowAnnotations: [policy]`)")
    try:
        policy = Policy(wish)
    except ValueError:
        raise _RefusedError(f"{wish!r} is no policy; allowed: {', '.join(Policy)}") from None
    return msgspec.structs.replace(terms, policy=policy)


def _wished(wish: str, usage: Usage, snapshot: Snapshot, terms: Enforcement) -> int:
    """Give the bytes of this GPU that a pod wishes its container's shares stood for."""
    if Annotation.LIMIT not in terms.allow_annotations:
        raise _RefusedError("its pool lets no pod say so (`allowAnnotations: [limit]`)")
    try:
        amount = int(wish) if wish.isdecimal() else int(Bytes.parse(wish))
    except ValueError:  # also of thousands of digits, which Python does not read
        amount = 0
    if amount <= 0:
        raise _RefusedError(
            f"{wish!r} is neither a number of shares such as 50 nor an amount of memory such as "
            "16Gi"
        )
    if not wish.isdecimal():
        return amount
    # Of a container on several GPUs each part grows, or shrinks, alike.
    held = held_by(snapshot, usage.holder, usage.shares[0].resource) or len(usage.shares)
    return (usage.share or 0) * amount // held


def _raised(usage: Usage, gpu: Gpu, wished: int, headroom: int) -> int:
    """Give the limit of a container whose shares stood for so much: never more than there is."""
    limit = limit_of(replace(usage, told=wished), gpu, headroom)
    return min(gpu.memory, limit or gpu.memory)
