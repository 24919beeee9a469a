"""MIG on a real kubelet: fixed layouts, instances on demand, and what happens in between."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import IDLE_COMMAND, NAMESPACE, Cluster
from tests.e2e.instances import NOBODYS, PREFIX, SETTLED_S, MigNode, asking, cut, failure
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.rig.waiting import wait_for

FILES = REPOSITORY / "tests" / "compat" / "files"
"""CERN's ConfigMaps as its article on GPU concurrency prints them."""
LAYOUT_LABEL, LAYOUT = "nvidia.com/mig.config", "2x2g.10gb-3x1g.5gb"
FOUR = "{board: a100-40gb, count: 4, mig: true}"
LAID_OUT = {"1g.5gb": (12, 12), "2g.10gb": (8, 8)}

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
    """A file in which MIG instances outlive the daemon."""
    return cluster.node.places.home / "driver.json"


@pytest.fixture
def laid_out(cluster: Cluster, driver: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MigNode]:
    """Four A100s under both ConfigMaps of the article, with the node's label and strategy mixed."""
    node = cluster.node
    monkeypatch.setenv("MIG_STRATEGY", "mixed")  # what the operator's `mig.strategy` sets
    label = ("label", "node", node.name, "--overwrite")
    cluster.kubectl(*label, f"{LAYOUT_LABEL}={LAYOUT}")
    files = ("--config", str(FILES / "nvidia-time-slicing-config.yaml"), "--profile", "slice-4")
    joined = ("--node-name", node.name, "--kubeconfig", node.kubeconfig, "--cluster", "config")
    layouts = (FILES / "nvidia-mig-config.yaml").read_text()
    try:
        with cut(cluster, layouts, FOUR, *files, *joined, driver=driver) as it:
            yield it
    finally:
        cluster.kubectl("delete", "replicasets", "--all", f"--namespace={NAMESPACE}")
        cluster.kubectl(*label, f"{LAYOUT_LABEL}-")


def test_the_layout_of_cern_and_its_replica_set(laid_out: MigNode, driver: Path) -> None:
    """Twelve 1g.5gb and eight 2g.10gb; four pods run, each on its own; so again after a reboot."""
    cluster = laid_out.cluster
    laid_out.await_amounts(LAID_OUT)
    assert_laid_out(laid_out)
    cluster.start(REPLICA_SET)
    devices = replicas_devices(laid_out)
    assert len(devices) == 4

    # All that the node forgets at a reboot, its instances too; then the daemon before the kubelet.
    cluster.node.power_off()
    cluster.daemon.kill()
    driver.unlink()
    cluster.daemon.start_again()
    cluster.node.power_on()
    laid_out.await_amounts(LAID_OUT)
    assert_laid_out(laid_out)

    # Pods that the kubelet started again in place were told of devices that are no more.
    cluster.kubectl(
        *("delete", "pods", "--all", f"--namespace={NAMESPACE}"),
        *("--grace-period=1", f"--timeout={SETTLED_S:g}s"),
    )
    cluster.await_running()
    assert len(replicas_devices(laid_out)) == 4
    assert_laid_out(laid_out)


def assert_laid_out(node: MigNode) -> None:
    """See that every GPU has exactly the instances of the layout."""
    for gpu in node.cluster.daemon.simulated_gpus():
        profiles = sorted(it["place"].partition("@")[0] for it in gpu["instances"])
        assert profiles == ["1g.5gb"] * 3 + ["2g.10gb"] * 2, gpu["instances"]


def replicas_devices(node: MigNode) -> set[str]:
    """The MIG devices of the ReplicaSet's pods: there, of 10 GB, and held by the pod itself."""
    seen, found = node.seen(), set[str]()
    for name in node.cluster.incarnations():
        (device,) = node.cluster.look_inside(name).visible_gpus
        share = seen.made.get(device, f"{device}, which is gone")
        assert "::2g.10gb@" in share, share
        assert seen.held[share] == [name]
        found.add(device)
    return found


@pytest.fixture
def on_demand(cluster: Cluster, driver: Path) -> Iterator[MigNode]:
    """Four empty A100s whose instances are made when pods ask."""
    with cut(cluster, ON_DEMAND, FOUR, driver=driver) as it:
        it.await_amounts(EMPTY)
        yield it


def test_nothing_leaks_when_the_daemon_is_killed_between_create_and_answer(
    on_demand: MigNode, driver: Path
) -> None:
    """Half an instance goes, nothing is given twice; nor by a restarted kubelet or a reboot."""
    cluster, daemon = on_demand.cluster, on_demand.cluster.daemon
    cluster.start(asking("three", PREFIX + "3g.20gb"), asking("one", PREFIX + "1g.5gb"))
    before, incarnations = on_demand.await_in_place(), cluster.incarnations()

    # One instance whole, the other half made, and nobody was answered.
    for gpu in range(4):
        daemon.making(gpu, "--compute-takes", "3s")
    cluster.kubectl.apply(asking("two", PREFIX + "2g.10gb", 2))
    wait_for("the second to be half made", lambda: halfway(on_demand), within_s=SETTLED_S)
    daemon.kill()
    wait_for(
        "the kubelet to be told nothing",
        lambda: failure(cluster.kubectl.get("pod", "two", NAMESPACE)),
        within_s=SETTLED_S,
    )
    daemon.start_again()
    left = wait_for("the next daemon to answer", on_demand.seen, within_s=SETTLED_S)
    assert len(left.halves) == 1
    assert len(left.made) == len(before.made) + 1

    # What was left is nobody's for now; pods get what is beside it.
    cluster.delete("two")
    cluster.node.restart_kubelet()
    cluster.start(asking("whole", PREFIX + "7g.40gb"), asking("pair", PREFIX + "2g.10gb", 2))
    after = on_demand.await_in_place(NOBODYS)
    assert {name: after.told[name] for name in before.told} == before.told
    now = cluster.incarnations()
    assert {name: now[name] for name in incarnations} == incarnations
    on_demand.await_in_place()  # and later it goes

    # A booted kubelet starts pods in place with what they were told, or fails them for good.
    # Their instances are gone either way, and are not made for who could not use them.
    cluster.node.power_off()
    daemon.kill()
    driver.unlink()
    daemon.start_again()
    cluster.node.power_on()
    names = sorted(now)
    for name in names:
        cluster.await_readmitted(name, now[name])
    seen = on_demand.seen()
    assert not seen.made
    assert not seen.halves
    cluster.kubectl.apply(asking("new", PREFIX + "1g.5gb"))
    on_demand.await_in_place(*(f"pod {name} holds" for name in names))

    cluster.delete(*names)
    on_demand.await_in_place()
    cluster.delete("new")
    on_demand.await_nothing()
    on_demand.await_amounts(EMPTY)


def halfway(node: MigNode) -> bool:
    """Tell whether half an instance is there beside whole ones that nobody was told of."""
    seen = node.seen()
    if not (seen.halves and len(seen.made) > len(seen.told)):
        raise RigError(f"there are {seen.made} and {seen.halves}")
    return True


def test_two_instances_for_eight_thousand_mebibytes_each(cluster: Cluster) -> None:
    """HAMi's example on an empty A100-PCIE-40GB: a container with two 2g.10gb of one GPU."""
    with cut(cluster, ON_DEMAND, "{board: a100-pcie-40gb, mig: true}") as node:
        node.await_amounts({"2g.10gb": (3, 3), "7g.40gb": (1, 1)})
        cluster.start(asking("gpu-pod1", PREFIX + "2g.10gb", 2))

        seen = node.await_in_place()
        assert len(seen.told["gpu-pod1"]) == len(seen.made) == 2
        assert all("::2g.10gb@" in share for share in seen.made.values())
        inside = cluster.look_inside("gpu-pod1").environment["METAGPU_MEMORY_MIB"]
        parts = [part.partition("=")[2] for part in inside.split(",")]
        assert all(int(part) >= 8000 for part in parts)

        cluster.delete("gpu-pod1")
        node.await_nothing()
