"""Places of pods in objects: Pods, templates of workloads, custom resources."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Final

import msgspec

Object = Mapping[str, Any]
Keys = tuple[str | int, ...]

_BY_KIND: Final[Mapping[str, Keys]] = {
    "Pod": (),
    "PodTemplate": ("template",),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
"""Where the pod of Kubernetes' own kinds is; of others it is `spec.template`, or found."""

_COMPONENTS: Final = (("spec", "predictor"), ("spec", "transformer"), ("spec", "explainer"))
_WORKLOADS: Final = tuple(
    ("spec", *inside, name) for inside in ((), ("prefill",)) for name in ("template", "worker")
)
_KSERVE: Final[Mapping[str, tuple[Sequence[Keys], int]]] = {
    "InferenceService": (_COMPONENTS, 0),
    "ServingRuntime": ((("spec",),), 0),
    "ClusterServingRuntime": ((("spec",),), 0),
    "LLMInferenceService": (_WORKLOADS, 1),
    "LLMInferenceServiceConfig": (_WORKLOADS, 1),
}
"""KServe's pod specs without a template, and how far above each its pod's annotations are."""
_KSERVE_GROUP: Final = "serving.kserve.io/"
_KSERVE_CONTAINER: Final = "kserve-container"
"""The container that KServe makes of a `model`."""


class PodPlace(msgspec.Struct, frozen=True):
    """The place of one pod in an object.

    Attributes:
        path: the keys to the pod or its template, or to its spec if it has no template.
        annotated: the keys to the object with the annotations of a spec's pod; `None` for a pod or
            template, which has its own.
    """

    path: Keys
    annotated: Keys | None = None

    @property
    def text(self) -> str:
        """The path as people write it."""
        return path_text(self.path)

    def pod(self, document: Object) -> Object:
        """Return the pod."""
        found: Object = value_at(document, self.path)
        if self.annotated is None:
            return found
        annotations = value_at(document, self.annotated).get("annotations")
        models = _models(found)
        spec = {key: value for key, value in found.items() if key not in models}
        made = [_container(found[key]) for key in models]
        spec["containers"] = [*made, *(found.get("containers") or ())]
        return {"metadata": {"annotations": annotations}, "spec": spec}

    def replaced(self, document: Object, pod: Object) -> Object:
        """Return a copy of an object with another pod in this place."""
        if self.annotated is None:
            return with_value(document, self.path, pod)
        spec = value_at(document, self.path)
        models, containers = _models(spec), pod["spec"]["containers"]
        changed = {
            **spec,
            **{key: value for key, value in pod["spec"].items() if key != "containers"},
        }
        for key, container in zip(models, containers, strict=False):
            if "resources" in container:
                changed[key] = {**spec[key], "resources": container["resources"]}
        if "containers" in spec:
            changed["containers"] = containers[len(models) :]
        changed_document = with_value(document, self.path, changed)
        if annotations := (pod.get("metadata") or {}).get("annotations"):
            holder = {**value_at(changed_document, self.annotated), "annotations": annotations}
            changed_document = with_value(changed_document, self.annotated, holder)
        return changed_document


def path_text(path: Keys) -> str:
    """Return a path as people write it, such as `spec.tasks[0].template`."""
    parts = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(parts).removeprefix(".")


def places_in(document: Object) -> Sequence[PodPlace]:
    """Return where an object has pods, in their order."""
    if str(document.get("apiVersion")).startswith(_KSERVE_GROUP) and document["kind"] in _KSERVE:
        paths, above = _KSERVE[document["kind"]]
        found = [(path, value_at(document, path)) for path in paths]
        return [
            PodPlace(path, path[: len(path) - above])
            for path, spec in found
            if isinstance(spec, Mapping) and (_named(spec.get("containers")) or _models(spec))
        ]
    known = _BY_KIND.get(document["kind"], ("spec", "template"))

    def is_pod(path: Keys, value: Any) -> bool:  # noqa: ANN401 - any value of YAML
        if path == known:
            return isinstance(value, Mapping) and isinstance(value.get("spec"), Mapping)
        return bool(path) and _holds_pod(value)

    return [PodPlace(path) for path, value in _walk(document, is_pod) if is_pod(path, value)]


def values_outside(document: Object, places: Sequence[PodPlace]) -> Iterator[tuple[Keys, Any]]:
    """Yield each value of an object outside its pods and its status, with its path."""
    inside = {place.path for place in places}
    for path, value in _walk(document, lambda path, _: path in inside):
        if path not in inside:
            yield path, value


def _walk(document: Object, ends: Callable[[Keys, Any], bool]) -> Iterator[tuple[Keys, Any]]:
    """Yield the values of an object in order, none inside those where it ends."""
    waiting: list[tuple[Keys, Any]] = [((), document)]
    while waiting:
        path, value = waiting.pop()
        if path != ("status",):
            yield path, value
            if not ends(path, value):
                waiting += reversed(list(_children(path, value)))


def _children(path: Keys, value: object) -> Iterator[tuple[Keys, Any]]:
    if isinstance(value, Mapping):
        yield from (((*path, key), inner) for key, inner in value.items())
    elif isinstance(value, list):
        yield from (((*path, index), inner) for index, inner in enumerate(value))


def _holds_pod(value: object) -> bool:
    """Return whether a value is a template: its spec has named containers."""
    spec = value.get("spec") if isinstance(value, Mapping) else None
    return isinstance(spec, Mapping) and _named(spec.get("containers"))


def _named(containers: object) -> bool:
    return (
        isinstance(containers, list)
        and bool(containers)
        and all(
            isinstance(container, Mapping) and isinstance(container.get("name"), str)
            for container in containers
        )
    )


def _models(spec: Object) -> Sequence[str]:
    """Return the keys of a spec that KServe makes its container of, such as `model`."""
    return [
        key
        for key, value in spec.items()
        if isinstance(value, Mapping) and (key == "model" or "resources" in value)
    ]


def _container(model: Object) -> Object:
    kept = {"resources": model["resources"]} if "resources" in model else {}
    return {"name": _KSERVE_CONTAINER, **kept}


def value_at(document: Object, path: Keys) -> Any:  # noqa: ANN401 - any value of YAML
    """Return the value at a path, `None` where there is none."""
    found: Any = document
    for key in path:
        if isinstance(key, int):
            found = found[key]
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found


def with_value(document: Object, path: Keys, value: object) -> Object:
    """Return a copy of an object with another value at a path."""
    found: Any = _replaced(document, path, value)
    return dict(found)


def _replaced(at: Any, path: Keys, value: object) -> object:  # noqa: ANN401 - any value of YAML
    if not path:
        return value
    copied = copy(at)
    copied[path[0]] = _replaced(at[path[0]], path[1:], value)
    return copied
