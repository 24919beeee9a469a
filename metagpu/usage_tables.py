"""Who uses what as tables and bars for people: what `mgctl` draws."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from metagpu.core.tally import tally_lines
from metagpu.sheets import Cell, Sheet

Answer = Mapping[str, Any]
"""What the daemon's `usage` says; see `core.usage_report`."""

Drawing = Sequence[Sheet | Cell]
"""What is drawn, from top to bottom."""

_BUSY: Final = 90
"""Percent from which a bar is drawn as full."""
_NOTHING: Final = "-"


def devices_table(answer: Answer, *, wide: bool = False) -> Drawing:
    """Draw the GPUs and what is on offer of each: a row for each resource of a GPU."""
    more = ("RESOURCE", "HELD", "USED", "GPU", "POLICY", "PRODUCT", "HEALTH") if wide else ()
    rows = Sheet(("IDX", "UUID", "MEMORY", "SHARES", "SHARE SIZE", *more))

    for gpu in answer["gpus"]:
        for offer in gpu["shares"] or [None]:
            rows.add(
                *_device(gpu, offer),
                *(_device_more(gpu, offer) if wide else ()),
                style="" if gpu["healthy"] else "red",
            )

    memory = sum(gpu["memoryMiB"] for gpu in answer["gpus"])
    shares = sum(offer["capacity"] for gpu in answer["gpus"] for offer in gpu["shares"])
    rows.sum_up(str(len(answer["gpus"])), "", f"{memory} MiB", str(shares))
    return (rows, *_ills(answer, wide=wide))


def processes_table(answer: Answer, *, wide: bool = False) -> Drawing:
    """Draw every process on a GPU, and the containers that hold shares and have none."""
    more = (
        ("CONTAINER", "USER", "INNER PID", "CPU TIME", "HOST MEMORY", "STARTED", "CONTAINER USES")
        if wide
        else ()
    )
    last = ("GUARD", "NOTE") if wide else ()
    columns = ("POD", "NS", "DEVICE", "NODE", "GPU", "MEMORY", "PID", "CMD", "REQ")
    rows = Sheet((*columns, *more, *last))

    used = 0
    for container, part in _parts(answer):
        used += part["usedMiB"]
        for process in part["processes"] or [None]:
            rows.add(
                *_process(answer, container, part, process, wide=wide),
                *(_process_more(container, part, process) if wide else ()),
                *((_guard(part), "") if wide else ()),
                style="red" if part["over"] else "",
            )
    for stranger in answer["strangers"]:
        rows.add(
            *_stranger(answer, stranger, wide=wide),
            *(_process_more(stranger, None, stranger) if wide else ()),
            *((_NOTHING, stranger["why"]) if wide else ()),
            style="yellow",
        )

    requests = sum(part["shares"] for _, part in _parts(answer))
    rows.sum_up(str(len(answer["containers"])), "", "", "", "", f"{used} MiB", "", "", requests)
    return (rows, *_notes(answer, wide=wide))


def pods_table(answer: Answer, *, wide: bool = False) -> Drawing:
    """Draw the containers that hold shares: of which GPU, how much, and how much they use."""
    more = ("RESOURCE", "LIMIT", "NODE", "POD UID", "POD OWNER", "PHASE") if wide else ()
    columns = ("POD", "NS", "CONTAINER", "DEVICE", "REQ", "MEMORY", "GPU", "PROCESSES", "GUARD")
    rows = Sheet((*columns, *more))

    for container, part in _parts(answer):
        rows.add(
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
                    container["podOwner"] or _NOTHING,
                    container["podPhase"] or _NOTHING,
                )
                if wide
                else ()
            ),
            style="red" if part["over"] else "",
        )
    return (rows, *(Cell(line) for line in tally_lines(answer.get("enforcement"))))


def top_screen(answer: Answer, cpu: Mapping[int, float]) -> Drawing:
    """Draw bars for the GPUs and a line for each process, those with most memory first.

    `cpu` is how much of a processor each process uses, in percent, by pid.
    """
    bars = Sheet(("GPU", "PRODUCT", "BUSY", "MEMORY", "HELD", "HEALTH"))
    for gpu in answer["gpus"]:
        held = ", ".join(f"{offer['held']}/{offer['capacity']}" for offer in gpu["shares"])
        bars.add(
            str(gpu["index"]),
            gpu["product"].removeprefix("NVIDIA "),
            _bar(gpu["utilisation"], 100, "%"),
            _bar(gpu["usedMiB"], gpu["usableMiB"], " MiB"),
            held or _NOTHING,
            _health(gpu),
        )

    rows = Sheet(("GPU", "PID", "POD (CONTAINER)", "BUSY", "MEMORY", "CPU", "HOST MEMORY", "CMD"))
    for where, name, process in sorted(
        _everybody(answer), key=lambda it: -(it[2]["memoryMiB"] or 0)
    ):
        rows.add(
            str(where),
            _pid(process),
            name,
            _percent(process["utilisation"]),
            _mib(process["memoryMiB"]),
            _percent(cpu.get(process["pid"])),
            _mib(process["hostMemoryMiB"]),
            _command(process),
        )
    return (bars, rows, *_notes(answer, wide=True))


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


def _device_more(gpu: Answer, offer: Answer | None) -> Iterator[str | Cell]:
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
    yield _pid(process) if process else _NOTHING
    yield _command(process, wide=wide) if process else _NOTHING
    yield str(part["shares"])


def _stranger(answer: Answer, stranger: Answer, *, wide: bool) -> Iterator[str]:
    yield stranger["pod"] or _NOTHING
    yield stranger["namespace"] or _NOTHING
    yield str(stranger["index"])
    yield answer["node"]
    yield _percent(stranger["utilisation"])
    yield _mib(stranger["memoryMiB"])
    yield _pid(stranger)
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


def _notes(answer: Answer, *, wide: bool) -> Sequence[Cell]:
    notes = [
        f"GPU {gpu['index']} could not be asked: {_bare(gpu)}"
        for gpu in answer["gpus"]
        if gpu["failure"]
    ]
    if (count := len(answer["strangers"])) and not wide:
        what = "1 process belongs" if count == 1 else f"{count} processes belong"
        notes.append(f"{what} to nobody who holds a share of the GPU; -o wide says why")
    return [Cell(note, "yellow") for note in notes]


def _ills(answer: Answer, *, wide: bool) -> Iterator[Cell]:
    """Say below the GPUs what the table has no column for."""
    for gpu in answer["gpus"]:
        if not gpu["healthy"] and not wide:
            yield Cell(f"GPU {gpu['index']} is out of service: {gpu['reason']}", "bold red")
        if gpu["cordon"] and not wide:
            yield Cell(f"GPU {gpu['index']} is cordoned: {gpu['cordon']}", "yellow")
        for device, reason in gpu["faults"].items():
            yield Cell(f"{device} of GPU {gpu['index']} is out of service: {reason}", "bold red")


def _relative(process: Answer, part: Answer) -> float | None:
    """Say how busy a process is in percent of what its container's shares are of the GPU."""
    busy: int | None = process["utilisation"]
    return None if busy is None else busy * float(max(part["capacity"], 1) / part["shares"])


def _health(gpu: Answer) -> Cell:
    if not gpu["healthy"]:
        return Cell(gpu["reason"], "bold red")
    if gpu["cordon"]:
        return Cell(f"cordoned: {gpu['cordon']}", "yellow")
    return Cell("healthy", "green")


def _bare(gpu: Answer) -> str:
    """Give a GPU's failure without the name that it may begin with: that is said before it."""
    return str(gpu["failure"]).removeprefix(f"GPU {gpu['index']} ({gpu['uuid']}): ")


def _guard(part: Answer) -> str:
    if part["guard"] is None:
        return _NOTHING
    return f"{part['guard']} ({part['policy']})" if part["policy"] else str(part["guard"])


def _pid(process: Answer) -> str:
    """Give the pid; a pod is not told that of a process whose pid there nobody knows."""
    return _NOTHING if process["pid"] is None else str(process["pid"])


def _command(process: Answer, *, wide: bool = False) -> str:
    command = process["command"] or [_NOTHING]
    return " ".join(command) if wide else str(command[0])


def _bar(value: int | None, whole: int, unit: str) -> Cell:
    if value is None:
        return Cell(_NOTHING)

    style = "red" if value * 100 >= whole * _BUSY else "green"
    end = unit if unit == "%" else f"/{whole}{unit}"
    return Cell(f"{value}{end}", style, value / max(whole, 1))


def _of(used: int | None, whole: int | None) -> str:
    return f"{'?' if used is None else used}/{'-' if whole is None else whole} MiB"


def _mib(amount: int | None) -> str:
    return _NOTHING if amount is None else f"{amount} MiB"


def _percent(amount: float | None) -> str:
    return _NOTHING if amount is None else f"{amount:.0f}%"
