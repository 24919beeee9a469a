"""Output that the commands share."""

from collections.abc import Sequence

from metagpu.kubectl.viewer import NodeAnswer


def silent_nodes(answers: Sequence[NodeAnswer]) -> Sequence[str]:
    """Return the nodes that gave no answer, a line for all of one problem."""
    same: dict[str, list[str]] = {}
    for it in answers:
        if it.report is None:
            same.setdefault(it.problem, []).append(it.node)
    return [
        f"{nodes[0]}{f' and {len(nodes) - 1} more' if len(nodes) > 1 else ''}: {problem}"
        for problem, nodes in same.items()
    ]
