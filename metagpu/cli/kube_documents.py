"""Files with objects of Kubernetes, as `kubectl get -o yaml` writes them."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.errors import describe_error

Document = Mapping[str, Any]

_OF_TAGS: Final = (ValueError, LookupError, AttributeError, TypeError)
"""What PyYAML raises for a text that its tag does not fit, such as `!!bool maybe`."""


def read_documents(file: str) -> Sequence[Document]:
    """Read the objects of a manifest and of its Lists, or of stdin for `-`; blocks.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    import yaml

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        problem = f"cannot read {file}: {describe_error(error)}"
        raise ConfigError(problem, ConfigReason.UNREADABLE) from error
    try:
        documents = [it for it in yaml.safe_load_all(text) if it is not None]
        found = list(_objects_in(documents))
    except RecursionError as error:
        problem = f"{file} is no YAML: it is nested too deep"
        raise ConfigError(problem, ConfigReason.NO_YAML) from error
    except (yaml.YAMLError, *_OF_TAGS) as error:
        cause = " ".join(describe_error(error).split())
        raise ConfigError(f"{file} is no YAML: {cause}", ConfigReason.NO_YAML) from error
    if not documents or not all(map(_is_object, found)):
        problem = f"{file}: no objects of Kubernetes; write each with apiVersion and kind"
        raise ConfigError(problem, ConfigReason.UNKNOWN_FORMAT)
    for it in found:
        if not isinstance(it.get("metadata") or {}, dict):
            problem = f"{file}: {it['kind']}: its metadata is no object with a name"
            raise ConfigError(problem, ConfigReason.WRONG_TYPE)
    return found


def _objects_in(documents: Iterable[Any]) -> Iterator[Any]:
    for it in documents:
        listed = _is_object(it) and it["kind"].endswith("List") and it.get("items")
        if isinstance(listed, list):
            yield from _objects_in(listed)
        else:
            yield it


def _is_object(document: object) -> bool:
    return (
        isinstance(document, dict)
        and isinstance(document.get("kind"), str)
        and document["kind"] != ""
    )
