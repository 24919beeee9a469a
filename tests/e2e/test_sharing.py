"""The shares of GPUs that a pod gets."""

from collections import Counter

import pytest

from tests.e2e.cluster import (
    ALL_SHARES,
    NAMESPACE,
    RESOURCE,
    SHARES_PER_GPU,
    Cluster,
    container,
    idle_pod,
    pod,
)
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.waiting import wait_for

pytestmark = pytest.mark.daemon("pod")

# The pod of MetaGPU's own README. TensorFlow's image and the script for it are replaced: no
# registry exists here. All else is as in the manifests of users.
README_POD = f"""\
apiVersion: v1
kind: Pod
metadata:
  name: metagpu-test
  namespace: {NAMESPACE}
spec:
  tolerations:
   - operator: "Exists"
  containers:
  - name: gpu-test-with-gpu
    image: {BUSYBOX_IMAGE}
    command:
      - sh
      - -c
      - |
        trap 'exit 0' TERM
        sleep 1000000000 & wait
    resources:
      limits:
        cnvrg.io/metagpu: "30"
"""

A_GPUS_MEMORY_MIB = 40960


def test_eight_gpus_are_eight_hundred_shares(cluster: Cluster) -> None:
    """The node of eight GPUs has 800 of the resource, all allocatable."""
    assert cluster.node.resource(RESOURCE) == (ALL_SHARES, ALL_SHARES)


def test_the_pod_of_the_readme_runs_on_a_part_of_one_gpu(cluster: Cluster) -> None:
    """The README's pod runs unchanged and finds one GPU, its part of memory and its ids."""
    cluster.start(README_POD)

    holding = cluster.inspect_container("metagpu-test")
    (gpu,) = holding.visible_gpus
    assert holding.environment["METAGPU_MAX_MEM"] == str(A_GPUS_MEMORY_MIB * 30 // 100)
    assert len(set(holding.share_ids)) == 30
    assert holding.shares_by_gpu == {gpu: 30}
    (index,) = holding.gpu_indices
    assert holding.gpu_devices == {f"nvidia{index}"}
    assert "nvidiactl" in holding.devices


def test_twenty_pods_at_once_share_without_overlap(cluster: Cluster) -> None:
    """Twenty pods of mixed sizes all run, none split over GPUs, no GPU overfull."""
    # In any placement some GPU has space for the largest pod as long as 280 shares are free.
    sizes = [35] * 8 + [25] * 6 + [10] * 6

    holdings = cluster.run_all({f"part-{n}": size for n, size in enumerate(sizes)})

    used: Counter[str] = Counter()
    for holding, size in zip(holdings, sizes, strict=True):
        (gpu,) = holding.visible_gpus
        assert holding.shares_by_gpu == {gpu: size}
        used[gpu] += size
    assert max(used.values()) <= SHARES_PER_GPU
    held = [share for holding in holdings for share in holding.share_ids]
    assert len(set(held)) == len(held) == sum(sizes)


def test_more_than_one_gpu_is_whole_gpus_and_a_rest(cluster: Cluster) -> None:
    """A request of 150 is one whole GPU and half of another, beside a partly held third."""
    cluster.run("neighbour", 30)

    holding = cluster.run("one-and-a-half", 150)

    assert sorted(holding.shares_by_gpu.values()) == [50, 100]
    assert set(holding.visible_gpus) == set(holding.shares_by_gpu)
    assert holding.gpu_devices == {f"nvidia{index}" for index in holding.gpu_indices}


def test_a_pod_that_does_not_fit_waits_until_it_does(cluster: Cluster) -> None:
    """A pod without enough shares stays Pending with a reason, and runs when some are free."""
    cluster.run("large", 600)
    cluster.kubectl.apply(idle_pod("patient", 300))

    wait_for(
        "the scheduler to name the lacking resource",
        lambda: f"Insufficient {RESOURCE}" in cluster.event_messages("patient", "FailedScheduling"),
        within_s=30,
    )
    assert set(cluster.incarnations()) == {"large"}

    cluster.delete("large")
    cluster.await_running()
    assert set(cluster.inspect_container("patient").shares_by_gpu.values()) == {SHARES_PER_GPU}


def test_the_shares_of_a_finished_pod_are_free_again(cluster: Cluster) -> None:
    """A finished pod holds nothing, though its object still exists."""
    everything = container("main", ALL_SHARES, ["true"])
    cluster.kubectl.apply(pod("finished", everything, restartPolicy="Never"))
    wait_for(
        "the pod to finish",
        lambda: cluster.kubectl.get("pod", "finished", NAMESPACE)["status"]["phase"] == "Succeeded",
        within_s=60,
    )

    cluster.kubectl.apply(idle_pod("next", ALL_SHARES))

    wait_for("the next pod to run", lambda: "next" in cluster.incarnations(), within_s=60)
    assert set(cluster.inspect_container("next").shares_by_gpu.values()) == {SHARES_PER_GPU}


def test_a_container_takes_over_the_shares_of_its_init_container(cluster: Cluster) -> None:
    """The kubelet passes an init container's shares on to the next container."""
    prelude = container("prelude", 50, ["true"])

    cluster.start(pod("in-two-steps", container("main", 70), initContainers=[prelude]))

    holding = cluster.inspect_container("in-two-steps")
    (gpu,) = holding.visible_gpus
    assert holding.shares_by_gpu == {gpu: 70}


def test_containers_of_one_pod_hold_shares_of_their_own(cluster: Cluster) -> None:
    """Two containers of a pod hold different shares."""
    cluster.start(pod("pair", container("left", 60), container("right", 60)))

    left, right = (cluster.inspect_container("pair", name) for name in ("left", "right"))
    assert sorted(left.shares_by_gpu.values()) == sorted(right.shares_by_gpu.values()) == [60]
    assert not set(left.share_ids) & set(right.share_ids)
    assert left.visible_gpus != right.visible_gpus
