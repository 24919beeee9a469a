"""The translation of one pod."""

from collections.abc import Iterable, Sequence

from metagpu.translation.impossible import why_impossible
from metagpu.translation.narrowing import expressions_for
from metagpu.translation.node_groups import NodeGroups
from metagpu.translation.patch import operations_for
from metagpu.translation.plans import best_plan, policy_of, survey, techniques_of
from metagpu.translation.requests import read_requests
from metagpu.translation.values import NodeOffer, Object, Translation, TranslationSettings
from metagpu.translation.warnings import warnings_for, warnings_for_released


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
    requests = [it for it in found.requests if it.count]
    released = [it for it in found.requests if not it.count]
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
                f"{', '.join(request.names)}; ask for one of them"
            )
            return _unreadable((problem,))
    expressions = expressions_for(pod, plan, requests, surveyed)
    return Translation(
        operations_for(pod, served, released, expressions),
        (*warnings, *warnings_for(pod, served, settings)),
    )


def _unreadable(problems: Sequence[str]) -> Translation:
    warnings = tuple(f"{it}; it is left as it is" for it in problems)
    return Translation(warnings=warnings, unreadable="; ".join(problems))
