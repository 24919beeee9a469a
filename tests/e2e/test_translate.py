"""The example pods of HAMi's page on dynamic MIG, translated, on a real kubelet."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.cluster import NAMESPACE, RESOURCE, Cluster
from tests.e2e.instances import MigNode, mig_node
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.waiting import wait_for

SOON_S = 60.0
TRANSLATION_S = 60.0
MODE = '  annotations:\n    nvidia.com/vgpu-mode: "mig"\n'

# The pods of that page; only the image, and so the command, is another.
POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: {name}
  namespace: {namespace}
{annotations}spec:
  containers:
    - name: ubuntu-container1
      image: {image}
      command: ["sh", "-c", "trap exit TERM; while true; do sleep 1; done"]
      resources:
        limits:
          nvidia.com/gpu: 2 # requesting 2 vGPUs
          nvidia.com/gpumem: 8000 # Each vGPU contains 8000m device memory
"""

# The profiles of that page for this model.
MIG = """\
version: metagpu/v1
pools:
  - name: mig
    backends:
      - {backend: mig, profiles: [1g.5gb, 2g.10gb, 3g.20gb, 7g.40gb], keepWarm: 1s}
"""
FRACTIONS = """\
version: metagpu/v1
pools:
  - name: fractions
    backends:
      - {backend: fraction, split: accept, metagpuEnv: true}
"""


def example(name: str, annotations: str = "") -> str:
    """Return one of the example pods."""
    return POD.format(name=name, namespace=NAMESPACE, image=BUSYBOX_IMAGE, annotations=annotations)


def translated(cluster: Cluster, manifest: str) -> str:
    """Pipe a manifest through the program; its warnings are in the test's output."""
    command = (sys.executable, "-m", "metagpu.kubectl.program", "translate", "-f", "-")
    done = subprocess.run(
        [*command, "--kubeconfig", cluster.node.kubeconfig],
        input=manifest,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TRANSLATION_S,
    )
    return done.stdout


def await_label(cluster: Cluster, resource: str, backend: str) -> None:
    """Wait until the Node has the labels of a resource."""
    label = f"metagpu.io/{resource.replace('/', '_')}.backend"

    def probe() -> bool:
        node = cluster.kubectl.get("node", cluster.node.name)
        return bool(node["metadata"]["labels"].get(label) == backend)

    wait_for(f"the label {label}", probe, within_s=SOON_S)


@contextmanager
def offering(cluster: Cluster, configuration: str, gpus: str) -> Iterator[MigNode]:
    """Run a daemon that labels its Node and reads its pods; remove the labels afterwards."""
    node = cluster.node
    joined = ("--node-name", node.name, "--kubeconfig", node.kubeconfig)
    try:
        with mig_node(cluster, configuration, gpus, *joined, "--cluster", "labels,pods") as it:
            yield it
    finally:
        labels = cluster.kubectl.get("node", node.name)["metadata"]["labels"]
        ours = [f"{it}-" for it in labels if it.startswith(("nvidia.com/", "metagpu.io/"))]
        cluster.kubectl("label", "node", node.name, *ours)


@pytest.fixture
def empty_a100(cluster: Cluster) -> Iterator[MigNode]:
    """Start one empty A100-PCIE-40GB with instances on demand."""
    gpu = "{model: a100-pcie-40gb, count: 1, mig: true}"
    with offering(cluster, MIG, gpu) as it:
        it.await_amounts({"2g.10gb": (3, 3)})
        await_label(cluster, "nvidia.com/mig-2g.10gb", "mig")
        yield it


@pytest.mark.parametrize("annotations", ["", MODE], ids=["any", "mig"])
def test_an_example_pod_runs_with_two_instances(empty_a100: MigNode, annotations: str) -> None:
    """The pod asked for two parts of 8000 MiB, and has two instances 2g.10gb of one GPU."""
    cluster = empty_a100.cluster
    cluster.start(translated(cluster, example("gpu-pod1", annotations)))
    wait_for("the holder", lambda: empty_a100.observe().held, within_s=SOON_S)
    seen = empty_a100.observe()

    assert [it.partition("::")[2].partition("@")[0] for it in seen.held] == ["2g.10gb"] * 2
    devices = cluster.inspect_container("gpu-pod1").visible_gpus
    assert sorted(seen.devices[it] for it in devices) == sorted(seen.held)


@pytest.fixture
def fractions(cluster: Cluster) -> Iterator[Cluster]:
    """Start four A100s of 40 GB with 100 shares each."""
    gpus = "{model: a100-pcie-40gb, count: 4}"
    with offering(cluster, FRACTIONS, gpus):
        cluster.await_amounts(400, 400)
        await_label(cluster, RESOURCE, "fraction")
        yield cluster


def test_the_same_pod_runs_with_shares_of_two_gpus(fractions: Cluster) -> None:
    """A pool of fractions gives it 20 shares on each of two GPUs."""
    fractions.start(translated(fractions, example("gpu-pod1")))
    holding = fractions.inspect_container("gpu-pod1")

    assert Counter(holding.shares_by_gpu.values()) == {20: 2}
