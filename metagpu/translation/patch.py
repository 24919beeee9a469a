"""The JSON Patch that replaces a request."""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from metagpu.translation.choices import Choice
from metagpu.translation.parts import FRACTION, MPS
from metagpu.translation.plans import Plan, annotations_of
from metagpu.translation.requests import GpuRequest
from metagpu.translation.values import Object

ORIGINAL: Final = "metagpu.io/original-request"
"""The annotation with the request as the pod had it, by container."""
GPUS_PREFIX: Final = "gpus.metagpu.io/"
"""The annotation of a container: the number of GPUs that its shares are divided over."""
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"

Operation = dict[str, Any]


def operations_for(
    pod: Object,
    plan: Plan,
    requests: Sequence[GpuRequest],
    expressions: Sequence[Mapping[str, Any]],
) -> tuple[Operation, ...]:
    """Return the operations that turn a pod into one that asks for a plan's resources."""
    return (
        *_annotations(pod, plan, requests),
        *(
            operation
            for request, choice in zip(requests, plan.choices, strict=True)
            for operation in _resources(pod, request, choice)
        ),
        *_affinity(pod.get("spec") or {}, expressions),
    )


def _annotations(pod: Object, plan: Plan, requests: Sequence[GpuRequest]) -> Iterator[Operation]:
    present = annotations_of(pod)
    try:
        original = dict(json.loads(present.get(ORIGINAL) or "{}"))
    except (ValueError, TypeError):
        original = {}  # a value that nobody of ours wrote
    original |= {request.container: dict(request.names) for request in requests}
    added = {ORIGINAL: json.dumps(original, sort_keys=True)}
    for request, choice in zip(requests, plan.choices, strict=True):
        divided = choice.part.technique in (FRACTION, MPS)
        if request.count > 1 and divided and not request.whole:
            added[GPUS_PREFIX + request.container] = str(request.count)

    if not pod.get("metadata"):
        yield _add("/metadata", {"annotations": added})
    elif not present:
        yield _add("/metadata/annotations", added)
    else:
        for key, value in added.items():
            yield _add(f"/metadata/annotations/{_escaped(key)}", value)


def _resources(pod: Object, request: GpuRequest, choice: Choice) -> Iterator[Operation]:
    *_, kind, index = request.path.split("/")
    resources = pod["spec"][kind][int(index)]["resources"]
    for where in ("limits", "requests"):
        amounts = resources.get(where) or {}
        replaced = [name for name in request.names if name in amounts]
        for name in replaced:
            if name != choice.resource:
                yield {"op": "remove", "path": _amount(request, where, name)}
        if replaced:
            yield _add(_amount(request, where, choice.resource), str(choice.count))
    if not any(name in (resources.get("limits") or {}) for name in request.names):
        # Kubernetes takes an extended resource in requests only beside the same limit.
        amount = {choice.resource: str(choice.count)}
        if resources.get("limits"):
            yield _add(_amount(request, "limits", choice.resource), str(choice.count))
        else:
            yield _add(f"{request.path}/resources/limits", amount)


def _affinity(spec: Object, expressions: Sequence[Mapping[str, Any]]) -> Iterator[Operation]:
    if not expressions:
        return
    added = [dict(it) for it in expressions]
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
            yield from (_add(f"{where}/-", it) for it in added)
        elif term.get("matchFields"):
            yield _add(where, added)


def _amount(request: GpuRequest, where: str, name: str) -> str:
    return f"{request.path}/resources/{where}/{_escaped(name)}"


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _add(path: str, value: object) -> Operation:
    return {"op": "add", "path": path, "value": value}


def apply_patch(document: Object, operations: Iterable[Operation]) -> dict[str, Any]:
    """Return a copy of a document with operations of a translation applied to it."""
    patched: Any = copy.deepcopy(dict(document))
    for operation in operations:
        *way, last = map(_unescaped, operation["path"].split("/")[1:])
        at = patched
        for key in way:
            at = at[int(key)] if isinstance(at, list) else at[key]
        if operation["op"] == "remove":
            del at[last]
        elif isinstance(at, list):
            at.append(copy.deepcopy(operation["value"]))  # its only index is `-`
        else:
            at[last] = copy.deepcopy(operation["value"])
    return dict(patched)


def _unescaped(key: str) -> str:
    return key.replace("~1", "/").replace("~0", "~")
