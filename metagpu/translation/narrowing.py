"""Expressions of node affinity for what a resource name alone does not say.

They hold for nodes that come later too: the number of shares is right where labels are equal.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from metagpu.translation.affinity import missing_label
from metagpu.translation.annotations import annotations_of
from metagpu.translation.choices import Choice, serve
from metagpu.translation.models import names_model, refused_model
from metagpu.translation.parts import (
    FRACTION,
    GPU_MEMORY,
    MIG,
    MPS,
    PRODUCT,
    WHOLE,
    OfferedPart,
    label_of,
    memory_label,
)
from metagpu.translation.plans import NodeParts, Plan
from metagpu.translation.requests import GpuRequest
from metagpu.translation.values import Object

Expression = dict[str, Any]

_HOST: Final = "kubernetes.io/hostname"
_GB_OF_NAME: Final = re.compile(r"nvidia\.com/mig-.*\.(\d+)gb")
_NAMED: Final = 0.85
"""Part of the GB in its name that every instance has: `1g.18gb` of an H200 has 16 GiB."""


def expressions_for(
    pod: Object, plan: Plan, requests: Sequence[GpuRequest], surveyed: Sequence[NodeParts]
) -> list[Expression]:
    """Return what keeps a pod from nodes whose shares would not serve it.

    Such a node has shares of less memory, or smaller GPUs, or a model that the pod refuses. From
    those that the pod's own selector excludes, the scheduler keeps it.
    """
    annotations = annotations_of(pod)
    serving, others = [], []
    served: dict[int, bool] = {}
    for it in surveyed:
        same_parts = id(it.parts)  # groups with equal parts share them
        if same_parts not in served:
            served[same_parts] = _serves(plan, requests, it)
        if not it.refused and served[same_parts]:
            serving.append(it)
        elif not it.refused or refused_model(annotations, it.node):
            others.append(it)

    found: list[Expression] = []
    if names_model(annotations):
        found.append(_one_of(PRODUCT, [it.node.labels[PRODUCT] for it in serving]))
    for request, choice in zip(requests, plan.choices, strict=True):
        parts = [part for it in serving for part in it.parts if part.resource == choice.resource]
        found += [it for it in _relied_on(request, choice, parts) if it not in found]
    reached = [it for it in others if _counts(plan, it) and _reaches(found, it)]
    return [*found, *_telling_apart(serving, reached)]


def _relied_on(
    request: GpuRequest, choice: Choice, parts: Sequence[OfferedPart]
) -> Iterator[Expression]:
    """Yield what a number of shares relies on."""
    resource, technique = choice.resource, choice.part.technique
    if technique in (FRACTION, MPS):
        yield from _of_shares(request, choice, parts)
    elif technique == MIG and not request.memory:  # percents of no larger GPU
        yield _above_or_below(GPU_MEMORY, "Lt", max(it.gpu_memory for it in parts) + 1)
    elif technique == MIG:
        named = _GB_OF_NAME.match(resource)
        if named is None or request.memory > int(named[1]) * 1024 * _NAMED:
            yield _above_or_below(memory_label(resource), "Gt", request.memory - 1)
    elif technique == WHOLE and request.memory:
        yield _above_or_below(GPU_MEMORY, "Gt", request.memory - 1)


def _of_shares(
    request: GpuRequest, choice: Choice, parts: Sequence[OfferedPart]
) -> Iterator[Expression]:
    def label(key: str) -> str:
        return label_of(choice.resource, key)

    each = choice.count // request.count
    threads = bool(request.cores) and choice.part.technique == MPS
    if not request.memory or threads or request.count > 1:  # time-slices have no memory
        yield _one_of(label("backend"), [choice.part.technique])
    if request.memory:
        yield _one_of(label("memory"), [str(it.memory) for it in parts])
    if request.memory and not threads and all(each * it.memory >= request.memory for it in parts):
        yield _above_or_below(label("replicas"), "Gt", each - 1)
    else:
        yield _one_of(label("replicas"), [str(it.per_gpu) for it in parts])
    if request.count > 1:
        yield _above_or_below(label("gpus"), "Gt", request.count - 1)


def _telling_apart(
    serving: Sequence[NodeParts], others: Sequence[NodeParts]
) -> Iterator[Expression]:
    """Yield what keeps a pod from known nodes that no label of shares tells apart."""
    if not others:
        return
    products = {it.node.labels.get(PRODUCT) for it in serving}
    if None in products or products & {it.node.labels.get(PRODUCT) for it in others}:
        known = [node for it in others for node in it.group.nodes.values()]
        hosts = {node.labels.get(_HOST, node.name) for node in known}
        yield {"key": _HOST, "operator": "NotIn", "values": sorted(hosts)}
    else:
        yield _one_of(PRODUCT, map(str, products))


def _one_of(key: str, values: Iterable[str]) -> Expression:
    return {"key": key, "operator": "In", "values": sorted(set(values))}


def _above_or_below(key: str, operator: str, bound: int) -> Expression:
    return {"key": key, "operator": operator, "values": [str(bound)]}


def _reaches(expressions: list[Expression], each: NodeParts) -> bool:
    terms = [{"matchExpressions": expressions}] if expressions else []
    return not missing_label({}, terms, each.node.name, each.node.labels)


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
