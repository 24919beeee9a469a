"""Paths of values in a document, as `pools[0].backends[1].resource`."""

import re
from collections.abc import Collection, Mapping
from typing import Any

_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]|\[\"([^\"]*)\"\]")
"""A key, an index in a list, or in quotes a key with dots or brackets."""


def split_path(path: str) -> list[int | str]:
    """Split a path into the keys of mappings and the indices of lists."""
    return [int(index) if index else quoted or key for key, index, quoted in _STEP.findall(path)]


def value_at(value: Any, path: str) -> Any:  # noqa: ANN401 - YAML holds anything
    """Return the value at a path inside a value.

    Raises:
        LookupError: there is no value; a key that is no string is not found by its name.
    """
    for step in split_path(path):
        value = value[step]
    return value


def join_path(path: str, inner: str) -> str:
    """Return the path of `inner` in the value at `path`."""
    return ".".join(part for part in (path, inner) if part).replace(".[", "[")


def key_path(path: str, key: object) -> str:
    """Return the path of the value under a key of the mapping at `path`."""
    name = str(key)
    plain = re.fullmatch(r"[^.\[\]\"]+", name)
    return f"{path}.{name}".removeprefix(".") if plain else f'{path}["{name}"]'


def parent_path(path: str) -> str:
    """Return the path of the mapping or list around a value."""
    *_, last = [0, *(step.start() for step in _STEP.finditer(path))]
    return path[:last]


def renumber(path: str, removed: Mapping[str, Collection[int]], *, restore: bool) -> str:
    """Return a path as it is without some items of lists, or the way back.

    Args:
        path: a path in the whole document; with `restore`, one in the smaller document.
        removed: the indices of the items that are gone, by the path of their list in the whole.
        restore: whether to return the path in the whole document.
    """
    whole = smaller = ""
    for step in split_path(path):
        if isinstance(step, str):
            whole, smaller = key_path(whole, step), key_path(smaller, step)
            continue
        before = after = step
        for index in sorted(removed.get(whole, ())):
            if restore and index <= before:
                before += 1
            elif not restore and index < step:
                after -= 1
        whole, smaller = f"{whole}[{before}]", f"{smaller}[{after}]"
    return whole if restore else smaller
