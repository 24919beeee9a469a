"""The demo's story and the simulated node, drawn."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from metagpu import tables
from metagpu.core.gpu import MIB
from metagpu.sim.view import NodeView


def show(story: Mapping[str, Any]) -> None:
    """Draw what `demo` tells."""
    out = tables.console()
    fault = story["fault"]

    node = story["node"]
    _heading(out, f"A node with {node['gpus']} offers {node['capacity']} shares, 100 a GPU")
    out.print(_pods(story["pods"], story["before"]["gpus"]))
    for pod in story["pods"]:
        if not pod["admitted"]:
            out.print(Text(f"{pod['pod']}: {pod['message']}", style="yellow"))

    _heading(out, f"GPU {fault['gpu']} reports XID {fault['xid']}")
    out.print(tables.gpus_table(story["after"]["gpus"], "HELD"))
    out.print(
        f"Allocatable fell from {node['capacity']} to {fault['allocatable']}: the shares of "
        f"GPU {fault['gpu']} and of no other. The {len(fault['running'])} running pods stay."
    )
    out.print(
        "It comes back when NVML asks for no recovery action and its checks pass for a while, or "
        f"by `metagpu acknowledge {fault['gpu']}`."
    )

    _heading(out, f"In a mixed pool of {story['pool']['gpus']} an idle GPU goes to who asks first")
    out.print(_steps(story["pool"]["steps"], _owners))

    _heading(out, f"On {story['mig']['gpus']} MIG instances are made as pods ask for them")
    out.print(_steps(story["mig"]["steps"], _slices))
    out.print(
        "What nobody holds any more stays warm for a while, for the next pod of its size, and goes "
        "at once when a pod wants its slices."
    )


def _heading(out: Console, text: str) -> None:
    out.print()
    out.print(Text(text, style="bold"))


def _pods(pods: Sequence[Mapping[str, Any]], gpus: Sequence[Mapping[str, Any]]) -> Table:
    index = {gpu["uuid"]: str(gpu["index"]) for gpu in gpus}
    table = tables.table("POD", "RESOURCE", "SHARES", "GPUS", "MEMORY")

    for pod in pods:
        seen, memory = "refused", "-"
        if pod["admitted"]:
            seen = ", ".join(index[gpu] for gpu in pod["gpus"])
            memory = f"{pod['memoryMiB']} MiB"
        table.add_row(pod["pod"], pod["resource"], str(pod["shares"]), seen, memory)
    return table


def _steps(
    steps: Sequence[Mapping[str, Any]], cells: Callable[[Mapping[str, Any]], Sequence[Text]]
) -> Table:
    """Draw each GPU after each step, and how many shares of each kind are on offer."""
    first = steps[0]
    gpus = [f"GPU {gpu['index']}" for gpu in first["gpus"]]
    names = [name.rpartition("/")[2].removeprefix("mig-") for name in first["allocatable"]]
    table = tables.table("WHAT HAPPENS", *gpus, *names)

    for step in steps:
        counts = [Text(str(count)) for count in step["allocatable"].values()]
        table.add_row(step["what"], *cells(step), *counts)
    return table


def _owners(step: Mapping[str, Any]) -> Sequence[Text]:
    """Say who has each GPU."""
    return [
        Text(gpu["owner"], style="bold") if gpu["owner"] else Text("idle", style="dim")
        for gpu in step["gpus"]
    ]


def _slices(step: Mapping[str, Any]) -> Sequence[Text]:
    """Draw the memory slices of each GPU by the instance that is there: `3 3 3 3 · · 1 ·`."""
    return [Text(" ".join(str(n or "·") for n in sizes), no_wrap=True) for sizes in step["slices"]]


def show_node(node: NodeView) -> None:
    """Draw a simulated node."""
    table = tables.table("GPU", "BOARD", "STATE", "NEEDS", "MEMORY", "PROCESSES", "MIG")

    for gpu in node.gpus:
        processes = ", ".join(
            f"{p.pid} ({'?' if p.memory is None else p.memory // MIB} MiB)" for p in gpu.processes
        )
        memory = f"{gpu.used // MIB} of {gpu.memory // MIB} MiB"
        cut = ", ".join(f"{it.gi}: {it.place}" for it in gpu.instances) or gpu.mig
        table.add_row(
            *(str(gpu.index), gpu.board, gpu.state, gpu.recovery_action, memory, processes, cut)
        )
    out = tables.console()
    out.print(f"driver {node.driver}, {'loaded' if node.driver_loaded else 'not loaded'}")
    out.print(table)
