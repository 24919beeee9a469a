"""Nodes without a kubelet, kept by kwok: they are ready, and pods that land there run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.go_programs import KWOK_STAGES
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.programs import Program
from tests.e2e.rig.tools import Tools
from tests.e2e.rig.waiting import wait_for

MARK = {"metagpu-e2e/kwok": "true"}
READY_S = 60.0
LEASE_S = 40


@contextmanager
def kwok_nodes(node: Node, *documents: Document) -> Iterator[None]:
    """Keep these Nodes, of `node_object`, until the block ends, with their pods."""
    names = [document["metadata"]["name"] for document in documents]
    tools = Tools.cached()
    stages = [tools.path(f"{Path(stage).name}.yaml") for stage in KWOK_STAGES]
    program = Program(
        "kwok",
        [
            tools.path("kwok"),
            f"--kubeconfig={node.kubeconfig}",
            f"--manage-nodes-with-label-selector={next(iter(MARK))}",
            f"--node-lease-duration-seconds={LEASE_S}",
            *(f"--config={stage}" for stage in stages),
        ],
        logs=node.paths.logs,
        pids=node.paths.pids,
    )
    program.start()
    try:
        node.kubectl.apply(*documents)
        for name in names:
            wait_for(f"{name} to be ready", lambda: _ready(node, name), within_s=READY_S)  # noqa: B023 - called at once
        yield
    finally:
        for name in names:
            node.kubectl(
                *("delete", "pods", "--all-namespaces", "--force", "--grace-period=0"),
                f"--field-selector=spec.nodeName={name}",
            )
            node.kubectl("delete", "node", name)
        program.stop()


def node_object(
    name: str, amounts: Mapping[str, str], labels: Mapping[str, str] = MappingProxyType({})
) -> Document:
    """Return a Node that kwok keeps, with allocatable AMOUNTS."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**labels, **MARK}},
        "status": {"capacity": dict(amounts), "allocatable": dict(amounts)},
    }


def _ready(node: Node, name: str) -> bool:
    """Return whether kwok has made the Node ready, and the controllers lifted their taint."""
    document = node.kubectl.get("node", name)
    if taints := document["spec"].get("taints"):
        raise RigError(f"{name} has {taints}")
    ready = [
        condition
        for condition in document["status"].get("conditions", ())
        if condition["type"] == "Ready"
    ]
    return bool(ready) and ready[0]["status"] == "True"
