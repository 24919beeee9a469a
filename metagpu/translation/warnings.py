"""Sentences about what of a pod's request is not translated."""

from collections.abc import Iterator, Sequence
from typing import Final

from metagpu.translation.parts import MPS
from metagpu.translation.plans import NODE_POLICY, POLICIES, Plan, annotations_of
from metagpu.translation.requests import GpuRequest
from metagpu.translation.values import Object, TranslationSettings

_UUID: Final = ("nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid")
_HAMI_SCHEDULER: Final = "hami-scheduler"


def warnings_for(
    pod: Object, plan: Plan, requests: Sequence[GpuRequest], settings: TranslationSettings
) -> Iterator[str]:
    """Yield what a pod asks for and does not get, each with the reason."""
    for request, choice in zip(requests, plan.choices, strict=True):
        name = f"container {request.container}: "
        if request.cores and choice.part.technique != MPS and not request.whole:
            has = "has the multiprocessors of its profile"
            if not choice.resource.startswith("nvidia.com/mig-"):
                has = "limits memory alone; shares of backend mps limit threads too"
            yield (
                f"{name}{settings.cores}: {request.cores} has no effect: {choice.resource} {has}"
            )
        if settings.priority in request.names:
            yield f"{name}{settings.priority} has no effect: metagpu stops no pod for another"
    annotations, spec = annotations_of(pod), pod.get("spec") or {}
    for key in _UUID:
        if annotations.get(key):
            yield (
                f"{key} does not choose a node, as no Node label has the uuids of GPUs: the node "
                "that the scheduler chooses honours it, or refuses the pod"
            )
    scheduler = str(spec.get("schedulerName") or "")
    if scheduler == _HAMI_SCHEDULER:
        yield f"schedulerName: {scheduler} stays: without that scheduler the pod waits for ever"
    policy = annotations.get(NODE_POLICY)
    if policy and policy not in POLICIES:
        yield f"{NODE_POLICY}: {policy} has no effect; known are binpack and spread"
    elif policy and scheduler != f"metagpu-{policy}":
        yield (
            f"{NODE_POLICY}: {policy} chooses the resource alone; for the node too, name the "
            f"scheduler metagpu-{policy} in schedulerName (docs/bin-packing.md)"
        )
