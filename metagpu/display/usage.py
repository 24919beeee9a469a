"""The output of `mgctl`, on the node and in containers, in each format."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from metagpu.display import usage_tables
from metagpu.display.encoding import encode
from metagpu.display.sorting import sort_items
from metagpu.display.table import Terminal, render
from metagpu.display.usage_tables import Answer

TABLES: Final = ("table", "wide")
KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "devices": ("device", "d", "gpus", "gpu"),
    "processes": ("process", "p"),
    "pods": ("pod", "po"),
}
"""The objects of `get`, and their other names."""

TOP: Final = "top"
"""The kind of all that `top` shows, for programs."""
_SORTED: Final = {
    "devices": ("gpus",),
    "processes": ("containers", "unauthorized"),
    "pods": ("containers",),
    TOP: ("containers", "unauthorized"),
}
"""The rows of each kind."""
_DRAW: Final = {
    "devices": usage_tables.devices_table,
    "processes": usage_tables.processes_table,
    "pods": usage_tables.pods_table,
}


def format_usage(
    answer: Answer,
    kind: str,
    form: str,
    terminal: Terminal,
    *,
    compact: bool = False,
    sort_by: str = "",
) -> str:
    """Return one of `KINDS` in one of `WIDE_FORMATS`, or `TOP` in one for programs.

    `compact` is for a series of answers: JSON is one line, YAML one document.

    Raises:
        UnknownField: the rows have no field of the name `sort_by`.
    """
    if sort_by:
        parts = _SORTED[kind]
        [ordered] = sort_items([{part: answer[part] for part in parts}], sort_by)
        answer = {**answer, **ordered}
    if form not in TABLES:
        return encode(_part(answer, kind), form, compact=compact)
    return render(_DRAW[kind](answer, wide=form == "wide"), terminal)


def in_namespace(answer: Answer, namespace: str) -> Answer:
    """Return an answer with the rows of a namespace; of all where it is empty."""
    if not namespace:
        return answer
    rows = ("containers", "unauthorized")
    kept = {name: [it for it in answer[name] if it["namespace"] == namespace] for name in rows}
    return {**answer, **kept}


class Top:
    """The live screen of `top`; it computes processor use from one answer to the next."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, float]] = {}

    def screen(self, answer: Answer, terminal: Terminal, sort_by: str = "") -> str:
        """Draw the screen of one answer.

        Raises:
            UnknownField: processes have no field of the name `sort_by`.
        """
        now, before = answer["at"], self._before
        spent = dict(_processor_time(answer))
        cpu = {
            pid: max(0.0, 100 * (seconds - before[pid][1]) / (now - before[pid][0]))
            for pid, seconds in spent.items()
            if pid in before and now > before[pid][0]
        }
        self._before = {pid: (now, seconds) for pid, seconds in spent.items()}
        return render(usage_tables.top_screen(answer, cpu, sort_by), terminal)


def _processor_time(answer: Answer) -> Iterator[tuple[int, float]]:
    parts = [part for container in answer["containers"] for part in container["gpus"]]
    processes = [process for part in parts for process in part["processes"]]
    for process in (*processes, *answer["unauthorized"]):
        if process["cpuSeconds"] is not None:
            yield process["pid"], process["cpuSeconds"]


def _part(answer: Answer, kind: str) -> Mapping[str, Any]:
    """Return the data of one kind for programs; the node's name is always there."""
    head = {"node": answer["node"]}
    if kind == "devices":
        events = {"events": answer["events"]} if "events" in answer else {}  # of a pod's own
        return {**head, "gpus": answer["gpus"], **events}
    if kind in ("processes", TOP):
        shown = {name: answer[name] for name in ("containers", "unauthorized")}
        return {**head, **({"gpus": answer["gpus"]} if kind == TOP else {}), **shown}

    without = [
        {
            **container,
            "gpus": [
                {key: value for key, value in part.items() if key != "processes"}
                for part in container["gpus"]
            ],
        }
        for container in answer["containers"]
    ]
    return {**head, "containers": without}
