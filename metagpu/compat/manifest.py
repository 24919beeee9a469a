"""ConfigMaps as files, from `kubectl get -o yaml` or for `kubectl apply`.

Each key of `data` is a file of its own; its line numbers are those of the manifest. Other objects
of the manifest are left out, and named.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from metagpu.compat.contract import CompatNote, Origin
from metagpu.compat.formats import recognize
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.config.paths import join_path, key_path

_MAX_DOCUMENTS: Final = 200
"""Of one file; with more it is read as one document, and refused."""

Texts = Mapping[str, tuple[str, int]]
"""Files of ConfigMaps by name: each with its text and its first line."""


class Manifest(msgspec.Struct, frozen=True):
    """The files in a manifest's ConfigMaps, and notes about its other objects."""

    texts: Texts
    rest: tuple[CompatNote, ...] = ()


def split_documents(text: str) -> list[tuple[str, int]]:
    """Split a stream of YAML documents into texts, each with its first line.

    Empty ones are left out. Three dashes at the begin of a line always begin a document.
    """
    parts: list[tuple[list[str], int]] = [([], 1)]
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r"---(\s|$)", line):
            parts.append(([], number))
        parts[-1][0].append(line)
    full = [("\n".join(lines), first) for lines, first in parts if any(map(_says_something, lines))]
    return full if len(full) <= _MAX_DOCUMENTS else [(text, 1)]


def read(documents: Sequence[Document]) -> Manifest | None:
    """Return the files in a manifest's ConfigMaps, `None` for no manifest.

    Of several ConfigMaps, the keys that are configurations count.

    Raises:
        ConfigError: a ConfigMap has no file, two have a file of one name, or there is none.
    """
    objects = [each for document in documents for each in _objects(Origin(document, ""))]
    if not objects or not all(map(_is_object, objects)):
        return None
    maps = [each for each in objects if _kind(each) == "ConfigMap"]
    rest = [each.note(_left_out(each)) for each in objects if each not in maps]
    if not maps:
        first = objects[0]
        problem = "there is no ConfigMap in this manifest; add one"
        raise first.document.error(first.path, problem, ConfigReason.UNKNOWN_FORMAT)

    found: dict[str, tuple[str, int]] = {}
    for each in maps:
        for name, (text, line) in _texts(each).items():
            place = Origin(each.document, key_path(join_path(each.path, "data"), name))
            if len(maps) > 1 and not _is_configuration(text):
                rest.append(place.note("is no configuration, and is left out"))
            elif name in found:
                problem = f"another ConfigMap of this manifest has {name} too; keep one of them"
                raise place.document.error(place.path, problem, ConfigReason.GIVEN_TWICE)
            else:
                found[name] = text, line
    return Manifest(found, tuple(rest))


def _says_something(line: str) -> bool:
    return re.match(r"[ \t]*(#|$|---[ \t]*(#|$))", line) is None


def _objects(origin: Origin) -> Iterator[Origin]:
    """Yield an object, or the items of a list of objects."""
    value = _value(origin)
    if isinstance(value, dict) and str(value.get("kind")).endswith("List"):
        for number, _ in enumerate(value.get("items") or ()):
            yield from _objects(Origin(origin.document, join_path(origin.path, f"items[{number}]")))
    else:
        yield origin


def _is_object(origin: Origin) -> bool:
    value = _value(origin)
    return isinstance(value, dict) and "apiVersion" in value


def _kind(origin: Origin) -> str:
    return str(_value(origin).get("kind", "ConfigMap"))


def _left_out(origin: Origin) -> str:
    metadata = _value(origin).get("metadata")
    name = metadata.get("name", "") if isinstance(metadata, dict) else ""
    return f"{_kind(origin)} {name}".strip() + " is no ConfigMap, and is left out"


def _texts(origin: Origin) -> Texts:
    document, place = origin.document, join_path(origin.path, "data")
    data = _value(origin).get("data")
    if not isinstance(data, dict) or not data:
        problem = "there is no file in this ConfigMap; each key of `data` is one"
        raise document.error(place, problem, ConfigReason.MISSING)

    found = {}
    for name, text in data.items():
        path = key_path(place, name)
        if not isinstance(text, str):
            problem = "not a text; write `|` after the colon"
            raise document.error(path, problem, ConfigReason.WRONG_TYPE)
        # The text of a block begins below its `|`; other texts stand where their key does.
        found[str(name)] = (text, document.line(path) + ("\n" in text))
    return found


def _is_configuration(text: str) -> bool:
    try:
        recognize(Document(text, ""))
    except ConfigError:
        return False
    return True


def _value(origin: Origin) -> Any:  # noqa: ANN401 - YAML holds anything
    return origin.document.at(origin.path)
