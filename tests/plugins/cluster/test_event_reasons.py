"""The page about the cluster lists every Event that metagpu writes."""

import ast
import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[3]
REASON: Final = re.compile(r"(?:GPU|MIG)[A-Z][A-Za-z]+|(?:[A-Z][a-z]+){2,}")
OTHER: Final = {"CheckHealth", "CheckUsage", "EnforceMemory", "DeleteOptions", "KubeClient"}
"""Actions of Events, and names of types."""
WRITERS: Final = (
    "node_events",
    "pod_events",
    "held_gpus",
    "refusals",
    "janitor",
    "config_follower",
    "driver_upgrade",
)


@pytest.mark.parametrize("module", WRITERS)
def test_every_reason_has_a_row(module: str) -> None:
    """Each reason of an Event is in a table of docs/cluster.md."""
    page = (ROOT / "docs" / "cluster.md").read_text()
    source = (ROOT / "metagpu" / "plugins" / "cluster" / f"{module}.py").read_text()
    constants = {
        it.value
        for it in ast.walk(ast.parse(source))
        if isinstance(it, ast.Constant) and isinstance(it.value, str)
    }
    reasons = {it for it in constants if REASON.fullmatch(it)} - OTHER

    assert reasons
    assert {it for it in reasons if f"`{it}`" not in page} == set()
