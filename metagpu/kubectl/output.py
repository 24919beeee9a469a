"""Output that the commands share."""

import json
from collections.abc import Sequence
from typing import Any

from metagpu.kubectl.viewer import NodeAnswer


def encode(value: Any, form: str, *, compact: bool = False) -> str:  # noqa: ANN401 - any JSON
    """Return a value as JSON or YAML; `compact` is for a series."""
    if form == "json":
        return json.dumps(value, indent=None if compact else 2) + "\n"
    import yaml

    text: str = yaml.safe_dump(value, sort_keys=False)
    return f"---\n{text}" if compact else text


def silent_nodes(answers: Sequence[NodeAnswer]) -> Sequence[str]:
    """Return a line for each node that gave no answer."""
    return [f"{it.node}: {it.problem}" for it in answers if it.report is None]
