"""Output for programs: JSON and YAML."""

import json
from typing import Any, Final

from msgspec import to_builtins

FORMATS: Final = ("table", "json", "yaml")
"""The formats of `-o`; the first is for people."""
WIDE_FORMATS: Final = ("table", "wide", "json", "yaml")
LIST_FORMATS: Final = (*WIDE_FORMATS, "name")


def encode(value: object, form: str, *, compact: bool = False) -> str:
    """Return a report or plain data as JSON or YAML.

    `compact` is for a series of values: JSON is one line, YAML one document.
    """
    plain: Any = to_builtins(value)
    if form == "json":
        return json.dumps(plain, indent=None if compact else 2) + "\n"
    import yaml  # noqa: PLC0415 - tables need no YAML

    text: str = yaml.safe_dump(plain, sort_keys=False)
    return f"---\n{text}" if compact else text
