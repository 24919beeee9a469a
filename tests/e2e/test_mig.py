"""MIG on a real kubelet: fixed layouts, instances on demand, and faults in between."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import IDLE_COMMAND, NAMESPACE, Cluster
from tests.e2e.instances import PREFIX, SETTLED_S, UNHELD, MigNode, failure, mig_node, mig_pod
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.rig.waiting import wait_for

FILES = REPOSITORY / "tests" / "compat" / "files"
"""CERN's ConfigMaps as its article on GPU concurrency prints them."""
LAYOUT_LABEL, LAYOUT = "nvidia.com/mig.config", "2x2g.10gb-3x1g.5gb"
FOUR = "{model: a100-40gb, count: 4, mig: true}"
LAYOUT_AMOUNTS = {"1g.5gb": (12, 12), "2g.10gb": (8, 8)}

# The ReplicaSet of that article; only the image, and so the command, is another.
REPLICA_SET = f"""\
apiVersion: apps/v1
kind: ReplicaSet
metadata:
  name: nvidia-test-mig-a100
  namespace: {NAMESPACE}
  labels:
    app: nvidia-test
spec:
  replicas: 4
  selector:
    matchLabels:
      app: nvidia-test
  template:
    metadata:
      labels:
        app: nvidia-test
    spec:
      containers:
      - name: nvidia
        image: {BUSYBOX_IMAGE}
        command: {IDLE_COMMAND}
        resources:
          limits:
              nvidia.com/mig-2g.10gb: 1
"""

ON_DEMAND = """\
version: metagpu/v1
pools:
  - name: mig
    backends:
      - {backend: mig, profiles: [1g.5gb, 2g.10gb, 3g.20gb, 7g.40gb], keepWarm: 1s}
"""
EMPTY = {"1g.5gb": (28, 28), "2g.10gb": (12, 12), "3g.20gb": (8, 8), "7g.40gb": (4, 4)}


@pytest.fixture
def driver(cluster: Cluster) -> Path:
    """Return a file in which MIG instances outlive the daemon."""
    return cluster.node.paths.home / "driver.json"


@pytest.fixture
def layout_node(
    cluster: Cluster, driver: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MigNode]:
    """Start four A100s with both ConfigMaps of the article, the node's label, and mixed."""
    node = cluster.node
    monkeypatch.setenv("MIG_STRATEGY", "mixed")  # what the operator's `mig.strategy` sets
    label = ("label", "node", node.name, "--overwrite")
    cluster.kubectl(*label, f"{LAYOUT_LABEL}={LAYOUT}")
    files = ("--config", str(FILES / "nvidia-time-slicing-config.yaml"), "--profile", "slice-4")
    joined = ("--node-name", node.name, "--kubeconfig", node.kubeconfig, "--cluster", "config")
    layouts = (FILES / "nvidia-mig-config.yaml").read_text()
    try:
        with mig_node(cluster, layouts, FOUR, *files, *joined, driver=driver) as live_mig_node:
            yield live_mig_node
    finally:
        cluster.kubectl("delete", "replicasets", "--all", f"--namespace={NAMESPACE}")
        cluster.kubectl(*label, f"{LAYOUT_LABEL}-")


def test_the_layout_of_cern_and_its_replica_set(layout_node: MigNode, driver: Path) -> None:
    """Twelve 1g.5gb and eight 2g.10gb exist and four pods run, also after a reboot."""
    cluster = layout_node.cluster
    layout_node.await_amounts(LAYOUT_AMOUNTS)
    assert_layout(layout_node)
    cluster.start(REPLICA_SET)
    devices = replicas_devices(layout_node)
    assert len(devices) == 4

    # A reboot loses the instances too; afterwards the daemon starts before the kubelet.
    cluster.node.power_off()
    cluster.daemon.kill()
    driver.unlink()
    cluster.daemon.start_again()
    cluster.node.power_on()
    layout_node.await_amounts(LAYOUT_AMOUNTS)
    assert_layout(layout_node)
    wait_for("the holders of all shares", lambda: holders_known(layout_node), within_s=SETTLED_S)

    # Pods that the kubelet started again in place have lost devices in their environment.
    cluster.kubectl(
        *("delete", "pods", "--all", f"--namespace={NAMESPACE}"),
        *("--grace-period=1", f"--timeout={SETTLED_S:g}s"),
    )
    cluster.await_running()
    assert len(replicas_devices(layout_node)) == 4
    assert_layout(layout_node)


def assert_layout(node: MigNode) -> None:
    """Assert that every GPU has exactly the instances of the layout."""
    for gpu in node.cluster.daemon.simulated_gpus():
        profiles = sorted(instance["placement"].partition("@")[0] for instance in gpu["instances"])
        assert profiles == ["1g.5gb"] * 3 + ["2g.10gb"] * 2, gpu["instances"]


def holders_known(node: MigNode) -> bool:
    """Return whether the daemon knows who holds each share; no other pod gets it before."""
    leases = node.cluster.daemon.status()["leases"]
    return bool(leases) and all(lease["holder"] for lease in leases)


def replicas_devices(node: MigNode) -> set[str]:
    """Return the MIG devices of the ReplicaSet's pods, after checks of profile and holder."""
    seen, found = node.observe(), set[str]()
    for name in node.cluster.incarnations():
        (device,) = node.cluster.inspect_container(name).visible_gpus
        share = seen.devices.get(device, f"{device}, which is gone")
        assert "::2g.10gb@" in share, share
        assert seen.held[share] == [name]
        found.add(device)
    return found


@pytest.fixture
def on_demand(cluster: Cluster, driver: Path) -> Iterator[MigNode]:
    """Start four empty A100s with instances on demand."""
    with mig_node(cluster, ON_DEMAND, FOUR, driver=driver) as node:
        node.await_amounts(EMPTY)
        yield node


@pytest.mark.long
def test_nothing_leaks_when_the_daemon_is_killed_between_create_and_answer(
    on_demand: MigNode, driver: Path
) -> None:
    """Half an instance is removed, none is granted twice, also after restarts and a reboot."""
    cluster, daemon = on_demand.cluster, on_demand.cluster.daemon
    cluster.start(mig_pod("three", PREFIX + "3g.20gb"), mig_pod("one", PREFIX + "1g.5gb"))
    before, incarnations = on_demand.await_in_place(), cluster.incarnations()

    # One instance is whole, the other half created, and Allocate is not answered.
    for gpu in range(4):
        daemon.set_provisioning(gpu, "--compute-duration", "3s")
    cluster.kubectl.apply(mig_pod("two", PREFIX + "2g.10gb", 2))
    wait_for(
        "the second instance to be half created",
        lambda: is_half_created(on_demand),
        within_s=SETTLED_S,
    )
    daemon.kill()
    wait_for(
        "the pod to fail without an answer",
        lambda: failure(cluster.kubectl.get("pod", "two", NAMESPACE)),
        within_s=SETTLED_S,
    )
    daemon.start_again()
    left = wait_for("the next daemon to answer", on_demand.observe, within_s=SETTLED_S)
    assert len(left.incomplete) == 1
    assert len(left.devices) == len(before.devices) + 1

    # The leftover instances belong to no pod for now; pods get the capacity beside them.
    cluster.delete("two")
    cluster.node.restart_kubelet()
    cluster.start(mig_pod("whole", PREFIX + "7g.40gb"), mig_pod("pair", PREFIX + "2g.10gb", 2))
    after = on_demand.await_in_place(UNHELD)
    assert {name: after.visible[name] for name in before.visible} == before.visible
    now = cluster.incarnations()
    assert {name: now[name] for name in incarnations} == incarnations
    on_demand.await_in_place()  # later the leftover is removed

    # A booted kubelet starts pods in place with their old devices, or fails them for good.
    # Their instances are gone either way, and are not created for pods that cannot use them.
    cluster.node.power_off()
    daemon.kill()
    driver.unlink()
    daemon.start_again()
    cluster.node.power_on()
    names = sorted(now)
    for name in names:
        cluster.await_readmitted(name, now[name])
    seen = on_demand.observe()
    assert not seen.devices
    assert not seen.incomplete
    cluster.kubectl.apply(mig_pod("new", PREFIX + "1g.5gb"))
    on_demand.await_in_place(*(f"pod {name} holds" for name in names))

    cluster.delete(*names)
    on_demand.await_in_place()
    cluster.delete("new")
    on_demand.await_nothing()
    on_demand.await_amounts(EMPTY)


def is_half_created(node: MigNode) -> bool:
    """Return whether half an instance exists beside whole ones that no pod has."""
    seen = node.observe()
    if not (seen.incomplete and len(seen.devices) > len(seen.visible)):
        raise RigError(f"there are {seen.devices} and {seen.incomplete}")
    return True


@pytest.mark.daemon("pod")
def test_two_instances_for_eight_thousand_mebibytes_each(cluster: Cluster) -> None:
    """HAMi's example on an empty A100-PCIE-40GB gets two 2g.10gb of one GPU."""
    with mig_node(cluster, ON_DEMAND, "{model: a100-pcie-40gb, mig: true}") as node:
        node.await_amounts({"2g.10gb": (3, 3), "7g.40gb": (1, 1)})
        cluster.start(mig_pod("gpu-pod1", PREFIX + "2g.10gb", 2))

        seen = node.await_in_place()
        assert len(seen.visible["gpu-pod1"]) == len(seen.devices) == 2
        assert all("::2g.10gb@" in share for share in seen.devices.values())
        inside = cluster.inspect_container("gpu-pod1").environment["METAGPU_MEMORY_MIB"]
        parts = [part.partition("=")[2] for part in inside.split(",")]
        assert all(int(part) >= 8000 for part in parts)

        cluster.delete("gpu-pod1")
        node.await_nothing()
