"""Manifests: the objects in files, and the pods in them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from metagpu.cli.kube_documents import KubeDocument, read_documents
from metagpu.core.config.errors import ConfigReason
from metagpu.kubectl.pod_shape import check_pod

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
