"""The output of `mgctl`: formats, tables, and the screen of `top`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import convert, to_builtins
from msgspec.structs import asdict

from metagpu.core.reports.reading import read_report
from metagpu.core.reports.schema.gpus import OfferedSharesReport, UsedGpuReport
from metagpu.core.reports.schema.usage import (
    ContainerGpuReport,
    ContainerReport,
    ProcessReport,
    UnauthorizedReport,
    UsageReport,
)
from metagpu.display.health import format_enforcement, gpu_problems, health_cell
from metagpu.display.options import encode
from metagpu.display.sorting import sort_items
from metagpu.display.table import Cell, Terminal, TextTable, render

Answer = Mapping[str, Any]
"""A `UsageReport` as plain data: of a daemon that may be newer than this program."""
Drawing = Sequence[TextTable | Cell]
"""The parts of a drawing, from top to bottom."""

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
_BUSY: Final = 90
"""Percent from which a bar is red."""
_NONE: Final = "-"
_TOTAL: Final = "total"
_POD_COLUMNS: Final = (
    *("POD", "NAMESPACE", "CONTAINER", "GPU", "SHARES"),
    *("MEMORY", "LOAD", "PROCESSES", "GUARD"),
)


class HeldProcess(ProcessReport, frozen=True):
    """A process on the screen of `top`; the order of rows may be that of any field."""

    index: int
    holder: str


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
    return render(_DRAW[kind](read_report(answer, UsageReport), wide=form == "wide"), terminal)


def in_namespace(answer: Answer, namespace: str) -> Answer:
    """Return an answer with the rows of a namespace; of all where it is empty."""
    if not namespace:
        return answer
    rows = ("containers", "unauthorized")
    kept = {name: [row for row in answer[name] if row["namespace"] == namespace] for name in rows}
    return {**answer, **kept}


class Top:
    """The live screen of `top`; it computes processor use from one answer to the next."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, float]] = {}

    def screen(self, plain: Answer, terminal: Terminal, sort_by: str = "") -> str:
        """Draw the screen of one answer.

        Raises:
            UnknownField: processes have no field of the name `sort_by`.
        """
        answer = read_report(plain, UsageReport)
        now, before = answer.at, self._before
        spent = dict(_processor_time(answer))
        cpu = {
            pid: max(0.0, 100 * (seconds - before[pid][1]) / (now - before[pid][0]))
            for pid, seconds in spent.items()
            if pid in before and now > before[pid][0]
        }
        self._before = {pid: (now, seconds) for pid, seconds in spent.items()}
        return render(top_screen(answer, cpu, sort_by), terminal)


def _processor_time(answer: UsageReport) -> Iterator[tuple[int, float]]:
    for process in _processes(answer):
        if process.pid is not None and process.cpu_seconds is not None:
            yield process.pid, process.cpu_seconds


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


# --- tables ---------------------------------------------------------------------------------------


def devices_table(answer: UsageReport, *, wide: bool = False) -> Drawing:
    """Draw the GPUs: a row for each resource of a GPU."""
    more = ("RESOURCE", "SHARES", "USED", "BUSY", "POLICY", "PRODUCT", "HEALTH") if wide else ()
    rows = TextTable(("GPU", "UUID", "MEMORY", "CAPACITY", "SHARE SIZE", *more))

    for gpu in answer.gpus:
        for offer in gpu.shares or (None,):
            rows.add(
                *_device(gpu, offer),
                *(_device_more(gpu, offer) if wide else ()),
                style="" if gpu.healthy else "red",
            )

    memory = sum(gpu.memory_mib or 0 for gpu in answer.gpus)
    offers = [(share.resource, share.capacity) for gpu in answer.gpus for share in gpu.shares]
    shares = _sum_of_one_resource(offers)
    rows.add_sums(_TOTAL, "", f"{memory} MiB", shares)
    return (rows, *gpu_problems(answer, wide=wide))


def processes_table(answer: UsageReport, *, wide: bool = False) -> Drawing:
    """Draw the processes on GPUs, and the containers with shares but no process."""
    details = ("CONTAINER", "USER", "CONTAINER PID", "CPU TIME", "HOST MEMORY", "STARTED")
    more = (*details, "CONTAINER MEMORY") if wide else ()
    last = ("GUARD", "NOTE") if wide else ()
    columns = ("POD", "NAMESPACE", "GPU", "NODE", "LOAD", "MEMORY", "PID", "CMD", "SHARES")
    rows = TextTable((*columns, *more, *last))

    used = 0
    for container, part in _parts(answer):
        used += part.used_mib or 0
        for process in part.known_processes or (None,):
            rows.add(
                *_process(answer, container, part, process, wide=wide),
                *(_process_more(container, part, process) if wide else ()),
                *((_guard(part), "") if wide else ()),
                style="red" if part.over_limit else "",
            )
    for process in answer.known_unauthorized:
        used += process.memory_mib or 0
        rows.add(
            *_unauthorized(answer, process, wide=wide),
            *(_process_more(process, None, process) if wide else ()),
            *((_NONE, process.reason) if wide else ()),
            style="yellow",
        )

    requests = _sum_of_one_resource(
        [(report.resource, report.shares) for _, report in _parts(answer)]
    )
    rows.add_sums(_TOTAL, "", "", "", "", f"{used} MiB", "", "", requests)
    return (rows, *_notes(answer, wide=wide))


def pods_table(answer: UsageReport, *, wide: bool = False) -> Drawing:
    """Draw the containers with shares: their GPU, their memory limit, their use."""
    more = ("RESOURCE", "LIMIT", "NODE", "POD UID", "CONTROLLER", "PHASE") if wide else ()
    rows = TextTable((*_POD_COLUMNS, *more))

    for container, part in _parts(answer):
        rows.add(
            container.pod,
            container.namespace,
            container.container,
            str(part.index),
            str(part.shares),
            _of(part.used_mib, part.share_mib),
            _percent(part.relative_utilization),
            str(len(part.known_processes)),
            _guard(part),
            *(
                (
                    part.resource,
                    _mib(part.limit_mib),
                    answer.node,
                    container.pod_uid or _NONE,
                    container.pod_owner or _NONE,
                    container.pod_phase or _NONE,
                )
                if wide
                else ()
            ),
            style="red" if part.over_limit else "",
        )
    return (rows, *(Cell(line) for line in format_enforcement(answer.enforcement)))


def top_screen(answer: UsageReport, cpu: Mapping[int, float], sort_by: str = "") -> Drawing:
    """Draw bars for the GPUs and a line for each process, by memory or another field.

    `cpu` has the percent of a processor that each process uses, by pid.

    Raises:
        UnknownField: processes have no field of the name `sort_by`.
    """
    bars = TextTable(("GPU", "PRODUCT", "BUSY", "MEMORY", "HELD", "HEALTH"))
    for gpu in answer.gpus:
        bars.add(
            str(gpu.index),
            gpu.product.removeprefix("NVIDIA "),
            _bar(gpu.utilization, 100, "%"),
            _bar(gpu.used_mib, gpu.usable_mib, " MiB"),
            _held(gpu.shares),
            health_cell(gpu),
        )

    rows = TextTable(
        ("GPU", "PID", "POD (CONTAINER)", "BUSY", "MEMORY", "CPU", "HOST MEMORY", "CMD")
    )
    plain = [to_builtins(held_process) for held_process in _processes(answer)]
    for process in convert(sort_items(plain, sort_by or "memoryMiB"), list[HeldProcess]):
        rows.add(
            str(process.index),
            _pid(process),
            process.holder,
            _percent(process.utilization),
            _mib(process.memory_mib),
            _percent(cpu.get(process.pid or 0)),
            _mib(process.host_memory_mib),
            _command(process),
        )
    return (bars, rows, *_notes(answer, wide=True))


def _held(offers: Sequence[OfferedSharesReport]) -> Sequence[Cell]:
    """Return a line for each resource of which shares are held, or one for none."""
    held = [offer for offer in offers if offer.held] or offers[:1]
    if len(offers) > 1 and not held[0].held:
        return [Cell("0")]
    return [Cell(f"{offer.held}/{offer.capacity}") for offer in held] or [Cell(_NONE)]


def _sum_of_one_resource(counts: Sequence[tuple[str, int]]) -> str:
    """Return the sum of shares; no sum of several resources, whose shares are unlike."""
    if len({resource for resource, _ in counts}) > 1:
        return _NONE
    return str(sum(count for _, count in counts))


def _processes(answer: UsageReport) -> Iterator[HeldProcess]:
    """Yield all processes, with the index of the GPU and the name of the holder."""
    for container, part in _parts(answer):
        name = f"{container.namespace}/{container.pod} ({container.container})"
        for process in part.known_processes:
            yield HeldProcess(**asdict(process), index=part.index, holder=name)
    for report in answer.known_unauthorized:
        details = {name: getattr(report, name) for name in ProcessReport.__struct_fields__}
        yield HeldProcess(**details, index=report.index, holder="no lease")


def _parts(answer: UsageReport) -> Iterator[tuple[ContainerReport, ContainerGpuReport]]:
    for container in answer.containers:
        for part in container.gpus:
            yield container, part


def _device(gpu: UsedGpuReport, offer: OfferedSharesReport | None) -> Iterator[str]:
    yield str(gpu.index)
    yield gpu.uuid
    yield _mib(gpu.memory_mib)
    yield str(offer.capacity) if offer else _NONE
    yield f"{offer.share_mib} MiB" if offer and offer.share_mib else _NONE


def _device_more(gpu: UsedGpuReport, offer: OfferedSharesReport | None) -> Iterator[str | Cell]:
    yield offer.resource if offer else _NONE
    yield str(offer.held) if offer else _NONE
    yield gpu.failure or _of(gpu.used_mib, gpu.usable_mib)
    yield _percent(gpu.utilization)
    yield gpu.policy
    yield gpu.product.removeprefix("NVIDIA ")
    yield health_cell(gpu)


def _process(
    answer: UsageReport,
    container: ContainerReport,
    part: ContainerGpuReport,
    process: ProcessReport | None,
    *,
    wide: bool,
) -> Iterator[str]:
    yield container.pod
    yield container.namespace
    yield str(part.index)
    yield answer.node
    yield _percent(_relative(process, part)) if process else _NONE
    yield _of(process.memory_mib if process else 0, part.share_mib)
    yield _pid(process) if process else _NONE
    yield _command(process, wide=wide) if process else _NONE
    yield str(part.shares)


def _unauthorized(answer: UsageReport, process: UnauthorizedReport, *, wide: bool) -> Iterator[str]:
    yield process.pod or _NONE
    yield process.namespace or _NONE
    yield str(process.index)
    yield answer.node
    yield _percent(process.utilization)
    yield _mib(process.memory_mib)
    yield _pid(process)
    yield _command(process, wide=wide)
    yield _NONE


def _process_more(
    container: ContainerReport | UnauthorizedReport,
    part: ContainerGpuReport | None,
    process: ProcessReport | None,
) -> Iterator[str]:
    cpu = process.cpu_seconds if process else None

    yield container.container or _NONE
    yield (process and process.user) or _NONE
    yield str((process and process.container_pid) or _NONE)
    yield _NONE if cpu is None else f"{cpu:.1f} s"
    yield _mib(process.host_memory_mib if process else None)
    yield ((process and process.started_at) or _NONE).removesuffix("+00:00")
    yield _NONE if part is None else _of(part.used_mib, part.limit_mib)


def _notes(answer: UsageReport, *, wide: bool) -> Sequence[Cell]:
    notes = [
        f"GPU {gpu.index} could not be read: {_failure(gpu)}" for gpu in answer.gpus if gpu.failure
    ]
    if (count := len(answer.known_unauthorized)) and not wide:
        subject = "1 process uses" if count == 1 else f"{count} processes use"
        notes.append(f"{subject} a GPU without a share of it; -o wide has the reasons")
    notes += [
        f"{container.namespace}/{container.pod} ({container.container}) has taken more of the time "
        f"of GPU {part.index} than its shares give for {part.over_share_seconds} s, while others "
        "want more"
        for container, part in _parts(answer)
        if part.over_share_seconds
    ]
    return [Cell(note, "yellow") for note in notes]


def _relative(process: ProcessReport, part: ContainerGpuReport) -> float | None:
    """Return how busy a process is, in percent of its container's part of the GPU."""
    busy: int | None = process.utilization
    return None if busy is None else busy * float(max(part.capacity, 1) / part.shares)


def _failure(gpu: UsedGpuReport) -> str:
    """Return a GPU's failure without the GPU's name at its beginning."""
    return str(gpu.failure).removeprefix(f"GPU {gpu.index} ({gpu.uuid}): ")


def _guard(part: ContainerGpuReport) -> str:
    if part.guard is None:
        return _NONE
    return f"{part.guard} ({part.policy})" if part.policy else str(part.guard)


def _pid(process: ProcessReport) -> str:
    """Return the pid; a pod gets no pid of a process outside its container."""
    return _NONE if process.pid is None else str(process.pid)


def _command(process: ProcessReport, *, wide: bool = False) -> str:
    command = process.command or [_NONE]
    return " ".join(command) if wide else str(command[0])


def _bar(value: int | None, whole: int | None, unit: str) -> Cell:
    if value is None:
        return Cell(_NONE)
    if whole is None:
        return Cell(f"{value}{unit}")

    style = "red" if value * 100 >= whole * _BUSY else "green"
    end = unit if unit == "%" else f"/{whole}{unit}"
    return Cell(f"{value}{end}", style, value / max(whole, 1))


def _of(used: int | None, whole: int | None) -> str:
    return f"{'?' if used is None else used}/{'-' if whole is None else whole} MiB"


def _mib(amount: int | None) -> str:
    return _NONE if amount is None else f"{amount} MiB"


def _percent(amount: float | None) -> str:
    return _NONE if amount is None else f"{amount:.0f}%"


_DRAW: Final = {
    "devices": devices_table,
    "processes": processes_table,
    "pods": pods_table,
}
