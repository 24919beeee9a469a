"""The ways to serve a pod on each node, for people who ask why one was chosen."""

from collections.abc import Iterator, Sequence

import msgspec

from metagpu.translation.node_groups import NodeGroups
from metagpu.translation.plans import (
    NodeParts,
    Plan,
    best_plan,
    plans_of,
    policy_of,
    survey,
    techniques_of,
)
from metagpu.translation.requests import GpuRequest, read_requests
from metagpu.translation.values import NodeOffer, Object, TranslationSettings


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
    requests = [it for it in found.requests if it.count]
    if found.problems or not requests:
        return ()
    needed = found.others & offered
    surveyed = [it for node in nodes for it in survey(pod, NodeGroups([node]), needed)]
    techniques = techniques_of(pod, requests, settings)
    chosen = best_plan(requests, surveyed, techniques, policy_of(pod, settings))
    return [way for it in surveyed for way in _ways(requests, it, techniques, chosen)]


def _ways(
    requests: Sequence[GpuRequest], it: NodeParts, techniques: Sequence[str], chosen: Plan | None
) -> Iterator[NodeWay]:
    if it.refused:
        yield NodeWay(it.node.name, "", f"the pod may not go there: {it.refused}")
        return
    plans = [plan for technique in techniques for plan in plans_of(requests, [it], technique)]
    if not plans:
        offered = ", ".join(part.resource for part in it.parts)
        missing = f"none: it offers {offered}" if offered else "none: no label has parts of GPUs"
        yield NodeWay(it.node.name, "", missing)
    for plan in plans:
        resources = ", ".join(f"{count} of {resource}" for resource, count in plan.counts)
        memory = sum(choice.count * choice.part.memory for choice in plan.choices)
        is_chosen = chosen is not None and plan.counts == chosen.counts
        yield NodeWay(it.node.name, plan.technique, resources, memory, plan.waste, is_chosen)
