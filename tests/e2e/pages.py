"""Manifests of the documentation, ready for the node of the tests."""

import re
from typing import Any

import yaml

from tests.e2e.cluster import IDLE_COMMAND, NAMESPACE
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.tools import REPOSITORY

SECTION = re.compile(r"^###? ", re.MULTILINE)
BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WITHOUT_NAMESPACE = ("PriorityClass",)


def page_sections(page: str) -> dict[str, list[str]]:
    """Return the YAML blocks of a page in docs/, by heading; `top` is before the first."""
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    top, *sections = SECTION.split(text)
    return {"top": _blocks(top)} | {
        section.splitlines()[0]: _blocks(section) for section in sections
    }


def _blocks(section: str) -> list[str]:
    """Return the YAML of a section, and of the files that it names."""
    files = re.findall(r"\]\(\.\./(deploy/[\w/-]+\.yaml)\)", section)
    return [*BLOCK.findall(section), *((REPOSITORY / file).read_text() for file in files)]


def manifests(page: str, heading: str) -> dict[str, Document]:
    """Return the objects of a section, by `Kind/name`, in the tests' namespace.

    Their pods have the tests' image, and idle.
    """
    blocks = page_sections(page)[heading]
    objects = [
        document for block in blocks for document in yaml.safe_load_all(block) if "kind" in document
    ]
    return {f"{entry['kind']}/{entry['metadata']['name']}": _ready(entry) for entry in objects}


def _ready(document: Document) -> Document:
    """Return an object with what the tests' node has in place of the page's example."""
    for container in _containers(document):
        container |= {"image": BUSYBOX_IMAGE, "command": IDLE_COMMAND}
        container.pop("args", None)
    if document["kind"] in WITHOUT_NAMESPACE:
        return document
    return {**document, "metadata": {**document["metadata"], "namespace": NAMESPACE}}


def _containers(document: Document) -> list[dict[str, Any]]:
    spec = document.get("spec", {})
    pod = spec.get("template", {}).get("spec", spec)
    return list(pod.get("containers", ()))
