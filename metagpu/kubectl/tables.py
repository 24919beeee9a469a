"""Tables of `get` and `top`: rows from the reports of nodes, columns, and bars.

Memory is in MiB, utilization in percent; `None` where the driver does not report the value.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from metagpu.core.reports.reading import FieldMissing
from metagpu.core.reports.schema.gpus import UsedGpuReport
from metagpu.core.reports.schema.usage import UsageReport
from metagpu.display.table import Cell, TextTable
from metagpu.kubectl.errors import NotListed
from metagpu.kubectl.viewer import NodeAnswer

Item = Mapping[str, Any]


def _node_rows(node: str, report: UsageReport) -> Iterator[Item]:
    gpus = report.gpus
    held, capacity = _shares_of(gpus)
    yield {
        "node": node,
        "gpus": len(gpus),
        "healthy": sum(gpu.healthy for gpu in gpus),
        "cordoned": sum(gpu.cordon is not None for gpu in gpus),
        "heldGpus": round(sum(gpu.held_part for gpu in gpus), 2),
        "held": held,
        "capacity": capacity,
        "utilization": _mean(gpu.utilization for gpu in gpus),
        "usedMiB": _sum(gpu.used_mib for gpu in gpus),
        "usableMiB": _sum(gpu.usable_mib for gpu in gpus),
        "pods": len({(container.namespace, container.pod) for container in report.containers}),
        "unauthorized": report.unauthorized,
        "problems": [_gpu_problem(gpu) for gpu in gpus if _gpu_problem(gpu)],
        "version": report.version,
    }


def _gpu_rows(node: str, report: UsageReport) -> Iterator[Item]:
    pods: Counter[str] = Counter()
    for container in report.containers:
        pods.update({part.uuid for part in container.gpus})
    for gpu in report.gpus:
        held, capacity = _shares_of([gpu])
        yield {
            "node": node,
            "gpu": gpu.index,
            "uuid": gpu.uuid,
            "product": gpu.product.removeprefix("NVIDIA "),
            "heldGpus": round(gpu.held_part, 2),
            "held": held,
            "capacity": capacity,
            "utilization": gpu.utilization,
            "usedMiB": gpu.used_mib,
            "usableMiB": gpu.usable_mib,
            "containers": pods[gpu.uuid],
            "healthy": gpu.healthy,
            "cordoned": gpu.cordon is not None,
            "problem": _gpu_problem(gpu),
            "policy": gpu.policy,
        }


def _pod_rows(node: str, report: UsageReport) -> Iterator[Item]:
    """Yield a row for each container and each GPU of which it holds shares."""
    for container in report.containers:
        for part in container.gpus:
            yield {
                "namespace": container.namespace,
                "pod": container.pod,
                "container": container.container,
                "node": node,
                "gpu": part.index,
                "uuid": part.uuid,
                "resource": part.resource,
                "shares": part.shares,
                "capacity": part.capacity,
                "heldGpus": round(part.part, 4),
                "utilization": part.utilization,
                "usedMiB": part.used_mib,
                "shareMiB": part.share_mib,
                "limitMiB": part.limit_mib,
                "overLimit": part.over_limit,
                "overShareSeconds": part.over_share_seconds,
                "processes": part.processes,
                "guard": part.guard,
                "owner": container.pod_owner,
                "phase": container.pod_phase,
                "podUid": container.pod_uid,
            }


def _namespace_rows(rows: Iterable[Item]) -> Iterator[Item]:
    """Yield a row for each namespace of the rows of containers."""
    by_name: dict[str, list[Item]] = {}
    for item in rows:
        by_name.setdefault(item["namespace"], []).append(item)
    for name, items in sorted(by_name.items()):
        shares: Counter[str] = Counter()
        for item in items:
            shares[item["resource"]] += item["shares"]
        yield {
            "namespace": name,
            "pods": len({(row["node"], row["pod"]) for row in items}),
            "heldGpus": round(sum(row["heldGpus"] for row in items), 2),
            "shares": dict(shares),
            "utilization": _sum(row["utilization"] for row in items),
            "usedMiB": _sum(row["usedMiB"] for row in items),
            "shareMiB": _sum(row["shareMiB"] for row in items),
            "overLimit": sum(row["overLimit"] for row in items),
            "nodes": len({row["node"] for row in items}),
        }


_ROWS: Final[Mapping[str, Callable[[str, UsageReport], Iterator[Item]]]] = {
    "nodes": _node_rows,
    "gpus": _gpu_rows,
    "pods": _pod_rows,
    "namespaces": _pod_rows,
}
KINDS: Final = tuple(_ROWS)
"""The objects of `get` and `top`."""


def read_rows(
    kind: str,
    answers: Iterable[NodeAnswer[UsageReport]],
    pods: Collection[tuple[str, str]] | None = None,
) -> tuple[Sequence[Item], Sequence[NodeAnswer[UsageReport]]]:
    """Return the rows of a kind, and the answers.

    A node whose report lacks a field of the rows has none, and an answer that says so.

    Args:
        kind: one of `KINDS`.
        answers: of all nodes.
        pods: namespace and name of the only pods whose containers count; `None` for all.
    """
    rows, read = list[Item](), list[NodeAnswer[UsageReport]]()
    for answer in answers:
        found = answer
        if answer.report is not None:
            try:
                rows += list(_ROWS[kind](answer.node, answer.report))
            except FieldMissing as error:
                found = NodeAnswer(answer.node, problem=str(error))
        read.append(found)
    if pods is not None:
        rows = [row for row in rows if (row["namespace"], row["pod"]) in pods]
    return list(_namespace_rows(rows)) if kind == "namespaces" else rows, read


def in_namespace(items: Iterable[Item], namespace: str) -> Sequence[Item]:
    """Return the rows of a namespace; of all where it is empty."""
    return [row for row in items if not namespace or row["namespace"] == namespace]


def _shares_of(gpus: Iterable[UsedGpuReport]) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return the held shares and all shares of GPUs, by resource."""
    held: Counter[str] = Counter()
    capacity: Counter[str] = Counter()
    for gpu in gpus:
        for offer in gpu.shares:
            held[offer.resource] += offer.held
            capacity[offer.resource] += offer.capacity
    return dict(held), dict(capacity)


def _gpu_problem(gpu: UsedGpuReport) -> str:
    if not gpu.healthy:
        return f"GPU {gpu.index} is out of service: {gpu.reason}"
    if gpu.cordon is not None:
        return f"GPU {gpu.index} is cordoned: {gpu.cordon}"
    if gpu.failure:
        return f"GPU {gpu.index} could not be read: {gpu.failure}"
    problems = [f"{device}: {reason}" for device, reason in gpu.faults.items()]
    problems += [f"{backend} suspended: {reason}" for backend, reason in gpu.suspended.items()]
    return f"GPU {gpu.index}: {'; '.join(problems)}" if problems else ""


def _sum(values: Iterable[int | None]) -> int | None:
    """Return the sum of what is known, `None` where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known)) if known else None


_BUSY: Final = 90
"""Percent from which a bar is red."""
_NONE: Final = "-"


class Column(msgspec.Struct, frozen=True):
    """A column: its head, its cell of a row, and whether only `-o wide` has it."""

    head: str
    cell: Callable[[Item], str | Cell]
    wide: bool = False


_KEYS: Final = {"nodes": "node", "pods": "pod", "namespaces": "namespace"}


def _names(kind: str, item: Item) -> Sequence[str]:
    """Return the names by which people ask for a row."""
    if kind == "gpus":
        return f"{item['node']}/{item['gpu']}", item["uuid"]
    return (item[_KEYS[kind]],)


def object_names(kind: str, items: Iterable[Item]) -> Iterable[str]:
    """Return the name of each object once, as `-o name` prints it."""
    prefix = "" if kind == "gpus" else f"{_KEYS[kind]}/"
    return dict.fromkeys(f"{prefix}{_names(kind, item)[0]}" for item in items)


def named_rows(
    kind: str, items: Sequence[Item], names: Sequence[str]
) -> tuple[Sequence[Item], Sequence[str]]:
    """Return the rows of objects with these names, and the names without a row."""
    found = [item for item in items if not set(names).isdisjoint(_names(kind, item))]
    known = {name for item in found for name in _names(kind, item)}
    return found, [name for name in names if name not in known]


def not_listed(kind: str, name: str, namespace: str) -> NotListed:
    """Return the error about a name that no row has, once all nodes have answered."""
    if kind == "pods":
        where = f" in namespace {namespace}" if namespace else ""
        return NotListed(
            f"pod {name} holds no GPU shares{where}; `kubectl metagpu why {name}` says why it "
            "gets none"
        )
    return NotListed(f"{name} is not among the {kind}; `kubectl metagpu get {kind}` lists them")


def draw_items(
    kind: str, items: Sequence[Item], *, wide: bool = False, has_head: bool = True
) -> Sequence[TextTable]:
    """Draw rows of a kind."""
    columns = [column for column in COLUMNS[kind] if wide or not column.wide]
    table = TextTable(tuple(column.head for column in columns), has_head=has_head)
    for item in items:
        table.add(*(column.cell(item) for column in columns), style=_style(item))
    return [table]


def draw_top(kind: str, items: Sequence[Item], *, wide: bool = False) -> Sequence[TextTable]:
    """Draw rows of a kind with bars for what is used and held."""
    columns = [
        _BARS[kind].get(column.head, column) for column in COLUMNS[kind] if wide or not column.wide
    ]
    table = TextTable(tuple(column.head for column in columns))
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


def _limit(item: Item) -> str:
    return _NONE if item["limitMiB"] is None else f"{item['limitMiB']} MiB"


def _over_share(item: Item) -> str:
    seconds = item["overShareSeconds"]
    return _NONE if seconds is None else f"{seconds} s"


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
    return "red" if item.get("overLimit") else "yellow" if item.get("overShareSeconds") else ""


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
        Column("GPUS HELD", _held("gpus")),
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
        Column("GPUS HELD", _held(None)),
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
        Column("LIMIT", _limit, wide=True),
        Column("PROCESSES", _text("processes"), wide=True),
        Column("GUARD", _text("guard"), wide=True),
        Column("OVER SHARE", _over_share, wide=True),
        Column("CONTROLLER", _text("owner"), wide=True),
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
        "GPUS HELD": Column("GPUS HELD", _bar("heldGpus", "gpus", "")),
    },
    "gpus": {
        "BUSY": _BUSY_BAR,
        "MEMORY": _MEMORY_BAR,
        "GPUS HELD": Column("GPUS HELD", _bar("heldGpus", 1, "")),
    },
    "pods": {"BUSY": _BUSY_BAR, "MEMORY": _SHARE_BAR},
    "namespaces": {"MEMORY": _SHARE_BAR},
}
