"""The output of `metagpu sim`: one line, a table, JSON or YAML."""

from collections.abc import Sequence
from typing import Final

import msgspec

from metagpu.core.model.gpu import MIB
from metagpu.display.options import encode
from metagpu.display.status import show, table
from metagpu.display.table import Cell
from metagpu.sim.cluster.views import (
    ClaimView,
    ClusterNodeView,
    ClusterReply,
    EventView,
    PodProcessView,
    PodView,
)
from metagpu.sim.commands.cluster_commands import counted
from metagpu.sim.commands.node_commands import SimReply
from metagpu.sim.commands.view import NodeView

_FEW: Final = 2
"""Devices of a pod that are named; of more, their number is shown."""


def print_reply(reply: SimReply | ClusterReply, form: str, *, as_table: bool) -> None:
    """Print a reply: a table, JSON or YAML for what was listed, else a line."""
    if isinstance(reply, SimReply):
        shown: object = reply.node
    else:
        shown = next(
            (
                views
                for views in (
                    *(reply.pods, reply.claims, reply.node, reply.events),
                    reply.processes,
                )
                if views is not None
            ),
            None,
        )

    if form != "table":
        print(encode(msgspec.to_builtins(shown), form), end="")  # noqa: T201 - the output of a command
    elif not as_table:
        print(reply.message)  # noqa: T201 - as above
    elif isinstance(shown, NodeView):
        show_node(shown)
    elif isinstance(shown, ClusterNodeView):
        show_cluster_node(shown)
    elif isinstance(reply, ClusterReply) and reply.events is not None:
        show_events(reply.events)
    elif isinstance(reply, ClusterReply) and reply.claims is not None:
        show_claims(reply.claims)
    elif isinstance(reply, ClusterReply) and reply.processes is not None:
        show_processes(reply.processes)
    elif isinstance(reply, ClusterReply):
        show_pods(reply.pods or ())


def show_pods(pods: Sequence[PodView]) -> None:
    """Print pods, with the reason of each that does not run."""
    rows = table("POD", "PHASE", "REQUEST", "GPU", "DEVICES", "REASON")
    for pod in pods:
        why = ": ".join(text for text in (pod.reason, pod.message) if text)
        rows.add(
            str(pod),
            Cell(pod.phase, "red" if pod.phase == "Failed" else ""),
            [Cell(part) for part in counted(pod.resources).split(", ")],
            ", ".join(map(str, pod.gpus)) or "-",
            [Cell(_devices(ids)) for ids in pod.devices.values()] or "-",
            why,
        )
    if not pods:
        rows.add("no pod", "", "", "", "", "")
    show(rows)


def show_processes(processes: Sequence[PodProcessView]) -> None:
    """Print the processes in pods."""
    rows = table("PID", "POD", "CONTAINER", "GPU", "MEMORY", "LOAD")
    for each in processes:
        place = each.title, each.container, str(each.gpu)
        rows.add(str(each.pid), *place, each.amount, f"{each.load} %")
    if not processes:
        rows.add("no process", "", "", "", "", "")
    show(rows)


def show_claims(claims: Sequence[ClaimView]) -> None:
    """Print ResourceClaims, with the reason of each that waits."""
    rows = table("CLAIM", "STATE", "DEVICES", "NODE", "PODS", "REASON")
    for claim in claims:
        rows.add(
            str(claim),
            claim.state,
            [Cell(str(device)) for device in claim.devices] or "-",
            claim.node or "-",
            ", ".join(claim.pods) or "-",
            claim.message,
        )
    if not claims:
        rows.add("no claim", "", "", "", "", "")
    show(rows)


def show_cluster_node(node: ClusterNodeView) -> None:
    """Print the Node: resources, conditions, taints and labels."""
    resources = table("RESOURCE", "CAPACITY", "ALLOCATABLE", "REQUESTED")
    for name, view in node.resources.items():
        resources.add(name, str(view.capacity), str(view.allocatable), str(view.requested))
    conditions = table("CONDITION", "STATUS", "REASON", "MESSAGE")
    for condition in node.conditions:
        conditions.add(condition.type, condition.status, condition.reason, condition.message)
    labels = table("LABEL", "VALUE")
    for name, value in node.labels.items():
        labels.add(name, value)
    state = "its kubelet runs" if node.kubelet_running else "its kubelet does not run"
    taints = f"; taints: {', '.join(node.taints)}" if node.taints else ""
    show(f"node {node.name}: {state}{taints}", resources, conditions, labels)


def show_events(events: Sequence[EventView]) -> None:
    """Print Events, the oldest first."""
    rows = table("TYPE", "REASON", "OBJECT", "COUNT", "NOTE")
    rows.droppable = ("COUNT",)
    for event in events:
        style = "yellow" if event.type == "Warning" else ""
        rows.add(Cell(event.type, style), event.reason, event.object, str(event.count), event.note)
    if not events:
        rows.add("no Event", "", "", "", "")
    show(rows)


def _devices(ids: Sequence[str]) -> str:
    """Return the parts of GPUs that some ids name, or how many they are."""
    if len(ids) > _FEW:
        return f"{len(ids)} shares"
    parts = (
        "whole" if share_id.startswith("GPU-") and "::" not in share_id else share_id
        for share_id in ids
    )
    return ", ".join(part.rpartition("::")[2] for part in parts)


def show_node(node: NodeView) -> None:
    """Print a simulated node."""
    rows = table("GPU", "MODEL", "STATE", "RECOVERY", "MEMORY", "PROCESSES", "MIG")

    for gpu in node.gpus:
        processes = ", ".join(
            f"{p.pid} ({'?' if p.memory is None else p.memory // MIB} MiB)" for p in gpu.processes
        )
        memory = f"{gpu.used // MIB} of {gpu.memory // MIB} MiB"
        mig = (
            ", ".join(f"{instance.gi}: {instance.placement}" for instance in gpu.instances)
            or gpu.mig
        )
        rows.add(
            *(str(gpu.index), gpu.model, gpu.state, gpu.recovery_action, memory, processes, mig)
        )
    show(f"driver {node.driver}, {'loaded' if node.driver_loaded else 'not loaded'}", rows)
