"""Notes about the keys of a foreign file that are not honoured.

A key is honoured if it is a field of the struct that its mapping is decoded as. Every other key
gets a note: a known key with the effect that it would have had, another one as unknown.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final

import msgspec

from metagpu.compat.contract import CompatNote, Origin
from metagpu.core.config.document import Document
from metagpu.core.config.errors import suggest
from metagpu.core.config.paths import key_path

_MAX_NOTES: Final = 100
"""Of one file: each note looks for the nearest known key."""


class IgnoredKey(msgspec.Struct, frozen=True):
    """A known key without an effect in metagpu.

    Attributes:
        would: the effect, as the rest of "it would have …", and its replacement in metagpu.
        harmless: values that have no effect, or the effect that metagpu has anyway.
    """

    would: str
    harmless: tuple[object, ...] = ()

    @property
    def text(self) -> str:
        """The text of the note."""
        return f"has no effect here; it would have {self.would}"

    def is_requested(self, value: object) -> bool:
        """Return whether a value asks for an effect."""
        return value not in (None, "", [], {}) and value not in self.harmless


def fold_case(
    document: Document,
    decoded_as: type,
    ignored: Iterable[str] = (),
    exact: Iterable[type] = (),
) -> None:
    """Spell keys as the struct does, where they differ from it in case alone.

    For formats whose own program takes keys in any case, as Go's JSON and viper do.

    Args:
        document: the file; its keys are renamed.
        decoded_as: the struct that the file is decoded as.
        ignored: the paths of further known keys.
        exact: the structs in it that the program reads in one case, with all below them.
    """
    info, left = msgspec.inspect.type_info(decoded_as), frozenset(exact)
    _fold(Origin(document, ""), document.data, info, frozenset(ignored), left)


def _fold(
    origin: Origin,
    value: object,
    info: msgspec.inspect.Type,
    ignored: frozenset[str],
    exact: frozenset[type],
) -> None:
    if isinstance(info, msgspec.inspect.UnionType):
        for member in info.types:
            _fold(origin, value, member, ignored, exact)
    elif isinstance(info, msgspec.inspect.StructType) and isinstance(value, dict):
        if info.cls in exact:
            return
        fields = {field.encode_name: field.type for field in info.fields}
        siblings = (ignored_key.rpartition(".") for ignored_key in ignored)
        plain = _plain(origin.path)
        known = {*fields, *(key for parent, _, key in siblings if parent == plain)}
        spelling = {key.lower(): key for key in known}
        for key in [key for key in value if isinstance(key, str) and key not in known]:
            right = spelling.get(key.lower())
            if right is not None and right not in value:
                origin.document.rename_key(origin.path, key, right)
        for key in fields.keys() & value.keys():
            here = Origin(origin.document, key_path(origin.path, key))
            _fold(here, value[key], fields[key], ignored, exact)
    elif isinstance(value, list) and (item := getattr(info, "item_type", None)) is not None:
        for number, inner in enumerate(value):
            here = Origin(origin.document, f"{origin.path}[{number}]")
            _fold(here, inner, item, ignored, exact)


def ignored_keys(
    document: Document, decoded_as: type, ignored: Mapping[str, IgnoredKey], path: str = ""
) -> Iterator[CompatNote]:
    """Yield a note for every key below `path` that is not honoured.

    Args:
        document: the file.
        decoded_as: the struct, or list of structs, that the value is decoded as.
        ignored: the known keys, by path without indices and quoted parts.
        path: the start.
    """
    info = msgspec.inspect.type_info(decoded_as)
    notes = _walk(Origin(document, path), document.at(path), info, ignored)
    yield from islice(notes, _MAX_NOTES)
    if next(notes, None) is not None:
        yield Origin(document, path).note(f"has more than {_MAX_NOTES} keys without effect")


def _walk(
    origin: Origin, value: object, info: msgspec.inspect.Type, ignored: Mapping[str, IgnoredKey]
) -> Iterator[CompatNote]:
    if isinstance(info, msgspec.inspect.UnionType):
        for member in info.types:
            yield from _walk(origin, value, member, ignored)
    elif isinstance(info, msgspec.inspect.StructType) and isinstance(value, Mapping):
        fields = {field.encode_name: field.type for field in info.fields}
        for key, inner in value.items():
            here = Origin(origin.document, key_path(origin.path, key))
            if key in fields:
                yield from _walk(here, inner, fields[key], ignored)
            else:
                yield from _note_ignored(here, str(key), inner, fields, ignored)
    elif isinstance(info, msgspec.inspect.DictType) and isinstance(value, Mapping):
        for key, inner in value.items():
            here = Origin(origin.document, key_path(origin.path, key))
            yield from _walk(here, inner, info.value_type, ignored)
    elif isinstance(value, list) and (item := getattr(info, "item_type", None)) is not None:
        for number, inner in enumerate(value):
            here = Origin(origin.document, f"{origin.path}[{number}]")
            yield from _walk(here, inner, item, ignored)


def _note_ignored(
    here: Origin, key: str, value: object, fields: Iterable[str], ignored: Mapping[str, IgnoredKey]
) -> Iterator[CompatNote]:
    plain = _plain(here.path)

    if (known := ignored.get(plain)) is not None:
        if known.is_requested(value):
            yield here.note(known.text)
        return

    parent = plain.rpartition(".")[0]
    siblings = [name.rpartition(".")[2] for name in ignored if name.rpartition(".")[0] == parent]
    names = [*fields, *siblings]
    if right := next((name for name in names if name.lower() == key.lower()), ""):
        yield here.note(f"has no effect: the program takes this key in one case alone: {right}")
    else:
        yield here.note(f"unknown key, has no effect{suggest(key, names)}")


def _plain(path: str) -> str:
    """Return a path without indices and quoted parts."""
    return re.sub(r"\[[^\]]*\]", "", path)
