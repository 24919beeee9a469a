"""Manifests: the objects in files, and the pods in them, whose shape is checked."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from metagpu.cli.kube_documents import KubeDocument, read_documents
from metagpu.core.config.errors import ConfigReason

_Amounts = dict[str, str | float | None]


class _ClaimEntry(msgspec.Struct):
    name: str = ""


class _Resources(msgspec.Struct):
    limits: _Amounts | None = None
    requests: _Amounts | None = None
    claims: list[_ClaimEntry] | None = None


class _Container(msgspec.Struct):
    name: str = ""
    resources: _Resources | None = None


class _Expression(msgspec.Struct):
    key: str
    operator: str
    values: list[str] | None = None


class _Term(msgspec.Struct, rename="camel"):
    match_expressions: list[_Expression] | None = None
    match_fields: list[_Expression] | None = None


class _Required(msgspec.Struct, rename="camel"):
    node_selector_terms: list[_Term] | None = None


class _NodeAffinity(msgspec.Struct):
    required: _Required | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class _Affinity(msgspec.Struct, rename="camel"):
    node_affinity: _NodeAffinity | None = None


class _Toleration(msgspec.Struct):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None


class _Spec(msgspec.Struct, rename="camel"):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    resource_claims: list[_ClaimEntry] | None = None
    node_selector: dict[str, str] | None = None
    node_name: str | None = None
    affinity: _Affinity | None = None
    tolerations: list[_Toleration] | None = None


class _PodMetadata(msgspec.Struct):
    annotations: dict[str, str | None] | None = None


class _Pod(msgspec.Struct):
    spec: _Spec
    metadata: _PodMetadata | None = None


def check_pod(pod: Mapping[str, Any]) -> None:
    """Check the shape of a pod.

    Raises:
        ValueError: a value has another type than Kubernetes has for it; the text says where.
    """
    msgspec.convert(pod, _Pod)


_TEMPLATES: Final[Mapping[str, tuple[str, ...]]] = {
    "Pod": (),
    "PodTemplate": ("template",),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
"""Where the pod of a manifest is, by its kind; elsewhere it is `spec.template`."""


def read_objects(file: str) -> Sequence[KubeDocument]:
    """Read the objects of a file and check the pods in them; blocks.

    Raises:
        MetagpuError: the file cannot be read, has no objects of Kubernetes, or a pod is none.
    """
    found = read_documents(file)
    for it in found:
        pod = pod_at(it.value, template_path(it.value))
        try:
            if pod is not None:
                check_pod(pod)
        except ValueError as error:
            problem = f"{name_of(it.value)}: not as a pod has it: {error}"
            raise it.error(problem, ConfigReason.INVALID_VALUE) from error
    return found


def name_of(document: Mapping[str, Any]) -> str:
    """Return the kind and the name of an object, for sentences."""
    metadata = document.get("metadata") or {}
    name = metadata.get("name") or metadata.get("generateName") or ""
    return f"{document['kind']} {name}".strip()


def template_path(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the way to the pod of an object that has one, by its kind."""
    return _TEMPLATES.get(document["kind"], ("spec", "template"))


def pod_at(document: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the pod or pod template of an object, `None` where it has none."""
    pod: Any = document
    for key in path:
        pod = pod.get(key) if isinstance(pod, Mapping) else None
    if not isinstance(pod, Mapping) or not isinstance(pod.get("spec"), Mapping):
        return None
    return pod
