"""MIG devices that several ResourceClaims share, by time-slices and by MPS, on a real kubelet."""

import shutil
from collections.abc import Iterator

import pytest

from tests.e2e.claims import pod, resource_claim
from tests.e2e.cluster import Cluster
from tests.e2e.fake_node import capacity, dra_objects, exactly
from tests.e2e.instances import MigNode, mig_node
from tests.e2e.rig.daemon import Daemon
from tests.e2e.rig.device_files import make_mig_device_files
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.waiting import wait_for

CONFIGURATION = """\
version: metagpu/v1
pools:
  - name: slices
    gpus: {index: 0}
    api: dra
    backends: [{backend: mig, layout: {3g.20gb: 2}, replicas: 2}]
  - name: mps
    gpus: {index: 1}
    api: dra
    backends: [{backend: mig, layout: {3g.20gb: 2}, mps: {replicas: 4}}]
"""
GPUS = "{model: a100-40gb, count: 2, mig: true, provisioning: {duration: 100ms}}"
NODE = f"gpus: [{GPUS}]\n"
SETTLED_S = 90.0


@pytest.fixture
def shared_node(node: Node, daemon: Daemon, account: tuple[str, ...]) -> Iterator[MigNode]:
    """Run the daemon with two GPUs of two instances each, which claims share."""
    cluster = Cluster(node, daemon)
    cluster.clear()
    make_mig_device_files(daemon.device_root, [0, 1])
    try:
        with (
            dra_objects(cluster.kubectl),
            # The account's options have GPUs too, and the last ones count.
            mig_node(
                cluster, CONFIGURATION, GPUS, *account, *daemon.simulate(NODE)
            ) as live_mig_node,
        ):
            wait_for("four MIG devices", lambda: made(live_mig_node), within_s=SETTLED_S)
            yield live_mig_node
            cluster.clear()
            cluster.kubectl("delete", "resourceclaims", "--all", "--all-namespaces")
            wait_for("leases to end", lambda: not daemon.status()["leases"], within_s=SETTLED_S)
    finally:
        shutil.rmtree(daemon.device_root / "proc")
        shutil.rmtree(daemon.device_root / "dev" / "nvidia-caps")


def made(node: MigNode) -> bool:
    """Return whether both GPUs have their layout.

    Raises:
        RigError: they have not; the text is what the daemon says of them.
    """
    devices = node.observe().devices
    if len(devices) != 4:
        raise RigError(f"there is {devices}; {node.cluster.daemon.status()['gpus']}")
    return True


def shared(name: str, way: str, parts: int = 1) -> tuple[Document, Document]:
    """Return a claim of parts of any MIG device that is shared that way, and its pod."""
    request = exactly("gpu", "mig.metagpu.io", capacity=capacity(**{way: parts}))
    return resource_claim(name, request), pod(name, name)


def test_claims_share_mig_devices(shared_node: MigNode) -> None:
    """Two slices and four parts by MPS are one instance each; the next claim gets another one."""
    cluster = shared_node.cluster
    slices, parts = [f"slice-{n}" for n in range(3)], [f"part-{n}" for n in range(3)]
    cluster.kubectl.apply(
        *(document for name in slices for document in shared(name, "slices")),
        *(document for name in parts for document in shared(name, "shares", 2)),
    )
    cluster.await_running(within_s=SETTLED_S)
    held = {name: cluster.inspect_container(name).environment for name in (*slices, *parts)}
    seen = {name: cluster.execute(name, "ls", "/dev/nvidia-caps") for name in held}
    for names in (slices, parts):
        devices = [seen[name] for name in names]
        assert sorted(map(devices.count, set(devices))) == [1, 2], devices

    assert len(set(seen.values())) == 4
    for name in parts:
        assert held[name]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
        assert held[name]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"].startswith("0=")
        assert "CUDA_MPS_PIPE_DIRECTORY" in held[name]
    assert not any("CUDA_MPS_PIPE_DIRECTORY" in held[name] for name in slices)
    leases = cluster.daemon.status()["leases"]
    assert sum(lease["shares"] for lease in leases) == 3 + 3 * 2
