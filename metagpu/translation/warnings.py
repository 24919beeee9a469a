"""Sentences about what of a pod's request is not translated."""

from collections.abc import Iterable, Iterator
from typing import Final

from metagpu.translation.choices import Choice
from metagpu.translation.hami_annotations import NODE_POLICY, annotations_of
from metagpu.translation.node_offers import FRACTION, MIG, MPS
from metagpu.translation.patch import DEFAULT_SCHEDULER, limit_of
from metagpu.translation.requests import GpuRequest
from metagpu.translation.values import POLICIES, Object, TranslationSettings
from metagpu.translation.vocabularies import scheduler_left_by

_UUID: Final = ("nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid")
_INDEX: Final = "an index means another GPU on each node; name uuids"
_NO_EFFECT: Final = {
    "nvidia.com/use-gpuindexes": _INDEX,
    "nvidia.com/nouse-gpuindexes": _INDEX,
    "nvidia.com/mig-profile-preference": "the smallest profile with the memory is taken; ask for "
    "more, or for the profile by its resource name",
    "hami.io/vulkan": "metagpu puts no library between a program and the GPU",
    "nvidia.com/numa-bind": "the kubelet aligns GPUs and CPUs, by its topologyManagerPolicy",
}


def warnings_for(
    pod: Object,
    served: Iterable[tuple[GpuRequest, Choice]],
    settings: TranslationSettings,
    claimed: Iterable[GpuRequest] = (),
) -> Iterator[str]:
    """Yield what a pod asks for and does not get, each with the reason."""
    served = list(served)
    for request, choice in served:
        for sentence in (
            *_of_container(request, choice, settings),
            *_of_limit(request, choice, limit_of(pod, choice, served)),
        ):
            yield f"container {request.container}: {sentence}"
        yield from _of_priority(request, settings)
    yield from _of_annotations(pod, (*(request for request, _ in served), *claimed))


def warnings_for_released(
    requests: Iterable[GpuRequest], settings: TranslationSettings
) -> Iterator[str]:
    """Yield what goes from containers that ask for no GPU."""
    for request in requests:
        if settings.gpu in request.names:
            removed = ", ".join(name for name in request.names if name != settings.gpu)
            yield f"container {request.container}: {settings.gpu}: 0 is none: {removed} is removed"
        yield from _of_priority(request, settings)


def _of_priority(request: GpuRequest, settings: TranslationSettings) -> Iterator[str]:
    if settings.priority in request.names:
        why = "has no effect and is removed: metagpu stops no pod for another"
        yield f"container {request.container}: {settings.priority} {why}"


def _of_container(
    request: GpuRequest, choice: Choice, settings: TranslationSettings
) -> Iterator[str]:
    technique = choice.part.technique
    if request.cores and request.whole and {*request.names} & {*settings.sizes}:
        yield (
            f"{settings.cores}: {request.cores} keeps other pods off the GPU, as in HAMi: "
            f"{choice.resource} is all of it"
        )
    if request.cores and technique != MPS and not request.whole:
        has = "limits memory alone; shares of backend mps limit threads too"
        if technique == MIG:
            has = "has the multiprocessors of its profile"
        yield f"{cores_text(request, settings)} has no effect: {choice.resource} {has}"
    if request.count > 1 and technique == FRACTION and not request.whole:
        yield (
            f"its shares come from {request.count} GPUs where the pool has `split: accept`, and "
            "from one elsewhere (docs/placement.md)"
        )


def cores_text(request: GpuRequest, settings: TranslationSettings) -> str:
    """Return the percents of multiprocessors as the pod asks for them."""
    by_name = settings.cores in request.names
    return f"{settings.cores if by_name else 'gpu-compute.portion'}: {request.cores}"


def _of_limit(request: GpuRequest, choice: Choice, limit: int) -> Iterator[str]:
    if limit:
        yield (
            f"it may use {limit} MiB where the pool has `allowAnnotations: [limit]`, and what it "
            "requests elsewhere (docs/enforcement.md)"
        )
    elif request.limit:
        yield f"gpu-memory.limit has no effect: {choice.resource} limits it to its request"


def _of_annotations(pod: Object, requests: Iterable[GpuRequest]) -> Iterator[str]:
    annotations, spec = annotations_of(pod), pod.get("spec") or {}
    for key in _UUID:
        if annotations.get(key):
            yield (
                f"{key} does not choose a node, as no Node label has the uuids of GPUs: the node "
                "that the scheduler chooses prefers such GPUs (docs/placement.md)"
            )
    for key in _NO_EFFECT:
        if annotations.get(key):
            yield f"{key} has no effect: {_NO_EFFECT[key]}"
    scheduler = str(spec.get("schedulerName") or "")
    if scheduler_left_by(pod, requests):
        yield f"schedulerName: {scheduler} becomes {DEFAULT_SCHEDULER}, Kubernetes' own"
    policy = annotations.get(NODE_POLICY)
    if policy and policy not in POLICIES:
        yield f"{NODE_POLICY}: {policy} has no effect; known are binpack and spread"
    elif policy and scheduler != f"metagpu-{policy}":
        yield (
            f"{NODE_POLICY}: {policy} chooses the resource alone; for the node too, name the "
            f"scheduler metagpu-{policy} in schedulerName (docs/bin-packing.md)"
        )
