"""Tables of `get` and `top`: the columns of each kind, with bars for `top`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from metagpu.display.table import Cell, TextTable

Item = Mapping[str, Any]

_BUSY: Final = 90
"""Percent from which a bar is red."""
_NONE: Final = "-"


class Column(msgspec.Struct, frozen=True):
    """A column: its head, its cell of a row, and whether only `-o wide` has it."""

    head: str
    cell: Callable[[Item], str | Cell]
    wide: bool = False


def draw_items(kind: str, items: Sequence[Item], *, wide: bool = False) -> Sequence[TextTable]:
    """Draw rows of a kind."""
    columns = [it for it in COLUMNS[kind] if wide or not it.wide]
    table = TextTable(tuple(it.head for it in columns))
    for item in items:
        table.add(*(column.cell(item) for column in columns), style=_style(item))
    return [table]


def draw_top(kind: str, items: Sequence[Item], *, wide: bool = False) -> Sequence[TextTable]:
    """Draw rows of a kind with bars for what is used and held."""
    columns = [_BARS[kind].get(it.head, it) for it in COLUMNS[kind] if wide or not it.wide]
    table = TextTable(tuple(it.head for it in columns))
    for item in items:
        table.add(*(column.cell(item) for column in columns), style=_style(item))
    return [table]


def _text(key: str) -> Callable[[Item], str]:
    return lambda item: _NONE if item[key] in (None, "", []) else str(item[key])


def _percent(item: Item) -> str:
    return _NONE if item["utilization"] is None else f"{item['utilization']}%"


def _memory(used: str, whole: str) -> Callable[[Item], str]:
    def cell(item: Item) -> str:
        known = ["?" if item[key] is None else str(item[key]) for key in (used, whole)]
        return f"{'/'.join(known)} MiB"

    return cell


def _shares(item: Item) -> str:
    """Return the held shares of each resource, and how many there are."""
    shown = [f"{item['held'][name]}/{count} {name}" for name, count in item["capacity"].items()]
    return ", ".join(shown) or _NONE


def _requested(item: Item) -> str:
    return ", ".join(f"{count} {name}" for name, count in item["shares"].items()) or _NONE


def _health(item: Item) -> Cell:
    problem = item.get("problem") or "; ".join(item.get("problems", ()))
    if not problem:
        return Cell("healthy", "green")
    bad = item["healthy"] is False or item["healthy"] < item.get("gpus", 0)
    return Cell(problem, "bold red" if bad else "yellow")


def _held(whole: str | None) -> Callable[[Item], str]:
    def cell(item: Item) -> str:
        held = f"{item['heldGpus']:g}"
        return f"{held}/{item[whole]}" if whole else held

    return cell


def _style(item: Item) -> str:
    return "red" if item.get("overLimit") else ""


def _bar(used: str, whole: str | int, unit: str) -> Callable[[Item], Cell]:
    def cell(item: Item) -> Cell:
        value, limit = item[used], whole if isinstance(whole, int) else item[whole]
        if value is None or limit is None:
            return Cell(_NONE if value is None else f"{value}{unit}")
        style = "red" if value * 100 >= limit * _BUSY else "green"
        end = unit if unit == "%" else f"/{limit:g}{unit}"
        return Cell(f"{value:g}{end}", style, min(1.0, value / max(limit, 1)))

    return cell


_USED: Final = _memory("usedMiB", "usableMiB")
_USED_OF_SHARE: Final = _memory("usedMiB", "shareMiB")

COLUMNS: Final[Mapping[str, Sequence[Column]]] = {
    "nodes": (
        Column("NODE", _text("node")),
        Column("GPUS", _text("gpus")),
        Column("BUSY", _percent),
        Column("MEMORY", _USED),
        Column("HELD", _held("gpus")),
        Column("PODS", _text("pods")),
        Column("SHARES", _shares, wide=True),
        Column("UNAUTHORIZED", _text("unauthorized"), wide=True),
        Column("VERSION", _text("version"), wide=True),
        Column("HEALTH", _health),
    ),
    "gpus": (
        Column("NODE", _text("node")),
        Column("GPU", _text("gpu")),
        Column("PRODUCT", _text("product")),
        Column("BUSY", _percent),
        Column("MEMORY", _USED),
        Column("HELD", _held(None)),
        Column("CONTAINERS", _text("containers")),
        Column("SHARES", _shares, wide=True),
        Column("UUID", _text("uuid"), wide=True),
        Column("POLICY", _text("policy"), wide=True),
        Column("HEALTH", _health),
    ),
    "pods": (
        Column("NAMESPACE", _text("namespace")),
        Column("POD", _text("pod")),
        Column("CONTAINER", _text("container")),
        Column("NODE", _text("node")),
        Column("GPU", _text("gpu")),
        Column("SHARES", _text("shares")),
        Column("BUSY", _percent),
        Column("MEMORY", _USED_OF_SHARE),
        Column("RESOURCE", _text("resource"), wide=True),
        Column("LIMIT MIB", _text("limitMiB"), wide=True),
        Column("PROCESSES", _text("processes"), wide=True),
        Column("GUARD", _text("guard"), wide=True),
        Column("OWNER", _text("owner"), wide=True),
        Column("PHASE", _text("phase"), wide=True),
    ),
    "namespaces": (
        Column("NAMESPACE", _text("namespace")),
        Column("PODS", _text("pods")),
        Column("GPUS HELD", _held(None)),
        Column("BUSY", _percent),
        Column("MEMORY", _USED_OF_SHARE),
        Column("SHARES", _requested),
        Column("NODES", _text("nodes"), wide=True),
        Column("OVER LIMIT", _text("overLimit"), wide=True),
    ),
    "holders": (
        Column("NAMESPACE", _text("namespace")),
        Column("POD", _text("pod")),
        Column("CONTAINER", _text("container")),
        Column("SHARES", _text("shares")),
        Column("MEMORY", _USED_OF_SHARE),
        Column("CONTROLLER", _text("controller")),
        Column("DRAIN", _text("drain")),
    ),
}
"""The columns of each kind; memory is what is used, and what the node or the shares have."""

_BUSY_BAR: Final = Column("BUSY", _bar("utilization", 100, "%"))
_MEMORY_BAR: Final = Column("MEMORY", _bar("usedMiB", "usableMiB", " MiB"))
_SHARE_BAR: Final = Column("MEMORY", _bar("usedMiB", "shareMiB", " MiB"))

_BARS: Final[Mapping[str, Mapping[str, Column]]] = {
    "nodes": {
        "BUSY": _BUSY_BAR,
        "MEMORY": _MEMORY_BAR,
        "HELD": Column("HELD", _bar("heldGpus", "gpus", "")),
    },
    "gpus": {
        "BUSY": _BUSY_BAR,
        "MEMORY": _MEMORY_BAR,
        "HELD": Column("HELD", _bar("heldGpus", 1, "")),
    },
    "pods": {"BUSY": _BUSY_BAR, "MEMORY": _SHARE_BAR},
    "namespaces": {"MEMORY": _SHARE_BAR},
}
