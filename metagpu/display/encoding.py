"""Output for programs: JSON and YAML."""

import json
from typing import Any, Final

FORMATS: Final = ("table", "json", "yaml")
"""The formats of `-o`; the first is for people."""
WIDE_FORMATS: Final = ("table", "wide", "json", "yaml")


def encode(value: Any, form: str, *, compact: bool = False) -> str:  # noqa: ANN401 - any JSON
    """Return a value as JSON or YAML.

    `compact` is for a series of values: JSON is one line, YAML one document.
    """
    if form == "json":
        return json.dumps(value, indent=None if compact else 2) + "\n"
    import yaml  # noqa: PLC0415 - tables need no YAML

    text: str = yaml.safe_dump(value, sort_keys=False)
    return f"---\n{text}" if compact else text
