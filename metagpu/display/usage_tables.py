"""Tables and bars of `mgctl`: GPUs, processes, pods, and the live screen of `top`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from metagpu.display.health import format_enforcement
from metagpu.display.sorting import sort_items
from metagpu.display.table import Cell, TextTable

Answer = Mapping[str, Any]
"""The daemon's answer to `usage`; see `core.usage.report`."""

Drawing = Sequence[TextTable | Cell]
"""The parts of a drawing, from top to bottom."""

_BUSY: Final = 90
"""Percent from which a bar is red."""
_NONE: Final = "-"


def devices_table(answer: Answer, *, wide: bool = False) -> Drawing:
    """Draw the GPUs: a row for each resource of a GPU."""
    more = ("RESOURCE", "HELD", "USED", "GPU", "POLICY", "PRODUCT", "HEALTH") if wide else ()
    rows = TextTable(("IDX", "UUID", "MEMORY", "SHARES", "SHARE SIZE", *more))

    for gpu in answer["gpus"]:
        for offer in gpu["shares"] or [None]:
            rows.add(
                *_device(gpu, offer),
                *(_device_more(gpu, offer) if wide else ()),
                style="" if gpu["healthy"] else "red",
            )

    memory = sum(gpu["memoryMiB"] or 0 for gpu in answer["gpus"])
    offers = [offer for gpu in answer["gpus"] for offer in gpu["shares"]]
    shares = _sum_of_one_resource(offers, "capacity")
    rows.add_sums(str(len(answer["gpus"])), "", f"{memory} MiB", shares)
    return (rows, *_problems(answer, wide=wide))


def processes_table(answer: Answer, *, wide: bool = False) -> Drawing:
    """Draw the processes on GPUs, and the containers with shares but no process."""
    more = (
        (
            "CONTAINER",
            "USER",
            "CONTAINER PID",
            "CPU TIME",
            "HOST MEMORY",
            "STARTED",
            "CONTAINER MEMORY",
        )
        if wide
        else ()
    )
    last = ("GUARD", "NOTE") if wide else ()
    columns = ("POD", "NS", "DEVICE", "NODE", "GPU", "MEMORY", "PID", "CMD", "REQ")
    rows = TextTable((*columns, *more, *last))

    used = 0
    for container, part in _parts(answer):
        used += part["usedMiB"] or 0
        for process in part["processes"] or [None]:
            rows.add(
                *_process(answer, container, part, process, wide=wide),
                *(_process_more(container, part, process) if wide else ()),
                *((_guard(part), "") if wide else ()),
                style="red" if part["overLimit"] else "",
            )
    for process in answer["unauthorized"]:
        rows.add(
            *_unauthorized(answer, process, wide=wide),
            *(_process_more(process, None, process) if wide else ()),
            *((_NONE, process["reason"]) if wide else ()),
            style="yellow",
        )

    requests = _sum_of_one_resource([part for _, part in _parts(answer)], "shares")
    rows.add_sums(str(len(answer["containers"])), "", "", "", "", f"{used} MiB", "", "", requests)
    return (rows, *_notes(answer, wide=wide))


def pods_table(answer: Answer, *, wide: bool = False) -> Drawing:
    """Draw the containers with shares: their GPU, their memory limit, their use."""
    more = ("RESOURCE", "LIMIT", "NODE", "POD UID", "POD OWNER", "PHASE") if wide else ()
    columns = ("POD", "NS", "CONTAINER", "DEVICE", "REQ", "MEMORY", "GPU", "PROCESSES", "GUARD")
    rows = TextTable((*columns, *more))

    for container, part in _parts(answer):
        rows.add(
            container["pod"],
            container["namespace"],
            container["container"],
            str(part["index"]),
            str(part["shares"]),
            _of(part["usedMiB"], part["shareMiB"]),
            _percent(part["relativeUtilization"]),
            str(len(part["processes"])),
            _guard(part),
            *(
                (
                    part["resource"],
                    _mib(part["limitMiB"]),
                    answer["node"],
                    container["podUid"] or _NONE,
                    container["podOwner"] or _NONE,
                    container["podPhase"] or _NONE,
                )
                if wide
                else ()
            ),
            style="red" if part["overLimit"] else "",
        )
    return (rows, *(Cell(line) for line in format_enforcement(answer.get("enforcement"))))


def top_screen(answer: Answer, cpu: Mapping[int, float], sort_by: str = "") -> Drawing:
    """Draw bars for the GPUs and a line for each process, by memory or another field.

    `cpu` has the percent of a processor that each process uses, by pid.

    Raises:
        UnknownField: processes have no field of the name `sort_by`.
    """
    bars = TextTable(("GPU", "PRODUCT", "BUSY", "MEMORY", "HELD", "HEALTH"))
    for gpu in answer["gpus"]:
        bars.add(
            str(gpu["index"]),
            gpu["product"].removeprefix("NVIDIA "),
            _bar(gpu["utilization"], 100, "%"),
            _bar(gpu["usedMiB"], gpu["usableMiB"], " MiB"),
            _held(gpu["shares"]),
            _health(gpu),
        )

    rows = TextTable(
        ("GPU", "PID", "POD (CONTAINER)", "BUSY", "MEMORY", "CPU", "HOST MEMORY", "CMD")
    )
    for process in sort_items(list(_processes(answer)), sort_by or "memoryMiB"):
        rows.add(
            str(process["index"]),
            _pid(process),
            process["holder"],
            _percent(process["utilization"]),
            _mib(process["memoryMiB"]),
            _percent(cpu.get(process["pid"])),
            _mib(process["hostMemoryMiB"]),
            _command(process),
        )
    return (bars, rows, *_notes(answer, wide=True))


def _held(offers: Sequence[Answer]) -> Sequence[Cell]:
    """Return a line for each resource of which shares are held, or one for none."""
    held = [offer for offer in offers if offer["held"]] or offers[:1]
    if len(offers) > 1 and not held[0]["held"]:
        return [Cell("0")]
    return [Cell(f"{offer['held']}/{offer['capacity']}") for offer in held] or [Cell(_NONE)]


def _sum_of_one_resource(counts: Sequence[Answer], key: str) -> str:
    """Return the sum of shares; no sum of several resources, whose shares are unlike."""
    if len({each["resource"] for each in counts}) > 1:
        return _NONE
    return str(sum(each[key] for each in counts))


def _processes(answer: Answer) -> Iterator[Answer]:
    """Yield all processes, with the index of the GPU and the name of the holder."""
    for container, part in _parts(answer):
        name = f"{container['namespace']}/{container['pod']} ({container['container']})"
        for process in part["processes"]:
            yield {**process, "index": part["index"], "holder": name}
    for process in answer["unauthorized"]:
        yield {**process, "holder": "no lease"}


def _parts(answer: Answer) -> Iterator[tuple[Answer, Answer]]:
    for container in answer["containers"]:
        for part in container["gpus"]:
            yield container, part


def _device(gpu: Answer, offer: Answer | None) -> Iterator[str]:
    yield str(gpu["index"])
    yield gpu["uuid"]
    yield _mib(gpu["memoryMiB"])
    yield str(offer["capacity"]) if offer else _NONE
    yield f"{offer['shareMiB']} MiB" if offer and offer["shareMiB"] else _NONE


def _device_more(gpu: Answer, offer: Answer | None) -> Iterator[str | Cell]:
    yield offer["resource"] if offer else _NONE
    yield str(offer["held"]) if offer else _NONE
    yield gpu["failure"] or _of(gpu["usedMiB"], gpu["usableMiB"])
    yield _percent(gpu["utilization"])
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
    yield _percent(_relative(process, part)) if process else _NONE
    yield _of(process["memoryMiB"] if process else 0, part["shareMiB"])
    yield _pid(process) if process else _NONE
    yield _command(process, wide=wide) if process else _NONE
    yield str(part["shares"])


def _unauthorized(answer: Answer, process: Answer, *, wide: bool) -> Iterator[str]:
    yield process["pod"] or _NONE
    yield process["namespace"] or _NONE
    yield str(process["index"])
    yield answer["node"]
    yield _percent(process["utilization"])
    yield _mib(process["memoryMiB"])
    yield _pid(process)
    yield _command(process, wide=wide)
    yield _NONE


def _process_more(container: Answer, part: Answer | None, process: Answer | None) -> Iterator[str]:
    known: Answer = process or {}
    cpu = known.get("cpuSeconds")

    yield container["container"] or _NONE
    yield known.get("user") or _NONE
    yield str(known.get("containerPid") or _NONE)
    yield _NONE if cpu is None else f"{cpu:.1f} s"
    yield _mib(known.get("hostMemoryMiB"))
    yield (known.get("startedAt") or _NONE).removesuffix("+00:00")
    yield _NONE if part is None else _of(part["usedMiB"], part["limitMiB"])


def _notes(answer: Answer, *, wide: bool) -> Sequence[Cell]:
    notes = [
        f"GPU {gpu['index']} could not be read: {_failure(gpu)}"
        for gpu in answer["gpus"]
        if gpu["failure"]
    ]
    if (count := len(answer["unauthorized"])) and not wide:
        subject = "1 process uses" if count == 1 else f"{count} processes use"
        notes.append(f"{subject} a GPU without a share of it; -o wide has the reasons")
    return [Cell(note, "yellow") for note in notes]


def _problems(answer: Answer, *, wide: bool) -> Iterator[Cell]:
    """Return the lines below the GPUs for what has no column."""
    for gpu in answer["gpus"]:
        if not gpu["healthy"] and not wide:
            yield Cell(f"GPU {gpu['index']} is out of service: {gpu['reason']}", "bold red")
        if gpu["cordon"] and not wide:
            yield Cell(f"GPU {gpu['index']} is cordoned: {gpu['cordon']}", "yellow")
        for device, reason in gpu["faults"].items():
            yield Cell(f"{device} of GPU {gpu['index']} is out of service: {reason}", "bold red")


def _relative(process: Answer, part: Answer) -> float | None:
    """Return how busy a process is, in percent of its container's part of the GPU."""
    busy: int | None = process["utilization"]
    return None if busy is None else busy * float(max(part["capacity"], 1) / part["shares"])


def _health(gpu: Answer) -> Cell:
    if not gpu["healthy"]:
        return Cell(gpu["reason"], "bold red")
    if gpu["cordon"]:
        return Cell(f"cordoned: {gpu['cordon']}", "yellow")
    return Cell("healthy", "green")


def _failure(gpu: Answer) -> str:
    """Return a GPU's failure without the GPU's name at its beginning."""
    return str(gpu["failure"]).removeprefix(f"GPU {gpu['index']} ({gpu['uuid']}): ")


def _guard(part: Answer) -> str:
    if part["guard"] is None:
        return _NONE
    return f"{part['guard']} ({part['policy']})" if part["policy"] else str(part["guard"])


def _pid(process: Answer) -> str:
    """Return the pid; a pod gets no pid of a process outside its container."""
    return _NONE if process["pid"] is None else str(process["pid"])


def _command(process: Answer, *, wide: bool = False) -> str:
    command = process["command"] or [_NONE]
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
