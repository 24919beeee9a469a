"""MIG devices on demand by limits on one GPU and by claims on another, on a real kubelet."""

from collections.abc import Iterator

import pytest
import yaml

from tests.e2e.claims import node_of_both_apis, page_documents, pod, resource_claim
from tests.e2e.cluster import NAMESPACE, Cluster
from tests.e2e.fake_node import DRIVER, exactly
from tests.e2e.instances import PREFIX, MigNode, mig_pod
from tests.e2e.rig.daemon import Daemon
from tests.e2e.rig.node import Node
from tests.e2e.rig.waiting import wait_for

PROFILE = "1g.5gb"
GPUS = "{model: a100-40gb, count: 2, mig: true, provisioning: {duration: 100ms}}"
SETTLED_S = 90.0


def page_configuration() -> str:
    """Return the configuration that the page has for pools of both APIs."""
    (found,) = page_documents()["Pools of both APIs"]
    return yaml.safe_dump({key: value for key, value in found.items() if key != "metadata"})


@pytest.fixture
def both(node: Node, daemon: Daemon, account: tuple[str, ...]) -> Iterator[MigNode]:
    """Run the daemon with GPU 0 by the device plugin API, and GPU 1 by DRA."""
    cluster = Cluster(node, daemon)
    with node_of_both_apis(cluster, account, page_configuration(), GPUS, 0, 1) as live_mig_node:
        yield live_mig_node
        cluster.clear()
        cluster.kubectl("delete", "resourceclaims", "--all", "--all-namespaces")
        wait_for("leases to end", lambda: not daemon.status()["leases"], within_s=SETTLED_S)


def test_pods_by_limits_and_by_claims_have_their_instances(both: MigNode) -> None:
    """Each runs with an instance of its own GPU; the Node counts only what limits can have."""
    cel = f"device.attributes['{DRIVER}'].profile == '{PROFILE}'"
    request = exactly("gpu", "mig.metagpu.io", 1, selectors=[{"cel": {"expression": cel}}])
    cluster = both.cluster
    cluster.kubectl.apply(
        mig_pod("by-limits", f"{PREFIX}{PROFILE}"),
        resource_claim("by-claim", request),
        pod("by-claim", "by-claim"),
    )
    cluster.await_running(within_s=SETTLED_S)

    instances = [gpu["instances"] for gpu in cluster.daemon.simulated_gpus()]
    assert [
        [document["placement"].partition("@")[0] for document in of_gpu] for of_gpu in instances
    ] == [
        [PROFILE],
        [PROFILE],
    ]
    wait_for(
        "the kubelet to list both pods",
        lambda: (
            {str(lease["holder"]): lease["gpu"] for lease in cluster.daemon.status()["leases"]}
            == {f"{NAMESPACE}/by-limits (main)": 0, f"{NAMESPACE}/by-claim (main)": 1}
        ),
        within_s=SETTLED_S,
    )
    [device] = instances[0][0]["uuids"]
    environment = cluster.inspect_container("by-limits").environment
    assert environment["NVIDIA_VISIBLE_DEVICES"] == device
    assert cluster.inspect_container("by-claim").gpu_devices == {"nvidia1"}
    assert cluster.node.resource("example.com/mig-small") == (None, None)
