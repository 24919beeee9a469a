"""Tables of `metagpu status`, `explain`, `plan` and `uninstall`, for people."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from metagpu.core.reports.schema.daemon import (
    CdiReport,
    ClusterReport,
    DraReport,
    LeaseDifferenceReport,
    LostDevicesReport,
    MixedRequestReport,
    PodMgctlReport,
)
from metagpu.core.reports.schema.gpus import GpuReport, SharesReport
from metagpu.core.reports.schema.status import (
    Explanation,
    LeaseReport,
    ResourceReport,
    StatusReport,
)
from metagpu.display.health import brief_health, format_enforcement, full_health, reasons
from metagpu.display.table import (
    PLAIN,
    Cell,
    Terminal,
    TextTable,
    fold,
    render,
    stdout_terminal,
)

if TYPE_CHECKING:  # the daemon's libraries, which a question to it does not load
    from metagpu.core.contracts.leftovers import Removal

Plan = Mapping[str, Any]
"""A plan of `core.layout.diff`, as plain data."""
Part = TextTable | Cell | str
Health = Callable[[GpuReport], Sequence[Cell]]

_BAR_WIDTH: Final = 10
_LEGEND: Final = {
    "NV": "NVLinks, and their number, between the two or from each to NVSwitches",
    "PSB": "on one board",
    "PIX": "under one PCI switch",
    "PXB": "under several PCI switches, below one host bridge",
    "PHB": "below one PCI host bridge",
    "NODE": "on one NUMA node, below different host bridges",
    "SYS": "on different NUMA nodes",
    "?": "not reported by NVML",
}
_POLICIES: Final = {
    "off": "memory above a share is not noticed",
    "report": "memory above a share is shown by mgctl, and nothing ends",
    "warn": "memory above a share brings a warning, and nothing ends",
    "dry-run": "memory above a share brings a warning, and signals are only logged",
    "kill": "processes above the memory of their share end",
    "burst": "memory above a share is lent, and processes end if others need it",
}
"""What a policy does; the key is its word in the configuration."""
_ALWAYS: Final = ("GPU", "PRODUCT", "MEMORY", "HEALTH")
_DROPPED: Final = ("MEMORY", "POOL", "PRODUCT")
"""Columns of GPUs left out on a narrow terminal, in this order; JSON has them."""
_WHOLE: Final = frozenset(
    {
        *("GPU", "PRODUCT", "MEMORY", "OFFERS", "HELD", "OWNER", "POOL"),
        *("SHARES", "POD", "RESOURCE", "GPUS", "PCI", "CHANGE"),
    }
)
"""Columns whose cells stay on one line."""


def show(*parts: Part) -> None:
    """Print tables and lines; colours only on a terminal.

    No cell is cut: a table that does not fit is wider than the terminal. In a pipe or a file a line
    has no limit, unless COLUMNS is set, as `watch` does.
    """
    terminal = stdout_terminal()
    if terminal is PLAIN and "COLUMNS" in os.environ:
        terminal = Terminal(shutil.get_terminal_size().columns)
    print(render(_folded(parts, terminal), terminal), end="")  # noqa: T201 - a command line speaks so


def _folded(parts: Iterable[Part], terminal: Terminal) -> Iterable[TextTable | Cell]:
    for part in parts:
        if isinstance(part, TextTable):
            yield part
        else:
            yield from fold(Cell(part) if isinstance(part, str) else part, terminal)


def show_explanation(explained: Explanation, *, topology: bool = False) -> None:
    """Print what a node offers and why, with `topology` also the GPUs' connections."""
    show(
        resources_table(explained.resources),
        gpus_table(explained.gpus, "OFFERS", "POOL", "WHY", health=brief_health),
        *_unreadable_gpus(explained),
        *reasons(explained.gpus),
        *_mixed_gpus(explained.gpus),
        *_unused_pools(explained.unused_pools),
        *_memory_policies(explained.memory_policies),
        *(Cell(remark.text) for remark in explained.remarks),
        *(_topology(explained) if topology else ()),
    )


def show_status(status: StatusReport) -> None:
    """Print the daemon's `status`, problems first."""
    show(*_status_parts(status))


def draw_status(status: StatusReport, terminal: Terminal) -> str:
    """Draw the daemon's `status` on a terminal, to be drawn again."""
    return render(_folded(_status_parts(status), terminal), terminal)


def _status_parts(status: StatusReport) -> Sequence[Part]:
    problem = "; ".join(filter(None, (status.configuration.error, status.configuration.effect)))
    refusal = status.cluster and status.cluster.refusal
    layout = status.configuration.mig_layout
    waiting = status.standby.problems if status.standby else ()
    return (
        *([Cell(f"configuration rejected: {problem}", "bold red")] if problem else []),
        *([Cell(f"not followed: {refusal}", "bold red")] if refusal and not problem else []),
        *([Cell(f"MIG layout: {layout}")] if layout else []),
        *(Cell(f"the next daemon is not ready: {reason}", "bold red") for reason in waiting),
        *(
            Cell(f"configuration does not fit {misfit}", "yellow")
            for misfit in status.configuration.misfits
        ),
        *_unreadable_gpus(status),
        *(Cell(line, "bold red") for line in _competing_plugins(status.competing_plugins)),
        *(
            Cell(f"{name}: {problem}", "bold red")
            for name, problem in status.registration_problems.items()
        ),
        *(
            Cell(f"the main task {task} of the daemon ended: {why}", "bold red")
            for task, why in status.ended_tasks.items()
        ),
        *(Cell(line, "bold red") for line in _of_holders(status.lost_devices)),
        *(Cell(line, "yellow") for line in _of_holders(status.lease_differences)),
        *(Cell(line, "yellow") for line in _of_holders(status.mixed_requests)),
        *(Cell(line, "yellow") for line in cluster_problems(status.cluster)),
        *(Cell(line, "yellow") for line in _cdi_problems(status.cdi)),
        *(Cell(line, "yellow") for line in _dra_problems(status.dra)),
        *(Cell(line, "yellow") for line in _mgctl_problems(status.mgctl)),
        resources_table(status.resources),
        gpus_table(status.gpus, "HELD", "OWNER", "POOL", health=brief_health),
        *reasons(status.gpus),
        *_in_no_pool(status.gpus),
        *_turns(status.gpus),
        leases_table(status.leases),
        *map(Cell, format_enforcement(status.enforcement)),
        *_memory_policies(status.memory_policies),
        *(Cell(remark.text) for remark in status.remarks),
    )


def show_plan(plan: Plan) -> None:
    """Print a plan of `core.layout.diff`."""
    resources = table("RESOURCE", "CHANGE", "CAPACITY", "BACKEND")
    for name, each in plan["resources"].items():
        shares = _arrow(each["before"], each["after"])
        backend = _arrow(each["backendBefore"], each["backendAfter"])
        resources.add(name, _change(each["change"]), shares, backend)
    if not plan["resources"]:
        resources.add("nothing is offered", "", "", "")

    gpus = table("GPU", "PRODUCT", "CHANGE", "POOL", "BACKENDS", "WAITS FOR")
    for each in plan["gpus"]:
        gpus.add(
            str(each["index"]),
            each["product"].removeprefix("NVIDIA "),
            _change(each["change"]),
            _arrow(each["poolBefore"], each["poolAfter"]),
            _arrow(", ".join(each["backendsBefore"]), ", ".join(each["backendsAfter"])),
            [Cell(_lease(wait)) for wait in each["waitsFor"]] or "-",
        )

    settings = ", ".join(plan["settings"])
    also = [Cell(f"settings that change at once: {settings}")] if settings else []
    show(resources, gpus, *also)


def _unreadable_gpus(report: Explanation) -> Iterable[Cell]:
    return (
        Cell(f"out of service: NVML cannot read it: {gpu.reason}", "bold red")
        for gpu in report.unreadable_gpus
    )


def _competing_plugins(sockets: Mapping[str, str]) -> Iterable[str]:
    return (f"{name} is served by another plugin on {socket}" for name, socket in sockets.items())


def _of_holders(
    problems: Sequence[LostDevicesReport | LeaseDifferenceReport | MixedRequestReport],
) -> Iterable[str]:
    return (f"{problem.holder.partition(' ')[0]}: {problem.reason}" for problem in problems)


def cluster_problems(cluster: ClusterReport | None) -> Iterable[str]:
    """Yield a line for each problem with the API server or with another plugin."""
    if cluster is None:
        return
    if cluster.problem:
        yield f"API server: {cluster.problem}"
    yield from (
        f"API server, {use}: {problem}" for use, problem in cluster.features.items() if problem
    )
    yield from (f"{name}: {difference}" for name, difference in cluster.node_differences.items())
    if slices := cluster.resource_slices:
        if slices.problem:
            yield f"API server, ResourceSlices: {slices.problem}"
        for resource, name in slices.contested.items():
            also = f"the DeviceClass {name} has it too"
            yield f"{resource}: the device plugin offers it here, and {also}"
        if slices.classes_problem:
            yield f"API server, DeviceClasses: {slices.classes_problem}"
    if upgrade := cluster.present_upgrade:
        yield upgrade.summary
    for plugin in cluster.competing_plugins:
        contested = ", ".join(plugin.contested)
        more = f"; it may serve {contested} too" if contested else ""
        yield f"{plugin.program} runs on this node: pod {plugin.pod}{more}"


def _dra_problems(dra: DraReport | None) -> Iterable[str]:
    if dra is None:
        return
    if dra.problem:
        yield f"DRA driver {dra.driver}: {dra.problem}"
    yield from dra.crowded


def _cdi_problems(cdi: CdiReport | None) -> Iterable[str]:
    if cdi and cdi.problem:
        yield f"containers may not start: {cdi.problem}"
    if cdi and cdi.no_libraries:
        yield f"containers get no libraries of the driver by CDI: {cdi.no_libraries}"


def _mgctl_problems(mgctl: PodMgctlReport) -> Iterable[str]:
    if mgctl.in_pods and mgctl.problem:
        yield f"containers get no answers from mgctl: {mgctl.problem}"


def _arrow(before: object, after: object) -> str:
    old, new = ("-" if each in (None, "") else str(each) for each in (before, after))
    return old if old == new else f"{old} -> {new}"


def _change(change: str) -> Cell:
    return Cell(change, "" if change == "unchanged" else "bold yellow")


def _lease(lease: Plan) -> str:
    """Return who gives shares back: of a shared ResourceClaim, all containers."""
    first = lease["holder"] or "a pod that is being admitted"
    holders = ", ".join([first, *lease.get("sharers", ())])
    return f"{holders}: {lease['shares']} of {lease['resource'] or 'another name'}"


def resources_table(resources: Mapping[str, ResourceReport]) -> TextTable:
    """Return a table of the offered resources."""
    rows = table("RESOURCE", "CAPACITY", "ALLOCATABLE")

    for name, numbers in resources.items():
        rows.add(name, str(numbers.capacity), str(numbers.allocatable))
    if not resources:
        rows.add("nothing is offered", "", "")
    return rows


def gpus_table(gpus: Sequence[GpuReport], *more: str, health: Health | None = None) -> TextTable:
    """Return a table of the GPUs, with `more` of OFFERS, HELD, OWNER, POOL, WHY.

    A narrow terminal leaves out the columns of `_DROPPED`, so that no word is broken.
    """
    columns: dict[str, Callable[[GpuReport], str | Cell | Sequence[Cell]]] = {
        "GPU": lambda gpu: str(gpu.index),
        "PRODUCT": lambda gpu: gpu.product.removeprefix("NVIDIA "),
        "MEMORY": lambda gpu: "-" if gpu.memory_mib is None else f"{gpu.memory_mib} MiB",
        "OFFERS": lambda gpu: _offers(gpu.shares),
        "HELD": lambda gpu: held_bars(gpu.shares),
        "OWNER": lambda gpu: gpu.owner or "idle",
        "HEALTH": health or full_health,
        "POOL": lambda gpu: gpu.pool or "-",
        "WHY": lambda gpu: gpu.pool_reason,
    }
    shown = [name for name in columns if name in {*_ALWAYS, *more}]
    rows = table(*shown)
    rows.droppable = _DROPPED
    if health is not None:
        rows.folded = frozenset(shown) - _WHOLE - {"HEALTH"}  # the reasons stand below the table
    for gpu in gpus:
        rows.add(*(columns[name](gpu) for name in shown))
    return rows


def _mixed_gpus(gpus: Sequence[GpuReport]) -> Sequence[Cell]:
    """Return a line for the GPUs of each set of several backends."""
    found: dict[str, list[str]] = {}
    for gpu in gpus:
        if len(gpu.backends) > 1:
            found.setdefault(", ".join(gpu.backends), []).append(str(gpu.index))

    return [
        Cell(
            f"GPU {', '.join(indices)}: {backends} share it. The first pod on an idle GPU chooses "
            "the backend, which keeps the GPU until its last pod ends."
        )
        for backends, indices in found.items()
    ]


def _turns(gpus: Sequence[GpuReport]) -> Sequence[Cell]:
    """Return a line for the idle GPUs of each turn: who offers them now, and who next."""
    found: dict[str, list[str]] = {}
    for gpu in gpus:
        if (turn := gpu.turn) is None:
            continue
        text = f"offered by {turn.backend} now"
        if turn.next not in ("", turn.backend):
            text += f", by {turn.next} in {turn.next_in:g} s"
        found.setdefault(text, []).append(str(gpu.index))

    return [
        Cell(f"GPU {', '.join(indices)}: idle, {text}, because several backends share it")
        for text, indices in found.items()
    ]


def _in_no_pool(gpus: Sequence[GpuReport]) -> Sequence[Cell]:
    """Return a line for the GPUs that no pool has for one reason."""
    found: dict[str, list[str]] = {}
    for gpu in gpus:
        if gpu.pool is None:
            found.setdefault(gpu.pool_reason, []).append(str(gpu.index))
    return [Cell(f"GPU {', '.join(indices)}: {reason}") for reason, indices in found.items()]


def _unused_pools(pools: Mapping[str, str]) -> Sequence[Cell]:
    return [Cell(f"pool {name} has no GPU here: {why}") for name, why in pools.items()]


def _memory_policies(policies: Mapping[str, str]) -> Sequence[Cell]:
    return [
        Cell(
            f"pool {name}: {_POLICIES.get(policy, 'memory')} (policy {policy}); "
            "compute is not limited"
        )
        for name, policy in policies.items()
    ]


def _topology(explained: Explanation) -> Sequence[Part]:
    """Return the matrix of connections, in `nvidia-smi topo -m`'s words, and a legend."""
    gpus, matrix = explained.gpus, explained.topology
    rows = table("GPU", *(str(gpu.index) for gpu in gpus), "NUMA", "PCI")

    for gpu, connections in zip(gpus, matrix, strict=True):
        numa = "-" if gpu.numa_node is None else str(gpu.numa_node)
        rows.add(str(gpu.index), *connections, numa, gpu.pci_bus_id or "-")

    seen = {connection.rstrip("0123456789") for row in matrix for connection in row}
    return (rows, *(Cell(f"{word:<5} {text}") for word, text in _LEGEND.items() if word in seen))


def leases_table(leases: Sequence[LeaseReport]) -> TextTable:
    """Return a table of the leases: containers, resource, number of shares, GPU."""
    rows = table("POD (CONTAINER)", "RESOURCE", "SHARES", "GPU")

    for lease in leases:
        claim = f"ResourceClaim {lease.resource_claim}" if lease.resource_claim else ""
        unnamed = claim or "not listed by the kubelet yet"
        rows.add(
            [Cell(holder) for holder in lease.holders or [unnamed]],
            lease.resource,
            str(lease.shares),
            str(lease.gpu),
        )
    if not leases:
        rows.add("no share is held", "", "", "")
    return rows


def held_bars(shares: Mapping[str, SharesReport]) -> Sequence[Cell]:
    """Return a bar for each resource of a GPU: held, free, and dots for unavailable."""
    bars = []
    for resource, numbers in shares.items():
        full = round(_BAR_WIDTH * numbers.held / max(numbers.capacity, 1))
        unavailable = 0 if numbers.held or numbers.free else _BAR_WIDTH
        bar = (
            "\N{FULL BLOCK}" * full
            + "\N{LIGHT SHADE}" * (_BAR_WIDTH - full - unavailable)
            + "\N{MIDDLE DOT}" * unavailable
        )
        name = f" {_short(resource)}" if len(shares) > 1 else ""
        bars.append(Cell(f"{bar} {numbers.held}/{numbers.capacity}{name}"))
    return bars or [Cell("-")]


def _offers(shares: Mapping[str, SharesReport]) -> Sequence[Cell]:
    """Return the number of shares of each resource, a line each."""
    lines = [Cell(f"{numbers.capacity} {_short(name)}") for name, numbers in shares.items()]
    return lines or [Cell("-")]


def _short(resource: str) -> str:
    return resource.rpartition("/")[2]


def table(*columns: str, whole: Iterable[str] = ()) -> TextTable:
    """Return an empty table that folds long cells, but those of `whole` columns."""
    return TextTable(columns, folded=frozenset(columns) - _WHOLE - frozenset(whole))


def show_removals(removals: Sequence["Removal"], notes: Sequence[str], *, wanted: bool) -> None:
    """Print each leftover with its result; `wanted` is whether to remove it."""
    table = TextTable(("RESULT", "WHAT", "WHERE", "REASON"), folded=frozenset(("WHERE", "REASON")))
    for each in removals:
        style = {"removed": "green", "stays": "yellow"}.get(each.result, "")
        table.add(str(each.result), each.kind, each.where, each.reason, style=style)
    parts: list[TextTable | str] = [table] if removals else ["nothing of metagpu is left here"]
    show(*parts, *notes, _removal_summary(removals, wanted=wanted))


def _removal_summary(removals: Sequence["Removal"], *, wanted: bool) -> str:
    counted = Counter[str](removal.result for removal in removals)
    if not removals:
        return ""
    if not wanted:
        return f"{counted['found']} to remove: run this command again with --yes"
    left = f", {counted['stays']} stay" if counted["stays"] else ""
    return f"{counted['removed']} removed{left}"
