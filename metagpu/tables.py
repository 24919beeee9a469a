"""Reports as tables for people; the only place that draws."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BAR_WIDTH: Final = 20


def console() -> Console:
    """Give the console that tables are drawn on; colours only if it is a terminal."""
    return Console(highlight=False, soft_wrap=False)


def show_explanation(explained: Mapping[str, Any]) -> None:
    """Draw what `core.report.explanation` says."""
    console().print(Group(resources_table(explained["resources"]), gpus_table(explained["gpus"])))


def show_status(status: Mapping[str, Any]) -> None:
    """Draw what `core.report.status` says."""
    console().print(
        Group(
            resources_table(status["resources"]),
            gpus_table(status["gpus"], why=False),
            leases_table(status["leases"]),
        )
    )


def resources_table(resources: Mapping[str, Mapping[str, int]]) -> RenderableType:
    """Draw what is offered under each resource name."""
    table = _table("RESOURCE", "CAPACITY", "ALLOCATABLE")

    for name, numbers in resources.items():
        table.add_row(name, str(numbers["capacity"]), str(numbers["allocatable"]))
    if not resources:
        table.add_row("nothing is offered", "", "")
    return table


def gpus_table(gpus: Sequence[Mapping[str, Any]], *, why: bool = True) -> RenderableType:
    """Draw the GPUs: their pool, their health, and how full each is."""
    columns = ["GPU", "PRODUCT", "MEMORY", "NUMA", "POOL", "HEALTH", "HELD"]
    table = _table(*columns, *(["WHY THIS POOL"] if why else []))

    for gpu in gpus:
        numa = "-" if gpu["numaNode"] is None else str(gpu["numaNode"])
        row: list[RenderableType] = [
            str(gpu["index"]),
            gpu["product"],
            f"{gpu['memoryMiB']} MiB",
            numa,
            gpu["pool"] or "-",
            health(gpu),
            fullness(gpu["shares"]),
        ]
        table.add_row(*row, *([gpu["why"]] if why else []))
    return table


def leases_table(leases: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Draw who holds how many shares of which GPU."""
    table = _table("POD (CONTAINER)", "RESOURCE", "SHARES", "GPU")

    for lease in leases:
        holder = lease["holder"] or "not told by the kubelet yet"
        table.add_row(holder, lease["resource"], str(lease["shares"]), str(lease["gpu"]))
    if not leases:
        table.add_row("nobody holds a share", "", "", "")
    return table


def health(gpu: Mapping[str, Any]) -> Text:
    """Say whether a GPU is healthy, and why not since when."""
    if gpu["healthy"]:
        return Text("healthy", style="green")
    return Text(f"{gpu['reason']} (since {gpu['since']})", style="bold red")


def fullness(shares: Mapping[str, Mapping[str, int]]) -> RenderableType:
    """Draw a bar for each resource of a GPU: how much of it is held."""
    if not shares:
        return "-"

    rows = Table.grid(padding=(0, 1))
    for numbers in shares.values():
        bar = ProgressBar(
            total=max(numbers["capacity"], 1), completed=numbers["held"], width=_BAR_WIDTH
        )
        rows.add_row(bar, f"{numbers['held']}/{numbers['capacity']}")
    return rows


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
