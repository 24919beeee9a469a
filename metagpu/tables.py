"""Reports as tables for people; the only place that draws."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from metagpu.core.tally import tally_lines
from metagpu.health_words import brief_health, full_health, reasons

ENDLESS: Final = 1_000_000  # letters in a line that nobody has to fold
_BAR_WIDTH: Final = 10
_LEGEND: Final = {
    "NV": "NVLinks, so many, between the two or from each to NVSwitches",
    "PSB": "on one board",
    "PIX": "under one PCI switch",
    "PXB": "under several PCI switches, below one host bridge",
    "PHB": "below one PCI host bridge",
    "NODE": "on one NUMA node, below different host bridges",
    "SYS": "on different NUMA nodes",
    "?": "NVML does not say",
}
_ALWAYS: Final = ("GPU", "PRODUCT", "MEMORY", "HEALTH")
_GIVEN_UP: Final = ("MEMORY", "POOL", "PRODUCT")
"""Columns of GPUs that a narrow terminal does without, in this order; JSON has them."""
_UNBROKEN: Final = {
    *("GPU", "PRODUCT", "MEMORY", "OFFERS", "HELD", "OWNER", "POOL"),
    *("SHARES", "POD", "RESOURCE", "GPUS", "PCI", "CHANGE"),
}


def show(*parts: RenderableType) -> None:
    """Print tables and texts below each other; colours only if a terminal reads.

    No table is cut: where the terminal has no room for one, it breaks the lines itself. In a pipe
    or a file a line may be as long as it likes, unless COLUMNS is set, as `watch` does.
    """
    for part in parts:
        out = _console()
        if isinstance(part, Table) and (need := _need(part, out)) > out.width:
            out = _console(need)
        with out.capture() as drawn:
            out.print(part)
        lines = drawn.get().split("\n")
        print("\n".join(line.rstrip() for line in lines), end="")  # noqa: T201 - a command line speaks so


def _console(width: int | None = None) -> Console:
    if width is None and not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        width = ENDLESS
    return Console(highlight=False, soft_wrap=False, width=width)


def show_explanation(explained: Mapping[str, Any], *, topology: bool = False) -> None:
    """Draw what `core.report.explanation` says, how the GPUs are connected only if wanted."""
    show(
        resources_table(explained["resources"]),
        gpus_table(explained["gpus"], "OFFERS", "POOL", "WHY", health=brief_health),
        *reasons(explained["gpus"]),
        *mixed(explained["gpus"]),
        *unused_pools(explained.get("unusedPools", {})),
        *map(Text, explained["remarks"]),
        *(topology_tables(explained) if topology else ()),
    )


def show_status(status: Mapping[str, Any]) -> None:
    """Draw what `core.report.status` says, and what hinders the configuration."""
    error = status.get("configuration", {}).get("error")
    show(
        *([Text(f"configuration not taken: {error}", style="bold red")] if error else []),
        *(Text(line, style="bold red") for line in rival_lines(status.get("rivals", {}))),
        *(Text(line, style="bold red") for line in lost_lines(status.get("lost", ()))),
        *(Text(line, style="yellow") for line in cluster_lines(status.get("cluster"))),
        *(Text(line, style="yellow") for line in cdi_lines(status.get("cdi"))),
        resources_table(status["resources"]),
        gpus_table(status["gpus"], "HELD", "OWNER", "POOL", health=brief_health),
        *reasons(status["gpus"]),
        leases_table(status["leases"]),
        *map(Text, tally_lines(status.get("enforcement"))),
        *map(Text, status.get("remarks", ())),
    )


def cdi_lines(told: Mapping[str, Any] | None) -> Sequence[str]:
    """Say what containers that are given GPUs by CDI have to do without."""
    lines = {
        "containers may not start": "problem",
        "containers get no libraries of the driver by CDI": "noLibraries",
    }
    return [f"{text}: {told[key]}" for text, key in lines.items() if told and told[key]]


def rival_lines(rivals: Mapping[str, str]) -> Sequence[str]:
    """Say which resources another device plugin serves in our stead."""
    return [f"{name} is served by another plugin on {it}" for name, it in rivals.items()]


def lost_lines(lost: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    """Say which containers were given MIG devices that are no more, and what helps."""
    return [f"{it['holder'].partition(' ')[0]}: {it['why']}" for it in lost]


def cluster_lines(cluster: Mapping[str, Any] | None) -> Sequence[str]:
    """Say what goes wrong with the API server, nothing where nothing does."""
    if cluster is None:
        return ()
    lines = [f"API server: {cluster['problem']}"] if cluster["problem"] else []
    lines += [f"API server, {use}: {why}" for use, why in cluster["uses"].items() if why]
    lines += [_rival_line(rival) for rival in cluster.get("rivalPods", ())]
    return lines


def _rival_line(rival: Mapping[str, Any]) -> str:
    contested = ", ".join(rival["contested"])
    also = f"; it may serve {contested} too" if contested else ""
    return f"{rival['program']} runs on this node: pod {rival['pod']}{also}"


def show_plan(plan: Mapping[str, Any]) -> None:
    """Draw what `core.plan.told` says."""
    resources = table("RESOURCE", "CHANGE", "SHARES", "BACKEND")
    for name, each in plan["resources"].items():
        shares = _turn(each["before"], each["after"])
        backend = _turn(each["backendBefore"], each["backendAfter"])
        resources.add_row(name, _change(each["change"]), shares, backend)
    if not plan["resources"]:
        resources.add_row("nothing is offered", "", "", "")

    gpus = table("GPU", "PRODUCT", "CHANGE", "POOL", "BACKENDS", "WAITS FOR")
    for each in plan["gpus"]:
        gpus.add_row(
            str(each["index"]),
            each["product"].removeprefix("NVIDIA "),
            _change(each["change"]),
            _turn(each["poolBefore"], each["poolAfter"]),
            _turn(", ".join(each["backendsBefore"]), ", ".join(each["backendsAfter"])),
            "\n".join(map(_holding, each["waitsFor"])) or "-",
        )

    settings = ", ".join(plan["settings"])
    also = [Text(f"other terms from the next request or event on: {settings}")] if settings else []
    show(resources, gpus, *also)


def _turn(before: object, after: object) -> str:
    old, new = ("-" if each in (None, "") else str(each) for each in (before, after))
    return old if old == new else f"{old} -> {new}"


def _change(change: str) -> Text:
    return Text(change, style="" if change == "untouched" else "bold yellow")


def _holding(lease: Mapping[str, Any]) -> str:
    holder = lease["holder"] or "a pod that is being admitted"
    return f"{holder}: {lease['shares']} of {lease['resource'] or 'another name'}"


def resources_table(resources: Mapping[str, Mapping[str, int]]) -> RenderableType:
    """Draw what is offered under each resource name."""
    rows = table("RESOURCE", "CAPACITY", "ALLOCATABLE")

    for name, numbers in resources.items():
        rows.add_row(name, str(numbers["capacity"]), str(numbers["allocatable"]))
    if not resources:
        rows.add_row("nothing is offered", "", "")
    return rows


def gpus_table(
    gpus: Sequence[Mapping[str, Any]],
    *more: str,
    health: Callable[[Mapping[str, Any]], Text] | None = None,
) -> RenderableType:
    """Draw the GPUs and their health, with `more` of OFFERS, HELD, OWNER, POOL and WHY.

    What has no room on the terminal without a word being broken is left out (`_GIVEN_UP`).
    """
    columns: dict[str, Callable[[Mapping[str, Any]], RenderableType]] = {
        "GPU": lambda gpu: str(gpu["index"]),
        "PRODUCT": lambda gpu: gpu["product"].removeprefix("NVIDIA "),
        "MEMORY": lambda gpu: f"{gpu['memoryMiB']} MiB",
        "OFFERS": lambda gpu: _offers(gpu["shares"]),
        "HELD": lambda gpu: fullness(gpu["shares"]),
        "OWNER": lambda gpu: gpu["owner"] or "idle",
        "HEALTH": health or full_health,
        "POOL": lambda gpu: gpu["pool"] or "-",
        "WHY": lambda gpu: gpu["why"],
    }
    wanted = [name for name in columns if name in {*_ALWAYS, *more}]
    out = _console()

    for name in (None, *_GIVEN_UP):
        wanted = [each for each in wanted if each != name]
        rows = table(*wanted)
        for gpu in gpus:
            rows.add_row(*(columns[each](gpu) for each in wanted))
        if health is not None:
            rows.columns[wanted.index("HEALTH")].no_wrap = True  # its reasons stand elsewhere
        if _need(rows, out) <= out.width:
            break
    return rows


def _need(rows: Table, out: Console) -> int:
    """Give the columns of a terminal that a table needs, so that no word of it is broken."""
    endless = out.options.update(max_width=10_000)
    for column in rows.columns:
        whole = [cell for cell in column.cells if column.no_wrap or getattr(cell, "no_wrap", False)]
        widths = (out.measure(cell, options=endless).maximum for cell in whole)
        column.min_width = max(column.min_width or 0, *widths, 0)
    return out.measure(rows, options=endless).minimum


def mixed(gpus: Sequence[Mapping[str, Any]]) -> Sequence[RenderableType]:
    """Say which GPUs several backends offer, and who gets them."""
    found: dict[str, list[str]] = {}
    for gpu in gpus:
        if len(gpu["backends"]) > 1:
            found.setdefault(", ".join(gpu["backends"]), []).append(str(gpu["index"]))

    return [
        Text(
            f"GPU {', '.join(indices)}: offered by {backends}. An idle GPU goes to the one that a "
            "pod asks first, until its last pod has ended."
        )
        for backends, indices in found.items()
    ]


def unused_pools(pools: Mapping[str, str]) -> Sequence[RenderableType]:
    """Say which pools have no GPU here, and why."""
    return [Text(f"pool {name} has no GPU here: {why}") for name, why in pools.items()]


def topology_tables(explained: Mapping[str, Any]) -> Sequence[RenderableType]:
    """Draw how each two GPUs are connected, in the words of `nvidia-smi topo -m`, and explain."""
    gpus, matrix = explained["gpus"], explained["topology"]
    rows = table("GPU", *(str(gpu["index"]) for gpu in gpus), "NUMA", "PCI")

    for gpu, connections in zip(gpus, matrix, strict=True):
        numa = "-" if gpu["numaNode"] is None else str(gpu["numaNode"])
        rows.add_row(str(gpu["index"]), *connections, numa, gpu["pciBusId"] or "-")

    seen = {connection.rstrip("0123456789") for row in matrix for connection in row}
    legend = "\n".join(f"{word:<5} {text}" for word, text in _LEGEND.items() if word in seen)
    return (rows, Text(legend))


def leases_table(leases: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Draw who holds how many shares of which GPU."""
    rows = table("POD (CONTAINER)", "RESOURCE", "SHARES", "GPU")

    for lease in leases:
        holder = lease["holder"] or "not told by the kubelet yet"
        rows.add_row(holder, lease["resource"], str(lease["shares"]), str(lease["gpu"]))
    if not leases:
        rows.add_row("nobody holds a share", "", "", "")
    return rows


def fullness(shares: Mapping[str, Mapping[str, int]]) -> RenderableType:
    """Draw a bar for each resource of a GPU: what is held, what is free, what nobody may have."""
    if not shares:
        return "-"

    bars = []
    for resource, numbers in shares.items():
        whole = max(numbers["capacity"], 1)
        full = round(_BAR_WIDTH * numbers["held"] / whole)
        shut = 0 if numbers["held"] or numbers["free"] else _BAR_WIDTH
        bar = "\u2588" * full + "\u2591" * (_BAR_WIDTH - full - shut) + "\u00b7" * shut
        name = f" {_short(resource)}" if len(shares) > 1 else ""
        bars.append(f"{bar} {numbers['held']}/{numbers['capacity']}{name}")
    return Text("\n".join(bars), no_wrap=True)


def _offers(shares: Mapping[str, Mapping[str, int]]) -> str:
    """Count the shares of each resource, by the part of its name that tells them apart."""
    lines = (f"{numbers['capacity']} {_short(name)}" for name, numbers in shares.items())
    return "\n".join(lines) or "-"


def _short(resource: str) -> str:
    return resource.rpartition("/")[2]


def table(*columns: str) -> Table:
    """Start a table with these columns."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        whole = column in _UNBROKEN
        drawn.add_column(column, overflow="fold", no_wrap=whole, min_width=len(column))
    return drawn
