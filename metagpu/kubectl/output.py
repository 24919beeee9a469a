"""Output that the commands share."""

from collections.abc import Sequence

from metagpu.kubectl.viewer import NodeAnswer


def silent_nodes(answers: Sequence[NodeAnswer]) -> Sequence[str]:
    """Return a line for each node that gave no answer."""
    return [f"{it.node}: {it.problem}" for it in answers if it.report is None]
