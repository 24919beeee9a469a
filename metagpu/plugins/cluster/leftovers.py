"""Leftovers of this node at the API server."""

from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from metagpu.core.contracts.leftovers import Leftover
from metagpu.core.contracts.programs import RunCommand
from metagpu.core.errors import ClusterError
from metagpu.core.model.shares import ResourceName
from metagpu.plugins.cluster.label_sync import GROUP, NodeFeature
from metagpu.plugins.cluster.node_object import (
    NODES,
    PROBLEM_CONDITION,
    RESET_CONDITION,
    TAINTS,
    KubeObject,
    owned_labels,
)
from metagpu.plugins.cluster.resource_slices import SLICES, is_own
from metagpu.plugins.cluster.settings import ClusterSettings, ClusterTiming
from metagpu.plugins.cluster.watch import NodePatcher, WatchedObject

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

_ABSENT: Final = frozenset((403, 404))
"""Answers about objects where there are none of ours: no such kind, or no right to ask."""
_COUNTED: Final = (
    "the kubelet counts it for 5 minutes after the daemon's end; run this command again then"
)


@asynccontextmanager
async def connected(
    settings: ClusterSettings, run_command: RunCommand, timing: ClusterTiming
) -> AsyncIterator["KubeClient"]:
    """Open a client of the API server while the block lasts."""
    from metagpu.plugins.cluster.client import open_client  # noqa: PLC0415 - 12 MB

    async with open_client(settings.kubeconfig, run_command, timing) as client:
        yield client


async def find_at_api_server(
    client: "KubeClient",
    settings: ClusterSettings,
    resources: Collection[ResourceName],
    registered: Collection[ResourceName] | None,
) -> list[Leftover]:
    """Find what metagpu wrote about this node.

    Args:
        client: the API server's.
        settings: the node's name, and the namespace of our own objects.
        resources: those that the configuration offers.
        registered: those that the kubelet still counts, `None` where that is unknown.

    Raises:
        ClusterError: the API server does not answer, or refuses.
    """
    read = await _read_node(client, settings.node)
    node = WatchedObject(client, NODES, settings.node, lambda: None)
    node.on_list([] if read is None else [read])
    carrier, found = NodeFeature(client, node, settings.namespace), list[Leftover]()
    if read is not None:
        patcher = NodePatcher(client, node)
        found = [*_on_node(patcher, read), *_amounts(patcher, read, resources, registered)]
    if await _exists(client, carrier):
        where = f"{carrier.namespace}/{carrier.name}"
        # Before the labels: the master of NFD removes those of the object.
        found.insert(0, Leftover("NodeFeature", where, carrier.remove))
    return [*found, *await _slices(client, settings.node)]


async def _slices(client: "KubeClient", node: str) -> list[Leftover]:
    """Return the ResourceSlices of this node that metagpu wrote."""
    query = {"fieldSelector": f"spec.nodeName={node}"}
    try:
        answer = await client.call("GET", SLICES, query=query)
    except ClusterError as error:
        if error.status in _ABSENT:
            return []
        raise
    names = [item["metadata"]["name"] for item in answer.get("items") or () if is_own(item)]
    return [
        Leftover("ResourceSlice", name, partial(_delete, client, f"{SLICES}/{name}"))
        for name in sorted(names)
    ]


async def _delete(client: "KubeClient", path: str) -> None:
    try:
        await client.call("DELETE", path)
    except ClusterError as error:
        if error.status not in _ABSENT:
            raise


def _on_node(patcher: NodePatcher, node: KubeObject) -> Iterator[Leftover]:
    where = f"Node {patcher.node.name}"
    if labels := sorted(owned_labels(node) & (node["metadata"].get("labels") or {}).keys()):
        remove = partial(patcher.apply, "", {"metadata": {"labels": {}}})
        yield Leftover("labels", f"{where}: {', '.join(labels)}", remove)

    shown = {condition["type"] for condition in (node.get("status") or {}).get("conditions") or ()}
    if conditions := sorted(shown & {PROBLEM_CONDITION, RESET_CONDITION}):
        remove = partial(patcher.apply, "/status", {"status": {"conditions": []}}, force=True)
        yield Leftover("conditions", f"{where}: {', '.join(conditions)}", remove)

    taints = (node.get("spec") or {}).get("taints") or []
    if ours := sorted({taint.get("key") for taint in taints} & TAINTS):
        yield Leftover("taint", f"{where}: {', '.join(ours)}", partial(_remove_taints, patcher))


async def _remove_taints(patcher: NodePatcher) -> None:
    """Write the list without ours, only over the version that was read."""
    node = await _read_node(patcher.client, patcher.node.name)
    taints = (node and (node.get("spec") or {}).get("taints")) or []
    kept = [taint for taint in taints if taint.get("key") not in TAINTS]
    if node is not None and len(kept) != len(taints):
        version = node["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version}, "spec": {"taints": kept or None}}
        await patcher.patch("", body)


async def _read_node(client: "KubeClient", name: str) -> KubeObject | None:
    """Return the Node, `None` if there is none; the right to `list` is enough."""
    answer = await client.call("GET", NODES, query={"fieldSelector": f"metadata.name={name}"})
    items: list[KubeObject] = answer.get("items") or []
    return items[0] if items else None


def _amounts(
    patcher: NodePatcher,
    node: KubeObject,
    resources: Collection[ResourceName],
    registered: Collection[ResourceName] | None,
) -> Iterator[Leftover]:
    """Yield the numbers of our resources, which a kubelet sets to 0 and never removes."""
    status = node.get("status") or {}
    for name in sorted(resources):
        if name in (status.get("capacity") or {}) or name in (status.get("allocatable") or {}):
            numbers = {"capacity": {name: None}, "allocatable": {name: None}}
            counted = registered is None or name in registered
            yield Leftover(
                "amounts",
                f"Node {patcher.node.name}: {name}",
                partial(patcher.patch, "/status", {"status": numbers}),
                _COUNTED if counted else "",
            )


async def _exists(client: "KubeClient", carrier: NodeFeature) -> bool:
    path = f"{GROUP}/namespaces/{carrier.namespace}/nodefeatures/{carrier.name}"
    try:
        await client.call("GET", path)
    except ClusterError as error:
        if error.status in _ABSENT:
            return False
        raise
    return True
