"""The translation of one pod."""

from collections.abc import Iterable

from metagpu.translation.impossible import why_impossible
from metagpu.translation.narrowing import expressions_for
from metagpu.translation.node_groups import NodeGroups
from metagpu.translation.patch import operations_for
from metagpu.translation.plans import best_plan, policy_of, survey, techniques_of
from metagpu.translation.requests import read_requests
from metagpu.translation.values import NodeOffer, Object, Translation, TranslationSettings
from metagpu.translation.warnings import warnings_for


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
    requests, problems = read_requests(pod, nodes.resources, settings)
    if problems or not requests:
        return Translation(warnings=tuple(problems))

    surveyed = survey(pod, nodes)
    techniques = techniques_of(pod, requests, settings)
    plan = best_plan(requests, surveyed, techniques, policy_of(pod, settings))
    if plan is None:
        reason = why_impossible(pod, requests, surveyed, techniques, settings)
        return Translation(impossible=reason)
    for request, choice in zip(requests, plan.choices, strict=True):
        if choice.resource in request.others:
            problem = (
                f"container {request.container} asks for {choice.resource} and for "
                f"{', '.join(request.names)}; it is left as it is: ask for one of them"
            )
            return Translation(warnings=(problem,))
    return Translation(
        operations_for(pod, plan, requests, expressions_for(pod, plan, requests, surveyed)),
        warnings=tuple(warnings_for(pod, plan, requests, settings)),
    )
