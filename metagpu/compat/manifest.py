"""ConfigMaps as files: `kubectl get -o yaml`, or what `kubectl apply` was given.

Each key of `data` is a file of its own; its lines are those of the manifest.
"""

from collections.abc import Mapping
from typing import Any

from metagpu.core.document import Document
from metagpu.core.paths import below


def is_manifest(document: Document) -> bool:
    """Tell whether a document is a ConfigMap, named so or recognisable by its keys."""
    data = document.data
    return (
        isinstance(data, dict)
        and "apiVersion" in data
        and data.get("kind", "ConfigMap") == "ConfigMap"
    )


def texts(document: Document) -> Mapping[str, tuple[str, int]]:
    """Give the files of a ConfigMap by name: each with its text and its first line.

    Raises:
        ConfigError: if `data` is no mapping of names to texts, or empty.
    """
    data: Any = document.data.get("data")
    if not isinstance(data, dict) or not data:
        problem = "there is no file in this ConfigMap; each key of `data` is one"
        raise document.error("data", problem)

    found = {}
    for name, text in data.items():
        path = below("data", name)
        if not isinstance(text, str):
            raise document.error(path, "not a text; write `|` after the colon")
        # The text of a block begins below its `|`; other texts stand where their key does.
        found[str(name)] = (text, document.line(path) + ("\n" in text))
    return found
