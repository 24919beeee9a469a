"""Manifests in files: their documents, and the pods in them."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.kubectl.pod_shape import check_pod

_TEMPLATES: Final[Mapping[str, tuple[str, ...]]] = {
    "Pod": (),
    "PodTemplate": ("template",),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
"""Where the pod of a manifest is, by its kind; elsewhere it is `spec.template`."""


def read_documents(name: str) -> Sequence[Any]:
    """Read the documents of a YAML or JSON file, or of stdin for `-`; blocks.

    Raises:
        MetagpuError: the file cannot be read.
    """
    import yaml

    from metagpu.kubectl.manifest_yaml import load_documents

    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        with suppress(ValueError):  # a list of nodes as JSON takes YAML a hundred times as long
            return [json.loads(text)]
        return list(load_documents(text))
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read: {error}"
        raise ConfigError(problem, ConfigReason.UNREADABLE, file=name) from error
    except yaml.YAMLError as error:
        problem = f"no YAML: {' '.join(str(error).split())}"
        raise ConfigError(problem, ConfigReason.NO_YAML, file=name) from error


def objects_in(documents: Sequence[Any], file: str) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a manifest, those of its Lists too.

    Raises:
        MetagpuError: a document is no object of Kubernetes, or its pod none.
    """
    for document in documents:
        if document is None:  # between two `---`
            continue
        if not isinstance(document, Mapping) or not isinstance(document.get("kind"), str):
            problem = "no Kubernetes object; write one with apiVersion and kind"
            raise ConfigError(problem, ConfigReason.UNKNOWN_FORMAT, file=file)
        if document["kind"].endswith("List") and isinstance(document.get("items"), list):
            yield from objects_in(document["items"], file)
        else:
            _check(document, file)
            yield document


def name_of(document: Mapping[str, Any]) -> str:
    """Return the kind and the name of an object, for sentences."""
    metadata = document.get("metadata") or {}
    name = metadata.get("name") or metadata.get("generateName") or ""
    return f"{document['kind']} {name}".strip()


def _check(document: Mapping[str, Any], file: str) -> None:
    if not isinstance(document.get("metadata") or {}, Mapping):
        problem = f"{document['kind']}: its metadata is no object with a name"
        raise ConfigError(problem, ConfigReason.WRONG_TYPE, file=file)
    pod = pod_at(document, template_path(document))
    try:
        if pod is not None:
            check_pod(pod)
    except ValueError as error:
        problem = f"{name_of(document)}: not as a pod has it: {error}"
        raise ConfigError(problem, ConfigReason.INVALID_VALUE, file=file) from error


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
