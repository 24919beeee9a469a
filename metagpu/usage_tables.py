"""Who uses what, drawn for people: the tables and bars of `mgctl`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from metagpu.tables import table

Answer = Mapping[str, Any]
"""What the daemon's `usage` says; see `core.usage_report`."""

_BAR_WIDTH: Final = 20
_BUSY: Final = 90
"""Percent from which a bar is drawn as full."""
_NOTHING: Final = "-"


def devices_table(answer: Answer, *, wide: bool = False) -> RenderableType:
    """Draw the GPUs and what is on offer of each: a row for each resource of a GPU."""
    more = ("RESOURCE", "HELD", "USED", "GPU", "POLICY", "PRODUCT", "HEALTH") if wide else ()
    rows = _table("IDX", "UUID", "MEMORY", "SHARES", "SHARE SIZE", *more)

    for gpu in answer["gpus"]:
        for offer in gpu["shares"] or [None]:
            _add(rows, *_device(gpu, offer), *(_device_more(gpu, offer) if wide else ()))

    memory = sum(gpu["memoryMiB"] for gpu in answer["gpus"])
    shares = sum(offer["capacity"] for gpu in answer["gpus"] for offer in gpu["shares"])
    _sum_up(rows, str(len(answer["gpus"])), "", f"{memory} MiB", str(shares))
    return rows


def processes_table(answer: Answer, *, wide: bool = False) -> RenderableType:
    """Draw every process on a GPU, and the containers that hold shares and have none."""
    more = (
        ("CONTAINER", "USER", "INNER PID", "CPU TIME", "HOST MEMORY", "STARTED", "CONTAINER USES")
        if wide
        else ()
    )
    last = ("GUARD", "NOTE") if wide else ()
    columns = ("POD", "NS", "DEVICE", "NODE", "GPU", "MEMORY", "PID", "CMD", "REQ")
    rows = _table(*columns, *more, *last)

    used = 0
    for container, part in _parts(answer):
        used += part["usedMiB"]
        for process in part["processes"] or [None]:
            _add(
                rows,
                *_process(answer, container, part, process, wide=wide),
                *(_process_more(container, part, process) if wide else ()),
                *((_guard(part), "") if wide else ()),
                style="red" if part["over"] else None,
            )
    for stranger in answer["strangers"]:
        _add(
            rows,
            *_stranger(answer, stranger, wide=wide),
            *(_process_more(stranger, None, stranger) if wide else ()),
            *((_NOTHING, stranger["why"]) if wide else ()),
            style="yellow",
        )

    requests = sum(part["shares"] for _, part in _parts(answer))
    _sum_up(rows, str(len(answer["containers"])), "", "", "", "", f"{used} MiB", "", "", requests)
    return Group(rows, *_notes(answer, wide=wide))


def pods_table(answer: Answer, *, wide: bool = False) -> RenderableType:
    """Draw the containers that hold shares: of which GPU, how much, and how much they use."""
    more = ("RESOURCE", "LIMIT", "NODE", "POD UID") if wide else ()
    columns = ("POD", "NS", "CONTAINER", "DEVICE", "REQ", "MEMORY", "GPU", "PROCESSES", "GUARD")
    rows = _table(*columns, *more)

    for container, part in _parts(answer):
        _add(
            rows,
            container["pod"],
            container["namespace"],
            container["container"],
            str(part["index"]),
            str(part["shares"]),
            _of(part["usedMiB"], part["shareMiB"]),
            _percent(part["relativeUtilisation"]),
            str(len(part["processes"])),
            _guard(part),
            *(
                (
                    part["resource"],
                    _mib(part["limitMiB"]),
                    answer["node"],
                    container["podUid"] or _NOTHING,
                )
                if wide
                else ()
            ),
            style="red" if part["over"] else None,
        )
    return rows


def top_screen(answer: Answer, cpu: Mapping[int, float]) -> RenderableType:
    """Draw bars for the GPUs and a line for each process, those with most memory first.

    `cpu` is how much of a processor each process uses, in percent, by pid.
    """
    bars = _table("GPU", "PRODUCT", "BUSY", "MEMORY", "HELD", "HEALTH")
    for gpu in answer["gpus"]:
        held = "\n".join(f"{offer['held']}/{offer['capacity']}" for offer in gpu["shares"])
        _add(
            bars,
            str(gpu["index"]),
            gpu["product"].removeprefix("NVIDIA "),
            _bar(gpu["utilisation"], 100, "%"),
            _bar(gpu["usedMiB"], gpu["usableMiB"], " MiB"),
            Text(held or _NOTHING),
            _health(gpu),
        )

    rows = _table("GPU", "PID", "POD (CONTAINER)", "BUSY", "MEMORY", "CPU", "HOST MEMORY", "CMD")
    for where, name, process in sorted(
        _everybody(answer), key=lambda it: -(it[2]["memoryMiB"] or 0)
    ):
        _add(
            rows,
            str(where),
            str(process["pid"]),
            name,
            _percent(process["utilisation"]),
            _mib(process["memoryMiB"]),
            _percent(cpu.get(process["pid"])),
            _mib(process["hostMemoryMiB"]),
            _command(process),
        )
    return Group(bars, rows, *_notes(answer, wide=True))


def _everybody(answer: Answer) -> Iterator[tuple[int, str, Answer]]:
    for container, part in _parts(answer):
        name = f"{container['namespace']}/{container['pod']} ({container['container']})"
        for process in part["processes"]:
            yield part["index"], name, process
    for stranger in answer["strangers"]:
        yield stranger["index"], "no lease", stranger


def _parts(answer: Answer) -> Iterator[tuple[Answer, Answer]]:
    for container in answer["containers"]:
        for part in container["gpus"]:
            yield container, part


def _device(gpu: Answer, offer: Answer | None) -> Iterator[str]:
    yield str(gpu["index"])
    yield gpu["uuid"]
    yield f"{gpu['memoryMiB']} MiB"
    yield str(offer["capacity"]) if offer else _NOTHING
    yield f"{offer['shareMiB']} MiB" if offer else _NOTHING


def _device_more(gpu: Answer, offer: Answer | None) -> Iterator[RenderableType]:
    yield offer["resource"] if offer else _NOTHING
    yield str(offer["held"]) if offer else _NOTHING
    yield gpu["failure"] or _of(gpu["usedMiB"], gpu["usableMiB"])
    yield _percent(gpu["utilisation"])
    yield gpu["policy"]
    yield gpu["product"].removeprefix("NVIDIA ")
    yield _health(gpu)


def _process(
    answer: Answer, container: Answer, part: Answer, process: Answer | None, *, wide: bool
) -> Iterator[str]:
    yield container["pod"]
    yield container["namespace"]
    yield str(part["index"])
    yield answer["node"]
    yield _percent(_relative(process, part)) if process else _NOTHING
    yield _of(process["memoryMiB"] if process else 0, part["shareMiB"])
    yield str(process["pid"]) if process else _NOTHING
    yield _command(process, wide=wide) if process else _NOTHING
    yield str(part["shares"])


def _stranger(answer: Answer, stranger: Answer, *, wide: bool) -> Iterator[str]:
    yield stranger["pod"] or _NOTHING
    yield stranger["namespace"] or _NOTHING
    yield str(stranger["index"])
    yield answer["node"]
    yield _percent(stranger["utilisation"])
    yield _mib(stranger["memoryMiB"])
    yield str(stranger["pid"])
    yield _command(stranger, wide=wide)
    yield _NOTHING


def _process_more(container: Answer, part: Answer | None, process: Answer | None) -> Iterator[str]:
    known: Answer = process or {}
    cpu = known.get("cpuSeconds")

    yield container["container"] or _NOTHING
    yield known.get("user") or _NOTHING
    yield str(known.get("innerPid") or _NOTHING)
    yield _NOTHING if cpu is None else f"{cpu:.1f} s"
    yield _mib(known.get("hostMemoryMiB"))
    yield (known.get("startedAt") or _NOTHING).removesuffix("+00:00")
    yield _NOTHING if part is None else _of(part["usedMiB"], part["limitMiB"])


def _notes(answer: Answer, *, wide: bool) -> Sequence[Text]:
    notes = [
        f"GPU {gpu['index']} could not be asked: {gpu['failure']}"
        for gpu in answer["gpus"]
        if gpu["failure"]
    ]
    if (count := len(answer["strangers"])) and not wide:
        what = "1 process belongs" if count == 1 else f"{count} processes belong"
        notes.append(f"{what} to nobody who holds a share of the GPU; -o wide says why")
    return [Text(printable(note), style="yellow") for note in notes]


def _relative(process: Answer, part: Answer) -> float | None:
    """Say how busy a process is in percent of what its container's shares are of the GPU."""
    busy: int | None = process["utilisation"]
    return None if busy is None else busy * float(max(part["capacity"], 1) / part["shares"])


def _health(gpu: Answer) -> Text:
    if not gpu["healthy"]:
        return Text(printable(gpu["reason"]), "bold red")
    if gpu["cordon"]:
        return Text(printable(f"cordoned: {gpu['cordon']}"), "yellow")
    return Text("healthy", "green")


def _guard(part: Answer) -> str:
    if part["guard"] is None:
        return _NOTHING
    return f"{part['guard']} ({part['policy']})" if part["policy"] else str(part["guard"])


def _command(process: Answer, *, wide: bool = False) -> str:
    command = process["command"] or [_NOTHING]
    return " ".join(command) if wide else str(command[0])


def printable(text: str) -> str:
    """Give a text that a terminal shows and does not obey: programs choose their own names."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _bar(value: int | None, whole: int, unit: str) -> Text:
    if value is None:
        return Text(_NOTHING)

    full = min(_BAR_WIDTH, round(_BAR_WIDTH * value / max(whole, 1)))
    bar = "\N{FULL BLOCK}" * full + "\N{LIGHT SHADE}" * (_BAR_WIDTH - full)
    style = "red" if value * 100 >= whole * _BUSY else "green"
    end = unit if unit == "%" else f"/{whole}{unit}"
    return Text.assemble((bar, style), f" {value}{end}", no_wrap=True)


def _of(used: int | None, whole: int | None) -> str:
    return f"{'?' if used is None else used}/{'-' if whole is None else whole} MiB"


def _mib(amount: int | None) -> str:
    return _NOTHING if amount is None else f"{amount} MiB"


def _percent(amount: float | None) -> str:
    return _NOTHING if amount is None else f"{amount:.0f}%"


def _table(*columns: str) -> Table:
    drawn = table(*columns)
    for column in drawn.columns:
        column.no_wrap = column.header not in {"CMD", "NOTE", "HEALTH", "PRODUCT"}
    return drawn


def _add(rows: Table, *cells: RenderableType, style: str | None = None) -> None:
    """Add a row whose texts mean what they say: none is read as markup, or obeyed."""
    plain = [Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells]
    rows.add_row(*plain, style=style)


def _sum_up(rows: Table, *cells: object) -> None:
    rows.show_footer = True
    for column, cell in zip(rows.columns, _padded(cells, len(rows.columns)), strict=True):
        column.footer = str(cell)


def _padded(cells: Iterable[object], count: int) -> Sequence[object]:
    given = list(cells)
    return [*given, *[""] * (count - len(given))]
