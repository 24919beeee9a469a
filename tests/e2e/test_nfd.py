"""Node labels by a real master of Node Feature Discovery."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.joined import SYSTEM_NAMESPACE, Joined, joined
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.host_daemon import HostDaemon
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.programs import Program
from tests.e2e.rig.tools import Tools
from tests.e2e.rig.waiting import wait_for

KIND = "nodefeatures.nfd.k8s-sigs.io"
WRITTEN = "nfd.node.kubernetes.io/feature-labels"
"""NFD's annotation on a Node with the names of the labels that NFD has written."""
SOON_S = 30.0


@pytest.fixture
def nfd(node: Node, tmp_path: Path) -> Iterator[Program]:
    """Run NFD's master with its kinds; remove them afterwards."""
    tools = Tools.cached()
    kinds = Path(tools.path("nfd-api-crds.yaml")).read_text()
    node.kubectl.apply(kinds)
    node.kubectl("wait", "crd", KIND, "--for=condition=Established", "--timeout=30s")
    master = Program(
        "nfd-master",
        [
            *(tools.path("nfd-master"), f"-kubeconfig={node.kubeconfig}"),
            *("-metrics=0", "-grpc-health=0", f"-config={tmp_path}/none.conf"),
        ],
        logs=node.paths.logs,
        pids=node.paths.pids,
        environment={"NODE_NAME": node.name, "KUBERNETES_NAMESPACE": SYSTEM_NAMESPACE},
    )
    master.start()
    yield master
    master.stop()
    node.kubectl("delete", "-f", "-", feed=kinds)


@pytest.fixture
def member(
    node: Node, daemon: HostDaemon, account: tuple[str, ...], nfd: Program
) -> Iterator[Joined]:
    """Start the daemon with the API server, where NFD runs; restore it afterwards."""
    assert nfd.alive
    daemon.stop()  # a daemon that runs has looked for NFD already
    with joined(Cluster(node, daemon), account) as member:
        yield member
        daemon.stop()


def labels_by_nfd(member: Joined) -> Document:
    """Wait until NFD has written all labels of metagpu's object; return them."""

    def probe() -> Document:
        node = member.kubectl.get("node", member.node.name)["metadata"]
        wanted: Document = member.kubectl.get(
            KIND, f"metagpu-{member.node.name}", SYSTEM_NAMESPACE
        )["spec"]["labels"]
        written = node.get("annotations", {}).get(WRITTEN, "").split(",")
        if not wanted or set(written) != set(wanted):
            raise RigError(f"NFD has written {written}, the object has {wanted}")
        if lacking := wanted.items() - node["labels"].items():
            raise RigError(f"the Node lacks {lacking}")
        return wanted

    return wait_for("the labels to be on the Node", probe, within_s=SOON_S)


def test_nfd_writes_the_labels(member: Joined) -> None:
    """NFD writes the labels of our object, follows their change, and removes them with it."""
    before = labels_by_nfd(member)
    member.profiles(
        fewer="version: metagpu/v1\npools: [{name: all, gpus: {index: 0-1}, "
        "backends: [{backend: timeslice, replicas: 4}]}]\n"
    )

    def changed() -> Document | None:
        now = labels_by_nfd(member)
        return now if now != before else None

    member.label("fewer")
    after = wait_for("the labels to change", changed, within_s=SOON_S)

    member.daemon.stop()
    member.kubectl("delete", KIND, f"metagpu-{member.node.name}", f"--namespace={SYSTEM_NAMESPACE}")
    wait_for(
        "the labels to be removed", lambda: not after.keys() & member.labels.keys(), within_s=SOON_S
    )
