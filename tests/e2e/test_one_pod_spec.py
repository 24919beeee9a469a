"""The example pods of docs/one-pod-spec.md, through the webhook of the chart, on a real kubelet.

The daemon and the webhook are pods of one release, and nothing of it is changed but the GPUs.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import yaml

from tests.e2e.cluster import NAMESPACE, RESOURCE, Cluster
from tests.e2e.instances import MigNode, mig_node
from tests.e2e.kwok import kwok_nodes, node_object
from tests.e2e.pages import page_sections
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.pod_daemon import PodDaemon
from tests.e2e.rig.release import SYSTEM
from tests.e2e.rig.waiting import wait_for
from tests.e2e.test_gpu_preference import LATE, NOT_MET
from tests.e2e.webhook_release import InstalledWebhook, installed_webhook
from tests.translation.nodes import node as idle_node

pytestmark = pytest.mark.daemon("pod")

EXAMPLE = yaml.safe_load(page_sections("one-pod-spec.md")["top"][0])
NAME, CONTAINER = "gpu-pod1", "ubuntu-container1"
MODE, POLICY = "nvidia.com/vgpu-mode", "hami.io/node-scheduler-policy"
SHARES, SPREAD = {MODE: "hami-core"}, {POLICY: "spread"}
ONE_MODEL = "{model: a100-pcie-40gb, count: 1, mig: true}, {model: a100-pcie-40gb, count: 2}"
# The profiles are those of HAMi's page for this model.
CONFIGURATION = """\
version: metagpu/v1
pools:
  - name: mig
    gpus: {index: 0}
    backends:
      - {backend: mig, profiles: [1g.5gb, 2g.10gb, 3g.20gb, 7g.40gb], keepWarm: 1s}
  - name: fractions
    gpus: {index: 1-2}
    backends:
      - {backend: fraction, split: accept, metagpuEnv: true}
"""
INSTANCES = {"2g.10gb": (3, 3)}
PROFILE = "nvidia.com/mig-2g.10gb"
A30, LARGE, IN_PARTS = "an-a30", "an-a100-80gb", "fractions-of-a100-80gb"
SOON_S = 60.0
REVIEWS = 20
ATTEMPTS = 5


@pytest.fixture(scope="module")
def mig(node: Node, pod_daemon: PodDaemon) -> Iterator[MigNode]:
    """Start a daemon with an A100 for instances, and two with 100 shares each."""
    cluster = Cluster(node, pod_daemon)
    cluster.repair()
    with mig_node(cluster, CONFIGURATION, ONE_MODEL) as live_mig_node:
        live_mig_node.await_amounts(INSTANCES)
        cluster.await_amounts(200, 200)
        for resource, backend in ((PROFILE, "mig"), (RESOURCE, "fraction")):
            await_label(cluster, resource, backend)
        yield live_mig_node


@pytest.fixture(scope="module")
def webhook(mig: MigNode) -> Iterator[InstalledWebhook]:
    """Install the webhook, once the Node shows what the daemon offers."""
    with installed_webhook(mig.cluster.node) as live_installed_webhook:
        yield live_installed_webhook


@pytest.fixture
def cluster(mig: MigNode, webhook: InstalledWebhook) -> Iterator[Cluster]:
    """Return the node; the pods of a test are removed after it."""
    del webhook
    yield mig.cluster
    mig.cluster.clear()


def await_label(cluster: Cluster, resource: str, backend: str) -> None:
    """Wait until the Node has the labels of a resource."""
    label = f"metagpu.io/{resource.replace('/', '_')}.backend"

    def probe() -> bool:
        node = cluster.kubectl.get("node", cluster.node.name)
        return bool(node["metadata"]["labels"].get(label) == backend)

    wait_for(f"the label {label}", probe, within_s=SOON_S)


def example(annotations: Mapping[str, str], name: str = NAME, gpus: int = 2) -> Document:
    """Return the pod of the page with another image, and annotations; perhaps of one GPU alone."""
    [container] = EXAMPLE["spec"]["containers"]
    amounts = {**container["resources"]["limits"], "nvidia.com/gpu": gpus}
    changed = {**container, "image": BUSYBOX_IMAGE, "resources": {"limits": amounts}}
    metadata = {"name": name, "namespace": NAMESPACE, "annotations": dict(annotations)}
    return {**EXAMPLE, "metadata": metadata, "spec": {"containers": [changed]}}


def limits(pod: Document) -> Mapping[str, str]:
    """Return the limits of a pod's container."""
    [container] = pod["spec"]["containers"]
    found: Mapping[str, str] = container["resources"]["limits"]
    return found


@pytest.mark.long
def test_the_chart_runs_two_pods_that_the_api_server_trusts(
    webhook: InstalledWebhook, cluster: Cluster
) -> None:
    """Both are ready at their first start, and reviews go to the Service with helm's authority."""
    pods = webhook.pods()
    statuses = [status for pod in pods for status in pod["status"]["containerStatuses"]]
    assert [(status["ready"], status["restartCount"]) for status in statuses] == [(True, 0)] * 2
    registration = cluster.kubectl.get("mutatingwebhookconfiguration", "e2e-metagpu-webhook")
    [registered] = registration["webhooks"]
    assert registered["clientConfig"].keys() == {"service", "caBundle"}


@pytest.mark.parametrize("mode", ["", "mig"], ids=["any", "mig"])
def test_an_example_pod_runs_with_two_instances(mig: MigNode, cluster: Cluster, mode: str) -> None:
    """The pod asked for two parts of 8000 MiB, and has two instances 2g.10gb of one GPU."""
    mig.await_amounts(INSTANCES)
    pod = example({MODE: mode} if mode else {})
    [printed] = as_printed(cluster, pod)
    cluster.start(pod)
    stored = cluster.kubectl.get("pod", NAME, NAMESPACE)
    assert limits(printed) == limits(stored) == {PROFILE: "2"}

    wait_for("the holder", lambda: mig.observe().held, within_s=SOON_S)
    seen = mig.observe()
    assert [name.partition("::")[2].partition("@")[0] for name in seen.held] == ["2g.10gb"] * 2
    devices = cluster.inspect_container(NAME).visible_gpus
    assert sorted(seen.devices[device] for device in devices) == sorted(seen.held)


def test_the_same_pod_runs_with_shares_of_two_gpus(cluster: Cluster) -> None:
    """A pool of fractions gives it 20 shares on each of two GPUs, unless metagpu knew it too late.

    It does not wait for the first pod with such annotations, and 20 ms for each later one. A pod
    that came too late has an Event, and is created again.
    """
    for _ in range(ATTEMPTS):
        cluster.start(example(SHARES))
        shares = Counter(cluster.inspect_container(NAME).shares_by_gpu.values())
        if shares == {20: 2}:
            return
        events = partial(cluster.event_messages, NAME, NOT_MET)
        assert LATE in wait_for("an Event of the pod", events, within_s=SOON_S)
        cluster.clear()
    pytest.fail(f"{ATTEMPTS} pods in a row came too late; the last has {shares}")


def test_the_api_server_takes_the_claims_of_a_pod(mig: MigNode, cluster: Cluster) -> None:
    """The printed template has instances, or else shares; it and its pod are valid."""
    mig.await_amounts(INSTANCES)
    template, pod = documents = as_printed(cluster, example({}), "--claims")
    [request] = template["spec"]["spec"]["devices"]["requests"]
    classes = [document["deviceClassName"] for document in request["firstAvailable"]]
    assert classes[0] == "mig.metagpu.io"
    assert "fraction.metagpu.io" in classes
    assert "limits" not in pod["spec"]["containers"][0]["resources"]
    options = ("--dry-run=server", "--validate=strict", "-f", "-")
    cluster.kubectl("create", *options, feed=yaml.safe_dump_all(documents))


def as_printed(cluster: Cluster, pod: Document, *options: str) -> list[Document]:
    """Return the objects that `kubectl metagpu translate` prints for a pod."""
    command = (sys.executable, "-m", "metagpu.kubectl.program", "translate", "-f", "-")
    done = subprocess.run(
        [*command, *options, "--kubeconfig", cluster.node.kubeconfig],
        input=json.dumps(pod),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=SOON_S,
    )
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.long
def test_no_pod_misses_the_translation_while_one_of_the_two_ends(
    webhook: InstalledWebhook, cluster: Cluster
) -> None:
    """The one that the API server is connected to ends; each pod meanwhile is translated."""
    path = f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All"
    outcomes = Counter[str]()

    with ThreadPoolExecutor() as pool, cluster.node.api() as api:

        def create() -> None:
            pod = api.call("POST", path, example(SHARES))
            outcomes[limits(pod).get(RESOURCE, "none")] += 1

        def answered() -> Counter[str] | None:
            new = webhook.reviews() - before
            return new if new.total() >= REVIEWS else None

        before = webhook.reviews()
        for _ in range(REVIEWS):
            create()
        counts = wait_for("the reviews to be counted", answered, within_s=SOON_S)
        [(ending, _)] = counts.most_common(1)
        target = ("pod", ending, f"--namespace={SYSTEM}")
        gone = pool.submit(cluster.kubectl, "delete", *target, "--wait")
        while not gone.done():
            create()
        gone.result()
    assert outcomes.keys() == {"40"}


@pytest.mark.long
def test_pods_of_a_mixed_cluster_go_where_the_translation_says(
    mig: MigNode, webhook: InstalledWebhook, cluster: Cluster
) -> None:
    """Pods of 8000 MiB: to the least waste, to the most room, and to a model that one names."""
    mig.await_amounts(INSTANCES)
    others = (
        idle_node(A30, "a30", "mig", gpus=4),
        idle_node(LARGE, "a100-80gb", "mig", gpus=1),
        idle_node(IN_PARTS, "a100-80gb", "fraction", gpus=8),
    )
    real = cluster.node.name
    wanted: dict[str, tuple[Mapping[str, str], str, Mapping[str, str]]] = {
        "least-waste": ({}, LARGE, {"nvidia.com/mig-1g.10gb": "1"}),
        "most-room": (SPREAD, A30, {"nvidia.com/mig-2g.12gb": "1"}),
        "by-model": ({"nvidia.com/use-gputype": "A100-PCIE-40GB"}, real, {PROFILE: "1"}),
        "shares-of-409": (SHARES, real, {RESOURCE: "20"}),
        "shares-of-819": ({**SHARES, **SPREAD}, IN_PARTS, {RESOURCE: "10"}),
    }
    own = cluster.kubectl.get("node", real)["status"]["allocatable"]
    amounts = {name: own[name] for name in ("cpu", "memory", "pods")}
    documents = [
        node_object(
            offer.name, amounts | {k: str(v) for k, v in offer.allocatable.items()}, offer.labels
        )
        for offer in others
    ]
    with kwok_nodes(cluster.node, *documents):
        webhook.await_nodes(len(others) + 1)
        cluster.start(*(example(document, name, 1) for name, (document, _, _) in wanted.items()))
        pods = {
            document["metadata"]["name"]: document
            for document in cluster.kubectl.list("pods", NAMESPACE)
        }
        assert {
            name: (document["spec"]["nodeName"], limits(document))
            for name, document in pods.items()
        } == {name: (where, amounts) for name, (_, where, amounts) in wanted.items()}
        [device] = cluster.inspect_container("by-model").visible_gpus
        assert mig.observe().devices[device].partition("::")[2].startswith("2g.10gb")
        [gpu] = cluster.inspect_container("shares-of-409").visible_gpus
        assert cluster.inspect_container("shares-of-409").shares_by_gpu == {gpu: 20}
        cluster.clear()
