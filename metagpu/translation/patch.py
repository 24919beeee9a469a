"""The JSON Patch that replaces a request."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from metagpu.core.config.memory import LIMIT_PREFIX
from metagpu.translation.affinity import NodeSelection
from metagpu.translation.choices import Choice, serve
from metagpu.translation.hami_annotations import (
    GPUS_PREFIX,
    ORIGINAL,
    annotations_of,
    names_model,
    original_request,
    refused_model,
)
from metagpu.translation.node_offers import (
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
from metagpu.translation.requests import GpuRequest, amounts_of, containers_of
from metagpu.translation.values import Object
from metagpu.translation.vocabularies import scheduler_left_by

DEFAULT_SCHEDULER: Final = "default-scheduler"
_json: Final = json.JSONEncoder(sort_keys=True).encode
_KINDS: Final = ("limits", "requests")
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"

Operation = dict[str, Any]


def operations_for(
    pod: Object,
    served: Sequence[tuple[GpuRequest, Choice]],
    released: Sequence[GpuRequest],
    expressions: Sequence[Mapping[str, Any]] = (),
) -> tuple[Operation, ...]:
    """Return the operations that turn a pod into one that asks for resources of nodes.

    Of the `released` requests the names go, and nothing takes their place.
    """
    if not served and not released:
        return ()
    return (
        *_annotations(pod, served, released),
        *(resource for request, choice in served for resource in _resources(pod, request, choice)),
        *(operation for request in released for operation in _removed(pod, request)),
        *_affinity(pod.get("spec") or {}, expressions),
        *_scheduler(pod, (*(request for request, _ in served), *released)),
    )


def _annotations(
    pod: Object, served: Sequence[tuple[GpuRequest, Choice]], released: Iterable[GpuRequest]
) -> Iterator[Operation]:
    present = annotations_of(pod)
    requests = (*(request for request, _ in served), *released)
    original = {
        **original_request(pod),
        **{gpu_request.container: dict(gpu_request.asked) for gpu_request in requests},
    }
    added = {ORIGINAL: _json(original)}
    for request, choice in served:
        divided = choice.part.technique in (FRACTION, MPS)
        if request.count > 1 and divided and not request.whole:
            added[GPUS_PREFIX + request.container] = str(request.count)
        limit = limit_of(pod, choice, served)
        if limit and LIMIT_PREFIX + choice.resource not in present:
            added[LIMIT_PREFIX + choice.resource] = f"{limit}Mi"

    if not pod.get("metadata"):
        yield _add("/metadata", {"annotations": added})
    elif not present:
        yield _add("/metadata/annotations", added)
    else:
        for key, value in added.items():
            yield _add(f"/metadata/annotations/{_escaped(key)}", value)
    for key in dict.fromkeys(key for gpu_request in requests for key in gpu_request.annotations):
        yield {"op": "remove", "path": f"/metadata/annotations/{_escaped(key)}"}


def limit_of(pod: Object, choice: Choice, served: Sequence[tuple[GpuRequest, Choice]]) -> int:
    """Return the MiB that the containers of a choice may use, 0 for its shares alone.

    An annotation names a resource, so that all containers with it have one limit, also one that
    asks for the resource by its name.
    """
    limits = {request.limit for request, other in served if other.resource == choice.resource}
    translated = {request.path for request, _ in served}
    if any(
        choice.resource in amounts_of(container)
        for path, container in containers_of(pod)
        if path not in translated
    ):
        return 0
    return max(limits) if len(limits) == 1 and choice.part.technique == FRACTION else 0


def _scheduler(pod: Object, requests: Iterable[GpuRequest]) -> Iterator[Operation]:
    if scheduler_left_by(pod, requests):
        yield _add("/spec/schedulerName", DEFAULT_SCHEDULER)


def _resources(pod: Object, request: GpuRequest, choice: Choice) -> Iterator[Operation]:
    resources = _resources_of(pod, request)
    if not resources:
        yield _add(f"{request.path}/resources", {"limits": {choice.resource: str(choice.count)}})
        return
    yield from _removed(pod, request, but=choice.resource)
    named = [
        kind for kind in _KINDS if not request.names.keys().isdisjoint(resources.get(kind) or ())
    ]
    for where in named:
        yield _add(_amount(request, where, choice.resource), str(choice.count))
    if "limits" not in named:
        # Kubernetes takes an extended resource in requests only beside the same limit.
        amount = {choice.resource: str(choice.count)}
        if resources.get("limits"):
            yield _add(_amount(request, "limits", choice.resource), str(choice.count))
        else:
            yield _add(f"{request.path}/resources/limits", amount)


def _removed(pod: Object, request: GpuRequest, but: str = "") -> Iterator[Operation]:
    resources = _resources_of(pod, request)
    for where in _KINDS:
        amounts = resources.get(where) or ()
        for name in request.names:
            if name in amounts and name != but:
                yield {"op": "remove", "path": _amount(request, where, name)}


def _resources_of(pod: Object, request: GpuRequest) -> Object:
    *_, kind, index = request.path.split("/")
    found: Object = pod["spec"][kind][int(index)].get("resources") or {}
    return found


def _affinity(spec: Object, expressions: Sequence[Mapping[str, Any]]) -> Iterator[Operation]:
    if not expressions:
        return
    added = [dict(expression) for expression in expressions]
    value: Any = {"nodeSelectorTerms": [{"matchExpressions": added}]}
    path, at = "/spec", spec
    for key in ("affinity", "nodeAffinity", _REQUIRED):
        if not at.get(key):
            for missing in reversed(("affinity", "nodeAffinity", _REQUIRED)):
                if missing == key:
                    break
                value = {missing: value}
            yield _add(f"{path}/{key}", value)
            return
        path, at = f"{path}/{key}", at[key]
    for index, term in enumerate(at.get("nodeSelectorTerms") or ()):  # one of them has to hold
        where = f"{path}/nodeSelectorTerms/{index}/matchExpressions"
        if term.get("matchExpressions"):
            yield from (_add(f"{where}/-", entry) for entry in added)
        elif term.get("matchFields"):
            yield _add(where, added)


def _amount(request: GpuRequest, where: str, name: str) -> str:
    return f"{request.path}/resources/{where}/{_escaped(name)}"


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _add(path: str, value: object) -> Operation:
    return {"op": "add", "path": path, "value": value}


def apply_patch(document: Object, operations: Iterable[Operation]) -> dict[str, Any]:
    """Return a copy of a document with operations of a translation applied to it.

    No two parts of the copy are one, as they are where YAML has an anchor.
    """
    patched: Any = msgspec.to_builtins(document)
    for operation in operations:
        *way, last = map(_unescaped, operation["path"].split("/")[1:])
        at = patched
        for key in way:
            at = at[int(key)] if isinstance(at, list) else at[key]
        if operation["op"] == "remove":
            del at[last]
        elif isinstance(at, list):
            at.append(msgspec.to_builtins(operation["value"]))  # its only index is `-`
        else:
            at[last] = msgspec.to_builtins(operation["value"])
    return dict(patched)


def _unescaped(key: str) -> str:
    return key.replace("~1", "/").replace("~0", "~")


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
    for node_parts in surveyed:
        same_parts = id(node_parts.parts)  # groups with equal parts share them
        if same_parts not in served:
            served[same_parts] = _serves(plan, requests, node_parts)
        if not node_parts.refused and served[same_parts]:
            serving.append(node_parts)
        elif not node_parts.refused or refused_model(annotations, node_parts.node):
            others.append(node_parts)

    found: list[Expression] = []
    if names_model(annotations):
        found.append(_one_of(PRODUCT, [other.node.labels[PRODUCT] for other in serving]))
    for request, choice in zip(requests, plan.choices, strict=True):
        parts = [
            part for other in serving for part in other.parts if part.resource == choice.resource
        ]
        found += [
            operation for operation in _relied_on(request, choice, parts) if operation not in found
        ]
    reached = [other for other in others if _counts(plan, other) and _reaches(found, other)]
    return [*found, *_telling_apart(serving, reached)]


def _relied_on(
    request: GpuRequest, choice: Choice, parts: Sequence[OfferedPart]
) -> Iterator[Expression]:
    """Yield what a number of shares relies on."""
    resource, technique = choice.resource, choice.part.technique
    if request.least:
        yield _above_or_below(GPU_MEMORY, "Gt", request.least - 1)
    if technique in (FRACTION, MPS):
        yield from _of_shares(request, choice, parts)
    elif technique == MIG and not request.memory:  # percents of no larger GPU
        yield _above_or_below(GPU_MEMORY, "Lt", max(part.gpu_memory for part in parts) + 1)
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
        yield _one_of(label("memory"), [str(part.memory) for part in parts])
    if (
        request.memory
        and not threads
        and all(each * part.memory >= request.memory for part in parts)
    ):
        yield _above_or_below(label("replicas"), "Gt", each - 1)
    else:
        yield _one_of(label("replicas"), [str(part.per_gpu) for part in parts])
    if request.count > 1:
        yield _above_or_below(label("gpus"), "Gt", request.count - 1)


def _telling_apart(
    serving: Sequence[NodeParts], others: Sequence[NodeParts]
) -> Iterator[Expression]:
    """Yield what keeps a pod from known nodes that no label of shares tells apart."""
    if not others:
        return
    products = {parts.node.labels.get(PRODUCT) for parts in serving}
    if None in products or products & {parts.node.labels.get(PRODUCT) for parts in others}:
        known = [node for parts in others for node in parts.group.nodes.values()]
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
    return not NodeSelection({}, terms).missing(each.node.name, each.node.labels)


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
