"""Files with objects of Kubernetes, as people and `kubectl get -o` write them."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.errors import describe_error

if TYPE_CHECKING:
    import yaml

Object = Mapping[str, Any]

_OF_TAGS: Final = (ValueError, LookupError, AttributeError, TypeError)
"""What PyYAML raises for a text that its tag does not fit, such as `!!bool maybe`."""
_MEANINGS: Final = {"found unconstructable recursive node": "a value contains itself"}


class KubeDocument(msgspec.Struct, frozen=True):
    """An object of Kubernetes in a file.

    Attributes:
        file: the name of the file, `-` for stdin.
        place: where it is in the file, as `document 2, items[0]`; empty documents count.
        value: the object; it has a kind, and its metadata is an object or absent.
        line: the line that it begins with, 0 in JSON.
    """

    file: str
    place: str
    value: Object
    line: int = 0

    def error(self, problem: str, reason: ConfigReason) -> ConfigError:
        """Return the error for a problem of this object."""
        return ConfigError(problem, reason, file=self.file, line=self.line, path=self.place)


def read_documents(file: str) -> Sequence[KubeDocument]:
    """Read the objects of a YAML or JSON file, `-` for stdin; blocks.

    Lists give their objects.

    Raises:
        ConfigError: it cannot be read, or has something else, or nothing.
    """
    documents = [
        numbered
        for numbered in enumerate(_parse(_read(file), file), 1)
        if numbered[1][0] is not None
    ]
    if not documents:
        problem = "no objects of Kubernetes; write each with apiVersion and kind"
        raise ConfigError(problem, ConfigReason.UNKNOWN_FORMAT, file=file)
    return [
        found
        for at, (value, node) in documents
        for found in _objects_in(KubeDocument(file, f"document {at}", value, _line(node)), node)
    ]


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        cause = "not UTF-8 text" if isinstance(error, UnicodeError) else describe_error(error)
        raise ConfigError(f"cannot be read: {cause}", ConfigReason.UNREADABLE, file=file) from error


def _line(node: "yaml.Node | None") -> int:
    return node.start_mark.line + 1 if node else 0


def _parse(text: str, file: str) -> "Sequence[tuple[Any, yaml.Node | None]]":
    """Return the documents of a text with their nodes; an empty one is `None`.

    Raises:
        ConfigError: it is neither JSON nor YAML.
    """
    import yaml  # noqa: PLC0415 - for files alone

    from metagpu.compat.kube_yaml import load_documents  # noqa: PLC0415 - as above

    found: list[tuple[Any, yaml.Node | None]] = []
    try:
        with suppress(ValueError):  # a list of nodes as JSON takes YAML a hundred times as long
            return [(json.loads(text), None)]
        found.extend(load_documents(text))
    except RecursionError as error:
        problem = "no YAML: it is nested too deep"
        raise ConfigError(problem, ConfigReason.NO_YAML, file=file) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        problem = f"no YAML: {_MEANINGS.get(str(error.problem), error.problem)}"
        raise ConfigError(problem, ConfigReason.NO_YAML, file=file, line=line) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"no YAML: it has the control character #x{error.character:04x}"
        raise ConfigError(problem, ConfigReason.NO_YAML, file=file, line=line) from error
    except _OF_TAGS as error:
        problem = f"no YAML: {' '.join(describe_error(error).split())}"
        place = f"document {len(found) + 1}"
        raise ConfigError(problem, ConfigReason.NO_YAML, file=file, path=place) from error
    return found


def _listed(value: Object) -> Sequence[Any] | None:
    """Return the objects of a list; a custom kind may have other `items`."""
    found = value.get("items")
    if not isinstance(found, list):
        return None
    of_objects = all(
        isinstance(each, dict) and {"kind", "apiVersion"} <= each.keys() for each in found
    )
    return found if value.get("apiVersion", "v1") == "v1" or (found and of_objects) else None


def _objects_in(document: KubeDocument, node: "yaml.Node | None") -> Iterator[KubeDocument]:
    """Yield an object, or those of a List.

    Raises:
        ConfigError: one is no object of Kubernetes.
    """
    kind = document.value.get("kind") if isinstance(document.value, dict) else None
    if not isinstance(kind, str) or not kind:
        problem = "no object of Kubernetes; write it with apiVersion and kind"
        raise document.error(problem, ConfigReason.UNKNOWN_FORMAT)
    if kind.endswith("List") and (listed := _listed(document.value)) is not None:
        from metagpu.compat.kube_yaml import items_of  # noqa: PLC0415 - for lists alone

        nodes = chain(items_of(node), repeat(None))  # none for JSON
        for at, (each, below) in enumerate(zip(listed, nodes, strict=False)):
            place = f"{document.place}, items[{at}]"
            yield from _objects_in(KubeDocument(document.file, place, each, _line(below)), below)
        return
    if not isinstance(document.value.get("metadata") or {}, dict):
        problem = f"{kind}: its metadata is not an object with a name"
        raise document.error(problem, ConfigReason.WRONG_TYPE)
    yield document
