"""Expressions of node affinity for what a resource name alone does not say."""

from collections.abc import Sequence
from typing import Any

from metagpu.translation.choices import serve
from metagpu.translation.node_groups import COMPARED
from metagpu.translation.parts import FRACTION, GPU_COUNT, MPS, PRODUCT, OfferedPart, label_of
from metagpu.translation.plans import NodeParts, Plan
from metagpu.translation.requests import GpuRequest

_HOST = "kubernetes.io/hostname"


def expressions_for(
    plan: Plan, requests: Sequence[GpuRequest], surveyed: Sequence[NodeParts]
) -> list[dict[str, Any]]:
    """Return what keeps a pod from nodes whose shares would not serve it.

    Such a node has shares of less memory, or smaller GPUs, or a model that the pod refuses.
    """
    good: list[NodeParts] = []
    bad: list[NodeParts] = []
    for it in surveyed:
        if _counts(plan, it):
            serves = not it.refused and _serves(plan, requests, it)
            (good if serves else bad).append(it)
    if not bad:
        return []
    keys = [label_of(choice.resource, key) for choice in plan.choices for key in COMPARED]
    for key in (*keys, PRODUCT, GPU_COUNT):
        allowed = {it.node.labels.get(key) for it in good}
        if None not in allowed and not allowed & {it.node.labels.get(key) for it in bad}:
            return [_expression(key, "In", {str(it) for it in allowed})]
    hosts = {node.labels.get(_HOST, node.name) for it in bad for node in it.group.nodes.values()}
    return [_expression(_HOST, "NotIn", hosts)]


def _expression(key: str, operator: str, values: set[str]) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": sorted(values)}


def _counts(plan: Plan, each: NodeParts) -> bool:
    """Return whether a node offers all resources of a plan.

    The scheduler may choose it then.
    """
    offered = each.group.resources
    return all(choice.resource in offered for choice in plan.choices)


def _serves(plan: Plan, requests: Sequence[GpuRequest], each: NodeParts) -> bool:
    """Return whether the counts of a plan are right on a node."""
    parts = {part.resource: part for part in each.parts}
    return all(
        choice.resource in parts and _same(choice.count, request, parts[choice.resource])
        for request, choice in zip(requests, plan.choices, strict=True)
    )


def _same(count: int, request: GpuRequest, part: OfferedPart) -> bool:
    choice = serve(request, part)
    return choice is not None and (part.technique not in (FRACTION, MPS) or choice.count == count)
