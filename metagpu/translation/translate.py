"""The translation of one pod: the ways on each node, or why none serves it."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from metagpu.translation.choices import choose, most_gpus, shares_on_gpu
from metagpu.translation.hami_annotations import MODE, annotations_of
from metagpu.translation.node_offers import NodeGroups
from metagpu.translation.patch import expressions_for, operations_for
from metagpu.translation.plans import (
    NodeParts,
    Plan,
    best_plan,
    plans_of,
    policy_of,
    survey,
    techniques_of,
)
from metagpu.translation.requests import GpuRequest
from metagpu.translation.values import NodeOffer, Object, Translation, TranslationSettings
from metagpu.translation.vocabularies import read_requests
from metagpu.translation.warnings import warnings_for, warnings_for_released


def why_impossible(
    pod: Object,
    requests: Sequence[GpuRequest],
    surveyed: Sequence[NodeParts],
    techniques: Sequence[str],
    settings: TranslationSettings,
) -> str:
    """Return why no node could serve a pod, and the nearest request that one could."""
    if not any(parts.parts for parts in surveyed):
        return (
            "no Node has labels about GPUs that could serve it; metagpu writes them on its nodes, "
            "and they name what it offers"
        )
    offering = [parts for parts in surveyed if parts.parts and not parts.refused]
    if not offering:
        refused = sorted({parts.refused for parts in surveyed if parts.parts})
        return f"no node with GPUs is one that the pod may go to: {', '.join(refused)}"
    for request in requests:
        served = [
            parts
            for parts in offering
            if any(choose(request, one, parts.parts) for one in techniques)
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
        (parts.node.name, part)
        for parts in offering
        for part in parts.parts
        if part.technique in techniques
    ]
    if not known:
        return f"no node offers parts of GPUs by {by}"
    room, resource, name = max((part.room, part.resource, name) for name, part in known)
    size = f"{request.memory} MiB" if request.memory else f"{request.percentage} %"
    most = max(
        (most_gpus(part, each) for _, part in known if (each := shares_on_gpu(request, part))),
        default=0,
    )
    if most:
        asked = "whole GPUs" if request.whole else f"parts of {size}"
        return (
            f"{request.count} {asked} are asked for, and a pod gets {most} at most of one node; "
            f"ask for {settings.gpu}: {most} at most"
        )
    least = f" of {request.least} MiB" if request.least else ""
    asked = f"a whole GPU{least} is" if request.whole else f"{size} of one GPU are"
    differ = any(part.resource == resource and part.differ for _, part in known)
    larger = ", or make a pool of the larger GPUs" if differ else ""
    return (
        f"{asked} asked for, and {resource} on {name} promises {room} MiB of one GPU, the most by "
        f"{by}; ask for {settings.memory}: {room} at most{larger}"
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
    shares = ", ".join(f"{choice.count} of {choice.resource}" for choice in plan.choices)
    return f"; without the annotation {MODE} it gets {shares}"


class NodeWay(msgspec.Struct, frozen=True):
    """The shares of one node that would serve a pod by one technique.

    Attributes:
        technique: empty where the node serves it by none.
        text: the resources, or why there are none.
        memory: MiB of all shares together; `waste` of it is beyond the request.
    """

    node: str
    technique: str
    text: str
    memory: int = 0
    waste: int = 0
    chosen: bool = False


def explain(
    pod: Object, nodes: Sequence[NodeOffer], settings: TranslationSettings
) -> Sequence[NodeWay]:
    """Return what each node would give to a pod; nothing without a request."""
    offered = NodeGroups(nodes).offered
    found = read_requests(pod, offered, settings)
    requests = [request for request in found.requests if request.count]
    if found.problems or not requests:
        return ()
    needed = found.others & offered
    surveyed = [parts for node in nodes for parts in survey(pod, NodeGroups([node]), needed)]
    techniques = techniques_of(pod, requests, settings)
    chosen = best_plan(requests, surveyed, techniques, policy_of(pod, settings))
    return [way for parts in surveyed for way in _ways(requests, parts, techniques, chosen)]


def _ways(
    requests: Sequence[GpuRequest], parts: NodeParts, techniques: Sequence[str], chosen: Plan | None
) -> Iterator[NodeWay]:
    if parts.refused:
        yield NodeWay(parts.node.name, "", f"the pod may not go there: {parts.refused}")
        return
    plans = [plan for technique in techniques for plan in plans_of(requests, [parts], technique)]
    if not plans:
        offered = ", ".join(part.resource for part in parts.parts)
        missing = f"none: it offers {offered}" if offered else "none: no label has parts of GPUs"
        yield NodeWay(parts.node.name, "", missing)
    for plan in plans:
        resources = ", ".join(f"{count} of {resource}" for resource, count in plan.counts)
        memory = sum(choice.count * choice.part.memory for choice in plan.choices)
        is_chosen = chosen is not None and plan.counts == chosen.counts
        yield NodeWay(parts.node.name, plan.technique, resources, memory, plan.waste, is_chosen)


def translate(
    pod: Object, nodes: Iterable[NodeOffer], settings: TranslationSettings
) -> Translation:
    """Return what turns a pod's request into resources that nodes offer.

    The pod is not changed. A pod that names resources of nodes alone, or none, has no operations,
    and a translated one neither.
    """
    return translate_among(pod, NodeGroups(nodes), settings)


def translate_among(pod: Object, nodes: NodeGroups, settings: TranslationSettings) -> Translation:
    """Translate a pod, as `translate`, among nodes that are grouped already."""
    found = read_requests(pod, nodes.offered, settings)
    if found.problems:
        return _unreadable(found.problems)
    requests = [gpu_request for gpu_request in found.requests if gpu_request.count]
    released = [gpu_request for gpu_request in found.requests if not gpu_request.count]
    warnings = warnings_for_released(released, settings)
    if not requests:
        return Translation(operations_for(pod, (), released), tuple(warnings))

    surveyed = survey(pod, nodes, found.others & nodes.offered)
    techniques = techniques_of(pod, requests, settings)
    plan = best_plan(requests, surveyed, techniques, policy_of(pod, settings))
    if plan is None:
        reason = why_impossible(pod, requests, surveyed, techniques, settings)
        return Translation(impossible=reason)
    served = list(zip(requests, plan.choices, strict=True))
    for request, choice in served:
        if choice.resource in request.others:
            problem = (
                f"container {request.container} asks for {choice.resource} and for "
                f"{', '.join(request.asked)}; ask for one of them"
            )
            return _unreadable((problem,))
    expressions = expressions_for(pod, plan, requests, surveyed)
    return Translation(
        operations_for(pod, served, released, expressions),
        (*warnings, *warnings_for(pod, served, settings)),
    )


def _unreadable(problems: Sequence[str]) -> Translation:
    warnings = tuple(f"{problem}; it is left as it is" for problem in problems)
    return Translation(warnings=warnings, unreadable="; ".join(problems))
