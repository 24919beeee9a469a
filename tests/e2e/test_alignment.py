"""The kubelet aligns shares with CPUs by the NUMA nodes of our GPUs."""

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import ALL_SHARES, NAMESPACE, Cluster, container, idle_pod, pod
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.numa import halves
from tests.e2e.rig.waiting import wait_for

SETTLED_S = 60.0
FIRST, SECOND = {0, 1, 2, 3}, {4, 5, 6, 7}
"""The GPUs of each NUMA node, by index."""


@pytest.fixture
def aligning(cluster: Cluster) -> Iterator[Cluster]:
    """Start a kubelet with two NUMA nodes and single-numa-node; CPUs of the first are reserved."""
    settings = {
        "topologyManagerPolicy": "single-numa-node",
        "cpuManagerPolicy": "static",
        "reservedSystemCPUs": ",".join(map(str, halves()[0])),
    }
    with cluster.node.aligning_kubelet(settings):
        cluster.await_amounts(ALL_SHARES, ALL_SHARES)
        yield cluster
        cluster.clear()


@pytest.mark.long
def test_shares_are_where_the_cpus_are_and_never_on_two_numa_nodes(aligning: Cluster) -> None:
    """A pod's shares are on the NUMA node of its CPUs; a pod that cannot be aligned fails."""
    aligning.kubectl.apply(idle_pod("across", 450))
    assert "TopologyAffinityError" in failure(aligning, "across")
    aligning.delete("across")

    # Without CPUs of its own the pod would be on GPU 0.
    aligning.start(pinned("pinned", cpus=1, shares=30))
    pinned_to = aligning.inspect_container("pinned")
    (gpu,) = pinned_to.gpu_indices
    assert gpu in SECOND
    status = aligning.execute("pinned", "grep", "Cpus_allowed_list", "/proc/1/status")
    assert set(halves()[1]) >= {int(cpu) for cpu in status.split()[1].split(",")}

    # 770 shares are free, 370 of them on the second node.
    aligning.start(idle_pod("a-whole-node", 400))
    assert set(aligning.inspect_container("a-whole-node").gpu_indices) == FIRST
    aligning.start(idle_pod("the-rest", 370))
    assert set(aligning.inspect_container("the-rest").gpu_indices) == SECOND


def pinned(name: str, *, cpus: int, shares: int) -> Document:
    """Return a pod with exclusive CPUs beside its shares."""
    document = container("main", shares)
    document["resources"]["limits"] |= {"cpu": str(cpus), "memory": "64Mi"}
    return pod(name, document)


def failure(cluster: Cluster, name: str) -> str:
    """Wait until a pod was not admitted; return reason and message."""

    def probe() -> str:
        status = cluster.kubectl.get("pod", name, NAMESPACE)["status"]
        if status["phase"] != "Failed":
            raise RigError(f"{name} is {status['phase']}")
        return f"{status.get('reason')}: {status.get('message')}"

    return wait_for(f"pod {name} to be refused", probe, within_s=SETTLED_S)
