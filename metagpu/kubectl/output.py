"""Output that the commands share."""

from collections.abc import Sequence
from typing import Final

from metagpu.kubectl.viewer import NodeAnswer

_NAMED: Final = 5
"""Nodes that a line names; all are in `-o json`."""


def silent_nodes(answers: Sequence[NodeAnswer]) -> Sequence[str]:
    """Return the nodes that gave no answer, a line for all of one problem."""
    same: dict[str, list[str]] = {}
    for it in answers:
        if it.report is None:
            same.setdefault(it.problem, []).append(it.node)
    return [f"{_named(nodes)}: {problem}" for problem, nodes in same.items()]


def _named(nodes: Sequence[str]) -> str:
    more = len(nodes) - _NAMED
    return ", ".join(nodes[:_NAMED]) + (f" and {more} more" if more > 0 else "")
