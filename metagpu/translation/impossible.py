"""The sentence about a request that no node could serve, and what would fit."""

from collections.abc import Sequence

from metagpu.translation.annotations import MODE, annotations_of
from metagpu.translation.choices import choose, most_gpus, needed_memory, shares_on_gpu
from metagpu.translation.plans import NodeParts, best_plan, techniques_of
from metagpu.translation.requests import GpuRequest
from metagpu.translation.values import Object, TranslationSettings


def why_impossible(
    pod: Object,
    requests: Sequence[GpuRequest],
    surveyed: Sequence[NodeParts],
    techniques: Sequence[str],
    settings: TranslationSettings,
) -> str:
    """Return why no node could serve a pod, and the nearest request that one could."""
    if not any(it.parts for it in surveyed):
        return (
            "no Node has labels about GPUs that could serve it; metagpu writes them on its nodes, "
            "and they name what it offers"
        )
    offering = [it for it in surveyed if it.parts and not it.refused]
    if not offering:
        refused = sorted({it.refused for it in surveyed if it.parts})
        return f"no node with GPUs is one that the pod may go to: {', '.join(refused)}"
    for request in requests:
        served = [
            it for it in offering if any(choose(request, one, it.parts) for one in techniques)
        ]
        if not served:
            reason = _of_request(request, offering, techniques, settings)
            otherwise = _without_mode(pod, requests, surveyed, settings)
            return f"container {request.container}: {reason}{otherwise}"
    return (
        "its containers together ask for more than any one node has; ask for less, or divide them "
        "over several pods"
    )


def _of_request(
    request: GpuRequest,
    offering: Sequence[NodeParts],
    techniques: Sequence[str],
    settings: TranslationSettings,
) -> str:
    """Return why no node serves a request, by the parts that come nearest."""
    by = ", ".join(techniques)
    known = [
        (it.node.name, part) for it in offering for part in it.parts if part.technique in techniques
    ]
    if not known:
        return f"no node offers parts of GPUs by {by}"
    room, resource, name = max((part.room, part.resource, name) for name, part in known)
    wanted = max(needed_memory(request, part) for _, part in known)
    most = max(
        (most_gpus(part, each) for _, part in known if (each := shares_on_gpu(request, part))),
        default=0,
    )
    if most:
        asked = "whole GPUs" if request.whole else f"parts of {wanted} MiB"
        return (
            f"{request.count} {asked} are asked for, and a pod gets {most} at most of one node; "
            f"ask for {settings.gpu}: {most} at most"
        )
    size = f"{wanted} MiB" if wanted else f"{request.percentage} %"
    asked = "a whole GPU is" if request.whole else f"{size} of one GPU are"
    return (
        f"{asked} asked for, and the most of one GPU by {by} is {room} MiB: {resource} on {name}; "
        f"ask for {settings.memory}: {room} at most"
    )


def _without_mode(
    pod: Object,
    requests: Sequence[GpuRequest],
    surveyed: Sequence[NodeParts],
    settings: TranslationSettings,
) -> str:
    """Return what would serve a pod that names a mode, if it named none."""
    if not annotations_of(pod).get(MODE):
        return ""
    plan = best_plan(requests, surveyed, techniques_of({}, requests, settings), settings.policy)
    if plan is None:
        return ""
    shares = ", ".join(f"{it.count} of {it.resource}" for it in plan.choices)
    return f"; without the annotation {MODE} it gets {shares}"
