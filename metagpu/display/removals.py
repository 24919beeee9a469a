"""The table of `metagpu uninstall`, printed for people."""

from collections import Counter
from collections.abc import Sequence

from metagpu.core.contracts.leftovers import Removal, Result
from metagpu.display.status import show
from metagpu.display.table import TextTable


def show_removals(removals: Sequence[Removal], notes: Sequence[str], *, wanted: bool) -> None:
    """Print each leftover with its result; `wanted` is whether to remove it."""
    table = TextTable(("RESULT", "WHAT", "WHERE", "REASON"), folded=frozenset(("WHERE", "REASON")))
    for each in removals:
        style = {Result.REMOVED: "green", Result.STAYS: "yellow"}.get(each.result, "")
        table.add(str(each.result), each.kind, each.where, each.reason, style=style)
    parts: list[TextTable | str] = [table] if removals else ["nothing of metagpu is left here"]
    show(*parts, *notes, _summary(removals, wanted=wanted))


def _summary(removals: Sequence[Removal], *, wanted: bool) -> str:
    counted = Counter(removal.result for removal in removals)
    if not removals:
        return ""
    if not wanted:
        return f"{counted[Result.FOUND]} to remove: run this command again with --yes"
    left = f", {counted[Result.STAYS]} stay" if counted[Result.STAYS] else ""
    return f"{counted[Result.REMOVED]} removed{left}"
