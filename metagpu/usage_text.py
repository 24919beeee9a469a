"""What the daemon knows of who uses what, as the text that was asked for: `mgctl`'s output."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from metagpu import usage_tables
from metagpu.sheets import Terminal, drawn
from metagpu.usage_tables import Answer

TABLES: Final = ("table", "wide")
FORMATS: Final = (*TABLES, "json", "yaml")
KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "devices": ("device", "d"),
    "processes": ("process", "p"),
    "pods": ("pod",),
}
"""What `get` shows, and its other names."""

_DRAW: Final = {
    "devices": usage_tables.devices_table,
    "processes": usage_tables.processes_table,
    "pods": usage_tables.pods_table,
}


def written(
    answer: Answer, kind: str, form: str, terminal: Terminal, *, compact: bool = False
) -> str:
    """Write one of `KINDS` in one of `FORMATS`.

    `compact` is for answers that follow each other: JSON is a line, YAML a document of its own.
    """
    if form == "json":
        return json.dumps(_part(answer, kind), indent=None if compact else 2) + "\n"
    if form == "yaml":
        import yaml  # noqa: PLC0415 - tables need none

        text: str = yaml.safe_dump(_part(answer, kind), sort_keys=False)
        return f"---\n{text}" if compact else text
    return drawn(_DRAW[kind](answer, wide=form == "wide"), terminal)


class Top:
    """Draws look after look; knows from the one before how much of a processor each uses."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, float]] = {}

    def screen(self, answer: Answer, terminal: Terminal) -> str:
        """Draw one look."""
        now, before = answer["at"], self._before
        spent = dict(_processor_time(answer))
        cpu = {
            pid: max(0.0, 100 * (seconds - before[pid][1]) / (now - before[pid][0]))
            for pid, seconds in spent.items()
            if pid in before and now > before[pid][0]
        }
        self._before = {pid: (now, seconds) for pid, seconds in spent.items()}
        return drawn(usage_tables.top_screen(answer, cpu), terminal)


def _processor_time(answer: Answer) -> Iterator[tuple[int, float]]:
    parts = [part for container in answer["containers"] for part in container["gpus"]]
    everybody = [process for part in parts for process in part["processes"]]
    for process in (*everybody, *answer["strangers"]):
        if process["cpuSeconds"] is not None:
            yield process["pid"], process["cpuSeconds"]


def _part(answer: Answer, kind: str) -> Mapping[str, Any]:
    """Give what was asked for, for programs; the node's name is always there."""
    head = {"node": answer["node"]}
    if kind == "devices":
        return {**head, "gpus": answer["gpus"]}
    if kind == "processes":
        return {**head, "containers": answer["containers"], "strangers": answer["strangers"]}

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
