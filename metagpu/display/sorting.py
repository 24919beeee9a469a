"""The order of rows, by a field that the reader names."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from metagpu.core.config.errors import allowed_values
from metagpu.core.errors import MetagpuError

Item = Mapping[str, Any]


class UnknownField(MetagpuError):
    """Raised when rows have no such field."""


def sort_items(items: Sequence[Item], field: str) -> Sequence[Item]:
    """Sort rows by a field: texts from a to z, numbers from the largest, `None` last.

    The field may be one of rows inside rows, as a process of a container: these are sorted too, and
    the first of them counts.

    Raises:
        UnknownField: the rows have no such field.
    """
    known = list(dict.fromkeys(_fields(items)))
    if items and field not in known:
        raise UnknownField(f"--sort-by {field}: {allowed_values(field, known)}")
    return _sorted(items, field)


def _sorted(items: Sequence[Item], field: str) -> Sequence[Item]:
    inside = [
        {name: _sorted(value, field) if _is_rows(value) else value for name, value in item.items()}
        for item in items
    ]
    return sorted(inside, key=lambda item: _key(item, field))


def _key(item: Item, field: str) -> tuple[bool, Any]:
    value = item.get(field)
    if not isinstance(value, (str, int, float)):
        inner = (_key(value[0], field) for value in item.values() if _is_rows(value))
        return min(inner, default=(True, 0))
    return False, value if isinstance(value, str) else -value


def _fields(items: Iterable[Item]) -> Iterator[str]:
    """Yield the names of plain values, those inside rows last."""
    for item in items:
        yield from (name for name, value in item.items() if not isinstance(value, (Mapping, list)))
    for item in items:
        for value in item.values():
            if _is_rows(value):
                yield from _fields(value)


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
