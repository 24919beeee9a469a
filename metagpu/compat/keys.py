"""Which keys of a foreign file are honoured, and what is said of the others.

A key is honoured if it is a field of the struct that its mapping is read as. All others are noted:
those that are known with what they would have done, the rest as unknown.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from metagpu.compat.contract import Note, Origin
from metagpu.core.document import Document
from metagpu.core.paths import below
from metagpu.core.spelling import hint


class Unheeded(msgspec.Struct, frozen=True):
    """A key that is understood and has no place here.

    Attributes:
        would: what it would have done, said after these words, and what there is instead.
        harmless: values that ask for nothing, or for what is so anyway.
    """

    would: str
    harmless: tuple[object, ...] = ()

    @property
    def text(self) -> str:
        """What an operator reads."""
        return f"has no effect here; it would have {self.would}"

    def asks(self, value: object) -> bool:
        """Tell whether a value asks for something at all."""
        return value not in (None, "", [], {}) and value not in self.harmless


def noted(
    document: Document, wanted: type, unheeded: Mapping[str, Unheeded], path: str = ""
) -> Iterator[Note]:
    """Find every key below `path` that is not honoured when that is read as a `wanted`.

    Args:
        document: the file.
        wanted: the struct, or list of structs, as which the value is read.
        unheeded: by path without places in lists and without what stands in quotes.
        path: where to begin.
    """
    info = msgspec.inspect.type_info(wanted)
    yield from _walk(Origin(document, path), document.at(path), info, unheeded)


def _walk(
    origin: Origin, value: object, info: msgspec.inspect.Type, unheeded: Mapping[str, Unheeded]
) -> Iterator[Note]:
    if isinstance(info, msgspec.inspect.UnionType):
        for member in info.types:
            yield from _walk(origin, value, member, unheeded)
    elif isinstance(info, msgspec.inspect.StructType) and isinstance(value, Mapping):
        fields = {field.encode_name: field.type for field in info.fields}
        for key, inner in value.items():
            here = Origin(origin.document, below(origin.path, key))
            if key in fields:
                yield from _walk(here, inner, fields[key], unheeded)
            else:
                yield from _other(here, str(key), inner, fields, unheeded)
    elif isinstance(info, msgspec.inspect.DictType) and isinstance(value, Mapping):
        for key, inner in value.items():
            here = Origin(origin.document, below(origin.path, key))
            yield from _walk(here, inner, info.value_type, unheeded)
    elif isinstance(value, list) and (item := getattr(info, "item_type", None)) is not None:
        for number, inner in enumerate(value):
            here = Origin(origin.document, f"{origin.path}[{number}]")
            yield from _walk(here, inner, item, unheeded)


def _other(
    here: Origin, key: str, value: object, fields: Iterable[str], unheeded: Mapping[str, Unheeded]
) -> Iterator[Note]:
    plain = re.sub(r"\[[^\]]*\]", "", here.path)

    if (known := unheeded.get(plain)) is not None:
        if known.asks(value):
            yield here.note(known.text)
        return

    parent = plain.rpartition(".")[0]
    siblings = [name.rpartition(".")[2] for name in unheeded if name.rpartition(".")[0] == parent]
    yield here.note(f"unknown key, has no effect{hint(key, [*fields, *siblings])}")
