"""The JSON Patch that replaces a request."""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from metagpu.translation.annotations import (
    GPUS_PREFIX,
    ORIGINAL,
    annotations_of,
    original_request,
)
from metagpu.translation.choices import Choice
from metagpu.translation.parts import FRACTION, MPS
from metagpu.translation.requests import GpuRequest
from metagpu.translation.values import Object

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
        *(it for request, choice in served for it in _resources(pod, request, choice)),
        *(it for request in released for it in _removed(pod, request)),
        *_affinity(pod.get("spec") or {}, expressions),
    )


def _annotations(
    pod: Object, served: Iterable[tuple[GpuRequest, Choice]], released: Iterable[GpuRequest]
) -> Iterator[Operation]:
    present = annotations_of(pod)
    requests = (*(request for request, _ in served), *released)
    original = {**original_request(pod), **{it.container: dict(it.names) for it in requests}}
    added = {ORIGINAL: _json(original)}
    for request, choice in served:
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
    resources = _resources_of(pod, request)
    yield from _removed(pod, request, but=choice.resource)
    named = [it for it in _KINDS if not request.names.keys().isdisjoint(resources.get(it) or ())]
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
    found: Object = pod["spec"][kind][int(index)]["resources"]
    return found


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
