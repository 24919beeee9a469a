"""The chart on a real node: the DaemonSet's pod serves, and releases come and go."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import yaml

from tests.e2e.cluster import ALL_SHARES, CONFIGURATION, GPUS, MODEL, NAMESPACE, RESOURCE, Cluster
from tests.e2e.rig.daemon import Daemon
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.helm import Helm
from tests.e2e.rig.images import BUSYBOX_IMAGE, metagpu_image
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.service_address import service_address
from tests.e2e.rig.tools import REPOSITORY, Tools
from tests.e2e.rig.waiting import wait_for
from tests.e2e.test_exchange import arrivals, phases

CHART = str(REPOSITORY / "deploy" / "chart")
SYSTEM = "kube-system"
RELEASE, NAME = "chart", "chart-metagpu"
"""Not `metagpu`: other tests have applied the manifests of deploy/, which have that name."""
OURS = f"--selector=app.kubernetes.io/instance={RELEASE}"
GPU_LABEL = "nvidia.com/gpu.present"
SOON_S = 60.0

MATRIX = (
    (),
    ("privileges.mps=true", "config.map.default=version: metagpu/v1", "config.default=default"),
    ("privileges.mig=true", "privileges.devices=true", "devCharLinks=true"),
    ("cdi.enabled=true", "nvidiaDriverRoot=/run/nvidia/driver", "nvidiaDevRoot=/"),
    ("deviceListStrategy=cdi-cri", "runtimeClassName=nvidia", "kubeletRoot=/var/lib/k0s/kubelet"),
    ("features.janitor=true", "oneResourcePerContainer.enabled=true", "removeLabelsOnExit=true"),
    (
        *(
            "updateStrategy.rollingUpdate.maxSurge=0",
            "updateStrategy.rollingUpdate.maxUnavailable=1",
        ),
        *("metrics.serviceMonitor.enabled=true", "metrics.serviceMonitor.labels.release=a"),
    ),
    ("metrics.podMonitor.enabled=true", "networkPolicy.from[0].podSelector.matchLabels.a=b"),
    ("updateStrategy.type=OnDelete", "metrics.port=0", "serviceAccount.annotations.a=b"),
    ("podLabels.a=b", "podAnnotations.a=b", "nodeSelector.a=b", "imagePullSecrets[0].name=a"),
    ("env[0].name=METAGPU_LOG_LEVEL", "env[0].value=debug", "podSecurityContext.fsGroup=0"),
    ("namespace.create=true", "fullnameOverride=gpus", "securityContext.capabilities.add[0]=BPF"),
)


@dataclass(frozen=True)
class Release:
    """The release on the node."""

    cluster: Cluster
    helm: Helm
    notes: str

    def upgrade(self, *options: str) -> None:
        """Change the release, and wait until it is rolled out."""
        wait = ("--reset-then-reuse-values", "--wait", "--timeout=120s")
        self.helm("upgrade", RELEASE, CHART, *wait, *options)

    def clear(self) -> None:
        """Delete the pods with shares, and wait until they are gone."""
        for namespace in (NAMESPACE, "default"):
            gone = ("--grace-period=1", "--wait", "--timeout=60s")
            self.cluster.kubectl("delete", "pods", "--all", f"--namespace={namespace}", *gone)

    def daemons(self) -> dict[str, Document]:
        """Return the pods of the DaemonSet that do not end, by uid."""
        found = self.cluster.kubectl.list("pods", SYSTEM, OURS)
        alive = [it for it in found if "deletionTimestamp" not in it["metadata"]]
        return {it["metadata"]["uid"]: it for it in alive}


@pytest.fixture(scope="module")
def helm(node: Node) -> Helm:
    """Return helm for releases in kube-system."""
    home = node.paths.home / "helm"
    return Helm(Tools.cached().path("helm"), node.kubeconfig, home, SYSTEM)


@pytest.fixture(scope="module")
def release(node: Node, daemon: Daemon, helm: Helm) -> Iterator[Release]:
    """Install the chart with simulated GPUs, in place of the daemon beside the kubelet."""
    daemon.stop()
    node.import_images(metagpu_image())
    node.kubectl("label", "node", node.name, f"{GPU_LABEL}=true")
    cluster = Cluster(node, daemon)
    with service_address():
        try:
            notes = helm(
                *("install", RELEASE, CHART, "--wait", "--timeout=120s"),
                *("--set", f"simulate={MODEL}:{GPUS}", "--set-json", _inline(CONFIGURATION)),
            )
            wait_for("all shares", lambda: _shares(cluster) == ALL_SHARES, within_s=SOON_S)
            yield Release(cluster, helm, notes)
        finally:
            helm("uninstall", RELEASE, "--ignore-not-found")
            cluster.clear()
            node.kubectl("label", "node", node.name, f"{GPU_LABEL}-")


@pytest.fixture
def idle(release: Release) -> Release:
    """Return the release with every share free, and its own pods left alone."""
    release.clear()
    wait_for("all shares", lambda: _shares(release.cluster) == ALL_SHARES, within_s=SOON_S)
    return release


@pytest.mark.parametrize("values", MATRIX, ids=lambda it: ",".join(it) or "defaults")
def test_the_api_server_accepts_what_the_chart_renders(
    node: Node, helm: Helm, values: tuple[str, ...]
) -> None:
    """Kubernetes' own kinds pass the API server's schema, validation and CEL compiler."""
    options = [part for value in values for part in ("--set", value)]
    version = json.loads(node.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"]
    rendered = helm("template", "metagpu", CHART, f"--kube-version={version}", *options)
    documents = [it for it in yaml.safe_load_all(rendered) if it]
    # The Prometheus operator's kinds are not in this API server.
    known = [it for it in documents if not it["apiVersion"].startswith("monitoring.")]
    feed = "\n---\n".join(map(json.dumps, known))
    node.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", feed=feed)


def test_the_pod_of_the_notes_gets_its_share(idle: Release) -> None:
    """The pod that the installation prints runs with half of a GPU, and mgctl answers in it."""
    manifest = idle.notes.partition("<<'EOF'\n")[2].partition("\nEOF\n")[0]
    pod = yaml.safe_load(manifest)
    pod["spec"]["containers"][0]["image"] = BUSYBOX_IMAGE
    kubectl = idle.cluster.kubectl
    kubectl.apply(pod)

    def answer() -> str:
        text = kubectl("logs", pod["metadata"]["name"])
        if "40960 MiB" not in text:
            raise RigError(text)
        return text

    gpu, memory = wait_for("mgctl to answer", answer, within_s=SOON_S).split()[:2]
    assert memory == f"{gpu}=20480"


def test_a_changed_profile_restarts_nothing_and_can_be_rolled_back(idle: Release) -> None:
    """An upgrade of the configuration is a reload, and so is its rollback."""
    before = idle.daemons().keys()
    idle.upgrade(
        "--set-json", _inline(CONFIGURATION.replace("sharesPerGpu: 100", "sharesPerGpu: 10"))
    )
    wait_for("ten shares each", lambda: _shares(idle.cluster) == GPUS * 10, within_s=SOON_S)
    idle.helm("rollback", RELEASE, "--wait")
    wait_for("all shares again", lambda: _shares(idle.cluster) == ALL_SHARES, within_s=SOON_S)
    assert idle.daemons().keys() == before
    (container,) = next(iter(idle.daemons().values()))["status"]["containerStatuses"]
    assert container["restartCount"] == 0


def test_no_pod_fails_during_a_rollout(idle: Release) -> None:
    """Every pod that arrives while the DaemonSet is replaced gets its shares and succeeds."""
    before, pods = idle.daemons().keys(), 30
    held = idle.cluster.run("holds", 50)
    with arrivals(idle.cluster, pods):
        idle.upgrade("--set", "podAnnotations.rollout=one")

    def all_ended() -> bool:
        seen = phases(idle.cluster)
        return len(seen) == pods and not {"Pending", "Running"} & set(seen.values())

    wait_for("all pods to end", all_ended, within_s=SOON_S)
    assert set(phases(idle.cluster).values()) == {"Succeeded"}
    assert idle.cluster.inspect_container("holds") == held
    assert not idle.daemons().keys() & before


def test_a_bad_image_leaves_the_old_daemon_serving(idle: Release) -> None:
    """An image that does not start is rolled back, and pods get shares all the while."""
    before = idle.daemons().keys()
    repository, _, tag = BUSYBOX_IMAGE.rpartition(":")
    with arrivals(idle.cluster, 10), pytest.raises(RigError, match="rolled back"):
        idle.upgrade(
            *("--atomic", "--timeout=15s"),
            *("--set", f"image.repository={repository},image.tag={tag}"),
        )

    def all_ended() -> bool:
        return set(phases(idle.cluster).values()) == {"Succeeded"}

    wait_for("all pods to succeed", all_ended, within_s=SOON_S)
    wait_for("the old pod alone", lambda: idle.daemons().keys() == before, within_s=SOON_S)
    (container,) = next(iter(idle.daemons().values()))["status"]["containerStatuses"]
    assert container["ready"]
    assert container["restartCount"] == 0


def test_an_uninstall_leaves_no_label_and_no_share(idle: Release) -> None:
    """The commands of the README remove labels and resources; pods with shares run on."""
    held = idle.cluster.run("holds", 50)
    kubectl = idle.cluster.kubectl
    assert _own_labels(idle.cluster)
    idle.upgrade("--set", "removeLabelsOnExit=true")
    kubectl(
        *("delete", "daemonset", NAME, f"--namespace={SYSTEM}"),
        *("--cascade=foreground", "--timeout=60s"),
    )
    idle.helm("uninstall", RELEASE)
    wait_for("no share", lambda: _shares(idle.cluster) == 0, within_s=SOON_S)
    assert _own_labels(idle.cluster) == set()
    status = kubectl.get("node", idle.cluster.node.name)["status"]
    assert not [it for it in status["conditions"] if it["type"].startswith("GPU")]
    left = kubectl("get", _KINDS, "--all-namespaces", OURS)
    assert left == ""
    assert idle.cluster.inspect_container("holds") == held


_KINDS = ",".join(
    (
        *("daemonsets", "configmaps", "serviceaccounts", "networkpolicies"),
        *("roles", "rolebindings", "clusterroles", "clusterrolebindings"),
        *("validatingadmissionpolicies", "validatingadmissionpolicybindings"),
    )
)


def _inline(configuration: str) -> str:
    return f"config.inline={json.dumps(yaml.safe_load(configuration))}"


def _shares(cluster: Cluster) -> int | None:
    return cluster.node.resource(RESOURCE)[1]


def _own_labels(cluster: Cluster) -> set[str]:
    labels = cluster.kubectl.get("node", cluster.node.name)["metadata"]["labels"]
    return {it for it in labels if it.startswith(("metagpu.io/", "nvidia.com/"))} - {GPU_LABEL}
