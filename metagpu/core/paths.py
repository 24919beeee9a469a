"""Paths to values in a document, as people read them: `pools[0].backends[1].resource`."""

import re
from typing import Any

_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]|\[\"([^\"]*)\"\]")
"""A key, a place in a list, or in quotes a key that has dots or brackets in it."""


def steps(path: str) -> list[int | str]:
    """Take a path apart: the keys of mappings, and the places in lists."""
    return [int(index) if index else quoted or key for key, index, quoted in _STEP.findall(path)]


def value_at(value: Any, path: str) -> Any:  # noqa: ANN401 - YAML holds anything
    """Give what is at a path in a value.

    Raises:
        LookupError: if nothing is there; a key that is no text is not found by its name.
    """
    for step in steps(path):
        value = value[step]
    return value


def joined(path: str, inner: str) -> str:
    """Give the path of what is at `inner` in the value at `path`."""
    return ".".join(part for part in (path, inner) if part).replace(".[", "[")


def below(path: str, key: object) -> str:
    """Give the path of what stands under a key of the mapping at `path`."""
    name = str(key)
    plain = re.fullmatch(r"[^.\[\]\"]+", name)
    return f"{path}.{name}".removeprefix(".") if plain else f'{path}["{name}"]'
