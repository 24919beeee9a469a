"""The demo's story and the simulated node, drawn."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from metagpu import tables
from metagpu.core.gpu import MIB
from metagpu.sim.view import NodeView


def show(story: Mapping[str, Any]) -> None:
    """Draw what `demo` tells."""
    fault = story["fault"]

    node = story["node"]
    _heading(f"A node with {node['gpus']} offers {node['capacity']} shares, 100 a GPU")
    tables.show(_pods(story["pods"], story["before"]["gpus"]))
    for pod in story["pods"]:
        if not pod["admitted"]:
            tables.show(Text(f"{pod['pod']}: {pod['message']}", style="yellow"))

    _heading(f"GPU {fault['gpu']} reports XID {fault['xid']}")
    tables.show(tables.gpus_table(story["after"]["gpus"], "HELD"))
    tables.show(
        f"Allocatable fell from {node['capacity']} to {fault['allocatable']}: the shares of "
        f"GPU {fault['gpu']} and of no other. The {len(fault['running'])} running pods stay."
    )
    tables.show(
        "It comes back when NVML asks for no recovery action and its checks pass for a while, or "
        f"by `metagpu acknowledge {fault['gpu']}`."
    )

    _heading(f"In a mixed pool of {story['pool']['gpus']} an idle GPU goes to who asks first")
    tables.show(_steps(story["pool"]["steps"], _owners))

    _heading(f"On {story['mig']['gpus']} MIG instances are made as pods ask for them")
    tables.show(_steps(story["mig"]["steps"], _slices))
    tables.show(
        "What nobody holds any more stays warm for a while, for the next pod of its size, and goes "
        "at once when a pod wants its slices."
    )


def _heading(text: str) -> None:
    tables.show("", Text(text, style="bold"))


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
    tables.show(f"driver {node.driver}, {'loaded' if node.driver_loaded else 'not loaded'}")
    tables.show(table)
