"""Two backends, or two plugins, on one node that runs."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import ALL_SHARES, CONFIGURATION, NAMESPACE, RESOURCE, Cluster, idle_pod
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.programs import Program
from tests.e2e.rig.tools import Tools

pytestmark = pytest.mark.daemon("pod")

SHARED = "nvidia.com/gpu.shared"
SAMPLE = "example.com/resource"
"""The resource of the sample device plugin of Kubernetes' own tests, which has two devices."""
HALF_AND_HALF = f"""\
version: metagpu/v1
health:
  quietPeriod: 1s
pools:
  - name: slices
    gpus: {{index: 0-3}}
    backends:
      - backend: timeslice
        resource: {SHARED}
        replicas: 4
        failRequestsGreaterThanOne: true
  - name: fractions
    gpus: {{index: 4-7}}
    backends:
      - backend: fraction
        resource: {RESOURCE}
        sharesPerGpu: 100
        metagpuEnv: true
"""

# The ReplicaSet of CERN's article on time-slicing; only the image, and so the command, is another.
REPLICA_SET = f"""\
apiVersion: apps/v1
kind: ReplicaSet
metadata:
  name: nvidia-test-time-slice
  namespace: {NAMESPACE}
  labels:
    app: nvidia-test
spec:
  replicas: 5
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
        command: ["sh", "-c", "trap 'exit 0' TERM; sleep 1000000000 & wait"]
        resources:
          limits:
              {SHARED}: 1
"""


@pytest.fixture
def half_and_half(cluster: Cluster) -> Iterator[Cluster]:
    """Offer four GPUs as time-slices and four as fractions; restore the node afterwards."""
    cluster.daemon.configure(HALF_AND_HALF)
    cluster.await_amounts(16, 16, SHARED)
    cluster.await_amounts(400, 400)
    yield cluster
    cluster.kubectl("delete", "replicasets", "--all", f"--namespace={NAMESPACE}")
    cluster.daemon.configure()


def test_replicas_and_fractions_side_by_side(half_and_half: Cluster) -> None:
    """Five replicas run spread over four GPUs, beside a pod with half of a fifth."""
    half_and_half.start(REPLICA_SET, idle_pod("half", 50))
    half = half_and_half.inspect_container("half")
    seen = Counter(
        half_and_half.inspect_container(name).environment["NVIDIA_VISIBLE_DEVICES"]
        for name in half_and_half.incarnations()
        if name.startswith("nvidia-test-time-slice-")
    )

    assert sorted(seen.values()) == [1, 1, 1, 2]
    assert half.visible_gpus[0] not in seen
    assert half.gpu_devices == {"nvidia4"}


@pytest.mark.long
def test_gpu_in_use_changes_when_its_pod_has_ended(cluster: Cluster) -> None:
    """A reload leaves a running pod alone; its GPU gets the new backend after the pod."""
    held = cluster.run("old", 30)
    before = cluster.incarnations()
    cluster.daemon.configure(HALF_AND_HALF)

    try:
        assert held.gpu_indices == (0,)
        cluster.await_amounts(16, 12, SHARED)
        assert cluster.incarnations() == before

        cluster.delete("old")
        cluster.await_amounts(16, 16, SHARED)
    finally:
        cluster.daemon.configure()


@pytest.fixture
def sample_plugin(cluster: Cluster) -> Iterator[Program]:
    """Offer all shares under the name of Kubernetes' sample device plugin; yield that plugin."""
    cluster.daemon.configure(CONFIGURATION.replace(RESOURCE, SAMPLE))
    cluster.await_amounts(ALL_SHARES, ALL_SHARES, SAMPLE)
    paths = cluster.node.paths
    command = [Tools.cached().path("sample-device-plugin")]
    plugin = Program("sample-device-plugin", command, logs=paths.logs, pids=paths.pids)
    yield plugin
    plugin.stop()
    cluster.daemon.configure()


def test_resource_is_back_after_a_second_plugin_of_its_name(
    cluster: Cluster, sample_plugin: Program
) -> None:
    """A plugin that registers our name and ends costs seconds, and no restart."""
    sample_plugin.start()
    cluster.await_amounts(2, 2, SAMPLE)
    cluster.start(idle_pod("theirs", 2, SAMPLE))
    assert "CNVRG_META_GPU_DEVICES" not in cluster.inspect_container("theirs").environment

    sample_plugin.stop()
    cluster.delete("theirs")
    cluster.await_amounts(ALL_SHARES, ALL_SHARES, SAMPLE)
    cluster.start(idle_pod("ours", 100, SAMPLE))
    assert len(cluster.inspect_container("ours").share_ids) == 100
