"""Reports as tables for people; the only place that draws."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

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
_UNBROKEN: Final = {
    "GPU",
    "PRODUCT",
    "MEMORY",
    "HELD",
    "SHARES",
    "POD",
    "RESOURCE",
    "GPUS",
    "PCI",
    "CHANGE",
}


def console() -> Console:
    """Give the console that tables are drawn on; colours only if it is a terminal."""
    return Console(highlight=False, soft_wrap=False)


def show_explanation(explained: Mapping[str, Any], *, topology: bool = False) -> None:
    """Draw what `core.report.explanation` says, how the GPUs are connected only if wanted."""
    console().print(
        Group(
            resources_table(explained["resources"]),
            gpus_table(explained["gpus"], why=True),
            *(topology_tables(explained) if topology else ()),
        )
    )


def show_status(status: Mapping[str, Any]) -> None:
    """Draw what `core.report.status` says, and what hinders the configuration."""
    error = status.get("configuration", {}).get("error")
    console().print(
        Group(
            *([Text(f"configuration not taken: {error}", style="bold red")] if error else []),
            *(Text(line, style="yellow") for line in cluster_lines(status.get("cluster"))),
            resources_table(status["resources"]),
            gpus_table(status["gpus"]),
            leases_table(status["leases"]),
        )
    )


def cluster_lines(cluster: Mapping[str, Any] | None) -> Sequence[str]:
    """Say what goes wrong with the API server, nothing where nothing does."""
    if cluster is None:
        return ()
    lines = [f"API server: {cluster['problem']}"] if cluster["problem"] else []
    lines += [f"API server, {use}: {why}" for use, why in cluster["uses"].items() if why]
    return lines


def show_plan(plan: Mapping[str, Any]) -> None:
    """Draw what `core.report.plan` says."""
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
    also = Text(f"other terms from the next request or event on: {settings}") if settings else ""
    console().print(Group(resources, gpus, also))


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
    gpus: Sequence[Mapping[str, Any]], *, pools: bool = True, why: bool = False
) -> RenderableType:
    """Draw the GPUs: how full each is, its health, and its pool, with the reason if wanted."""
    columns = ["GPU", "PRODUCT", "MEMORY", "HELD", "HEALTH"]
    rows = table(*columns, *(["POOL"] if pools else []), *(["WHY"] if why else []))

    for gpu in gpus:
        rows.add_row(
            str(gpu["index"]),
            gpu["product"].removeprefix("NVIDIA "),
            f"{gpu['memoryMiB']} MiB",
            fullness(gpu["shares"]),
            health(gpu),
            *([gpu["pool"] or "-"] if pools else []),
            *([gpu["why"]] if why else []),
        )
    return rows


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


def health(gpu: Mapping[str, Any]) -> Text:
    """Say whether a GPU is healthy, and why not since when."""
    if gpu["healthy"] and gpu["waitsFor"]:
        return Text(gpu["waitsFor"], style="yellow")
    if gpu["healthy"]:
        return Text("healthy", style="green")
    since = gpu["since"].removesuffix("+00:00").replace("T", " ")
    return Text(f"{gpu['reason']}, since {since} UTC", style="bold red")


def fullness(shares: Mapping[str, Mapping[str, int]]) -> RenderableType:
    """Draw a bar for each resource of a GPU: how much of it is held."""
    if not shares:
        return "-"

    bars = []
    for numbers in shares.values():
        full = round(_BAR_WIDTH * numbers["held"] / max(numbers["capacity"], 1))
        bar = "\u2588" * full + "\u2591" * (_BAR_WIDTH - full)
        bars.append(f"{bar} {numbers['held']}/{numbers['capacity']}")
    return Text("\n".join(bars), no_wrap=True)


def table(*columns: str) -> Table:
    """Start a table with these columns."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        drawn.add_column(column, overflow="fold", no_wrap=column in _UNBROKEN)
    return drawn
