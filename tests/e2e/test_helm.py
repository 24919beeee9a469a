"""The chart on a real node: the DaemonSet's pod serves, and releases come and go."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.client import HTTPResponse
from pathlib import Path
from subprocess import PIPE
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import yaml

from tests.e2e.claims import pod, resource_claim, shares
from tests.e2e.cluster import ALL_SHARES, CONFIGURATION, GPUS, MODEL, NAMESPACE, Cluster, idle_pod
from tests.e2e.rig.device_files import make_device_files
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.host_daemon import HostDaemon
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.release import (
    CHART,
    DEVICE_ROOT,
    DEVICES,
    IMAGE,
    SYSTEM,
    Release,
    helm_of,
    inline,
    released,
)
from tests.e2e.rig.waiting import wait_for
from tests.e2e.test_exchange import arrivals, await_ended, phases

NAME = "chart"
"""Not `metagpu`: other tests have applied the manifests of deploy/, which have that name."""
SOON_S = 60.0
NO_KERNEL_MODULE = "MG201"
"""The only error of a node whose GPUs are simulated."""

BY_CLAIMS = """\
version: metagpu/v1
pools: [{name: all, api: dra, backends: [{backend: fraction, sharesPerGpu: 100}]}]
"""

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
        "networkPolicy.enabled=false",
    ),
    (
        *("metrics.podMonitor.enabled=true", "metrics.dashboards.enabled=true"),
        "networkPolicy.from[0].podSelector.matchLabels.a=b",
    ),
    ("updateStrategy.type=OnDelete", "metrics.port=0", "serviceAccount.annotations.a=b"),
    ("podLabels.a=b", "podAnnotations.a=b", "nodeSelector.a=b", "imagePullSecrets[0].name=a"),
    ("env[0].name=METAGPU_LOG_LEVEL", "env[0].value=debug", "podSecurityContext.fsGroup=0"),
    ("namespace.create=true", "fullnameOverride=gpus", "securityContext.capabilities.add[0]=BPF"),
    (
        *("drainOnDriverUpgrade=true", "seLinuxOptions.type=spc_t", "seLinuxOptions.level=s0"),
        "web.port=9450",
    ),
    (
        *("dra.enabled=true", "dra.driver=gpu.example.com", "kubeletRoot=/var/lib/k0s/kubelet"),
        "dra.extendedResources={nvidia.com/gpu}",
    ),
)


@pytest.fixture(scope="module")
def release(node: Node, daemon: HostDaemon) -> Iterator[Release]:
    """Install the chart with simulated GPUs, in place of the daemon beside the kubelet."""
    daemon.stop()
    make_device_files(DEVICE_ROOT, GPUS)
    simulated = (
        "--set",
        f"simulate={MODEL}:{GPUS},privileges.memoryEnforcement=false,web.port=9450",
    )
    with released(node, NAME, *simulated, *DEVICES, *inline(CONFIGURATION)) as release:
        yield release


@pytest.fixture
def cluster(release: Release, daemon: HostDaemon) -> Cluster:
    """Return the node of the release with every share free, and its own pods left alone."""
    cluster = Cluster(release.node, daemon)
    for namespace in (NAMESPACE, "default"):
        gone = ("--grace-period=1", "--wait", "--timeout=60s")
        cluster.kubectl("delete", "pods", "--all", f"--namespace={namespace}", *gone)
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)
    return cluster


@pytest.mark.parametrize("values", MATRIX, ids=lambda value: ",".join(value) or "defaults")
def test_the_api_server_accepts_what_the_chart_renders(node: Node, values: tuple[str, ...]) -> None:
    """Kubernetes' own kinds pass the API server's schema, validation and CEL compiler."""
    options = [part for value in values for part in ("--set", value)]
    version = json.loads(node.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"]
    chosen = (f"--kube-version={version}", *IMAGE, *options)
    rendered = helm_of(node)("template", "metagpu", CHART, *chosen)
    documents = [document for document in yaml.safe_load_all(rendered) if document]
    # The Prometheus operator's kinds are not in this API server.
    known = [
        document for document in documents if not document["apiVersion"].startswith("monitoring.")
    ]
    feed = "\n---\n".join(map(json.dumps, known))
    node.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", feed=feed)


def test_the_pod_of_the_notes_gets_its_share(release: Release, cluster: Cluster) -> None:
    """The pod that the installation prints runs with half of a GPU, and mgctl answers in it."""
    manifest = release.notes.partition("<<'EOF'\n")[2].partition("\nEOF\n")[0]
    pod = yaml.safe_load(manifest)
    pod["spec"]["containers"][0]["image"] = BUSYBOX_IMAGE
    kubectl = cluster.kubectl
    kubectl.apply(pod)

    def answer() -> str:
        text = kubectl("logs", pod["metadata"]["name"])
        if "40960 MiB" not in text:
            raise RigError(text)
        return text

    gpu, memory = wait_for("mgctl to answer", answer, within_s=SOON_S).split()[:2]
    assert memory == f"{gpu}=20480"


def test_the_image_serves_a_node(release: Release, cluster: Cluster) -> None:
    """With a read-only root and no capability, a pod gets its GPU, and all commands answer."""
    (pod,) = release.daemons().values()
    (security,) = [container["securityContext"] for container in pod["spec"]["containers"]]
    assert security["readOnlyRootFilesystem"]
    assert security["capabilities"] == {"drop": ["ALL"]}

    def inside(*command: str) -> str:
        target = (pod["metadata"]["name"], f"--namespace={SYSTEM}")
        return cluster.kubectl("exec", *target, "--", *command)

    holding = cluster.run("first", 25)
    assert sum(holding.shares_by_gpu.values()) == 25
    assert holding.gpu_devices == {f"nvidia{index}" for index in holding.gpu_indices}
    assert json.loads(inside("metagpu", "status", "--json"))["leases"]
    checks = json.loads(inside("sh", "-c", "mgctl doctor -o json; true"))
    assert {check["code"] for check in checks if check["result"] == "error"} == {NO_KERNEL_MODULE}
    assert "first" in inside("mgctl", "get", "pods")


@pytest.mark.long
def test_a_resource_claim_is_prepared_by_the_image(release: Release, cluster: Cluster) -> None:
    """The chart's classes, rights and folders are enough for a pod with half of a GPU."""
    kubectl, where = cluster.kubectl, f"--namespace={NAMESPACE}"
    release.upgrade("--set", "dra.enabled=true", *inline(BY_CLAIMS))
    try:
        kubectl.apply(resource_claim("half", shares(50)))
        kubectl.apply(pod("claims", "half"))

        def memory() -> str:
            text = kubectl("exec", "claims", where, "--", "env")
            return next(line for line in text.splitlines() if line.startswith("METAGPU_MAX_MEM="))

        assert wait_for("the pod", memory, within_s=SOON_S) == "METAGPU_MAX_MEM=20480"
        gone = ("--grace-period=1", "--wait", "--timeout=60s", where)
        kubectl("delete", "pod", "claims", *gone)
        kubectl("delete", "resourceclaim", "half", *gone)
    finally:
        release.upgrade("--set", "dra.enabled=false", *inline(CONFIGURATION))


def test_a_viewer_sees_the_cluster(release: Release, cluster: Cluster, tmp_path: Path) -> None:
    """`kubectl metagpu` runs with the rights of the chart's roles, and with no others."""
    kubectl, user = cluster.kubectl, f"{NAMESPACE}:team-lead"
    kubectl("create", "serviceaccount", "team-lead", f"--namespace={NAMESPACE}")
    token = kubectl("create", "token", "team-lead", f"--namespace={NAMESPACE}").strip()
    content = yaml.safe_load(Path(release.node.kubeconfig).read_text(encoding="utf-8"))
    content["users"][0]["user"] = {"token": token}
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(content), encoding="utf-8")
    cluster.run("viewed", 25)

    def metagpu(*arguments: str) -> str:
        done = subprocess.run(
            _plugin(kubeconfig, *arguments), capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    assert "cannot list resource" in metagpu("get", "nodes")
    role = f"{release.name}-metagpu-viewer"
    to = f"--serviceaccount={user}"
    kubectl("create", "clusterrolebinding", "viewers", f"--clusterrole={role}", to)
    kubectl("create", "rolebinding", "viewers", f"--role={role}", to, f"--namespace={SYSTEM}")
    kubectl("create", "rolebinding", "views", "--clusterrole=view", to, f"--namespace={NAMESPACE}")
    try:
        pods = wait_for(
            "the viewer's rights",
            lambda: json.loads(metagpu("get", "pods", "-A", "-o", "json"))["items"],
            within_s=SOON_S,
        )
        assert [(other["pod"], other["shares"]) for other in pods] == [("viewed", 25)]
        assert release.node.name in metagpu("top", "nodes")
        why = metagpu("why", "viewed", f"--namespace={NAMESPACE}")
        assert f"it runs on {release.node.name}" in why
        findings = json.loads(metagpu("doctor", "-o", "json"))[0]["checks"]
        assert not [finding for finding in findings if finding["result"] == "error"]
        kubectl.apply(idle_pod("waits", ALL_SHARES + 1))
        view = _view_of(
            _plugin(kubeconfig, "web", "--address=127.0.0.1:0", f"--namespace={NAMESPACE}")
        )
        (row,) = view["nodes"]
        assert (row["name"], row["problem"]) == (release.node.name, "")
        assert [container["pod"] for container in row["usage"]["containers"]] == ["viewed"]
        assert [(document["pod"], document["reason"]) for document in view["waiting"]] == [
            ("waits", "too_large")
        ]
        status = f"/api/v1/namespaces/{SYSTEM}/pods/{_daemon_port(release)}/proxy/api/v1/status"
        with pytest.raises(RigError, match="Forbidden"):
            kubectl("get", f"--raw={status}")  # an administrator without a viewer's token
    finally:
        kubectl("delete", "clusterrolebinding", "viewers")
        kubectl("delete", "rolebinding", "viewers", f"--namespace={SYSTEM}")


def test_the_page_of_a_node_is_for_viewers(release: Release, cluster: Cluster) -> None:
    """A browser gets the page from the pod, and its data with a token of an account that may."""
    cluster.run("viewed", 25)
    (pod,) = release.daemons().values()
    (port,) = [
        other["containerPort"]
        for other in pod["spec"]["containers"][0]["ports"]
        if other["name"] == "web"
    ]
    url = f"http://{pod['status']['podIP']}:{port}"
    with urlopen(url, timeout=SOON_S) as answer:
        assert b"page.js" in answer.read()
    with pytest.raises(HTTPError, match="403"):
        urlopen(f"{url}/api/v1/view", timeout=SOON_S)  # noqa: S310 - ours

    with _opened(url, _viewer_token(cluster, "metagpu-viewer", SYSTEM)) as answer:
        (row,) = json.load(answer)["nodes"]
    assert row["name"] == release.node.name
    assert [container["pod"] for container in row["usage"]["containers"]] == ["viewed"]

    # The account of a team: the API server decides, by a right of its own.
    kubectl, user = cluster.kubectl, f"{NAMESPACE}:team-screen"
    kubectl("create", "serviceaccount", "team-screen", f"--namespace={NAMESPACE}")
    token = _viewer_token(cluster, "team-screen", NAMESPACE)
    with pytest.raises(HTTPError, match="403") as refused:
        _opened(url, token)
    sentence = f"user system:serviceaccount:{user} may not get nodestatuses.metagpu.io "
    assert f"{sentence}{release.node.name}: bind" in json.load(refused.value)["message"]
    role = f"--clusterrole={release.name}-metagpu-node-status"
    kubectl("create", "clusterrolebinding", "screens", role, f"--serviceaccount={user}")
    try:
        wait_for("the team's view", lambda: _opens(url, token), within_s=SOON_S)
    finally:
        kubectl("delete", "clusterrolebinding", "screens")


def _viewer_token(cluster: Cluster, account: str, namespace: str) -> str:
    options = (f"--namespace={namespace}", "--audience=metagpu.io/status")
    return cluster.kubectl("create", "token", account, *options).strip()


def _opened(url: str, token: str) -> HTTPResponse:
    """Open the data of a page with a token."""
    view = Request(f"{url}/api/v1/view", headers={"Metagpu-Token": token})  # noqa: S310 - ours
    answer: HTTPResponse = urlopen(view, timeout=SOON_S)  # noqa: S310 - ours
    return answer


def _opens(url: str, token: str) -> bool:
    try:
        with _opened(url, token):
            return True
    except HTTPError as error:
        if error.code != HTTPStatus.FORBIDDEN:
            raise
        return False


def test_a_gpu_is_drained_within_the_budgets_of_its_pods(
    release: Release, cluster: Cluster
) -> None:
    """A budget holds the eviction back, Ctrl-C keeps the cordon, a second run goes on."""
    kubectl, labels = cluster.kubectl, {"app": "drained"}
    named = {"metadata": {"name": "drained", "namespace": NAMESPACE}}
    selector = {"matchLabels": labels}
    template = {"metadata": {"labels": labels}, "spec": idle_pod("", 25)["spec"]}
    budget = {"minAvailable": 1, "selector": selector}
    kubectl.apply(
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", **named, "spec": budget},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            **named,
            "spec": {"replicas": 1, "selector": selector, "template": template},
        },
    )

    def gpu_of_pod() -> tuple[str, str]:
        cluster.await_running()
        (document,) = kubectl.list("pods", NAMESPACE)
        (index,) = cluster.inspect_container(document["metadata"]["name"]).gpu_indices
        return document["metadata"]["name"], f"{release.node.name}/{index}"

    kubeconfig = Path(release.node.kubeconfig)
    try:
        pod, gpu = wait_for("the pod", gpu_of_pod, within_s=SOON_S)
        command = _plugin(kubeconfig, "drain-gpu", gpu, "--yes")
        with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as drain:
            assert drain.stdout is not None
            refused = next(line for line in drain.stdout if " waits: " in line)
            drain.send_signal(signal.SIGINT)
            _, error = drain.communicate(timeout=SOON_S)
        assert f"{NAMESPACE}/{pod} waits: The disruption budget drained " in refused
        assert (drain.returncode, "stays cordoned; the same command goes on" in error) == (
            130,
            True,
        )

        kubectl("delete", "poddisruptionbudget", "drained", f"--namespace={NAMESPACE}")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        assert f"{NAMESPACE}/{pod} is evicted" in done.stdout
        after = wait_for("the next pod", gpu_of_pod, within_s=SOON_S)
        assert pod not in after
        assert gpu not in after
        subprocess.run(_plugin(kubeconfig, "uncordon", gpu), check=True)
    finally:
        for kind in ("deployment", "poddisruptionbudget"):
            kubectl("delete", kind, "drained", "--ignore-not-found", f"--namespace={NAMESPACE}")


def _plugin(kubeconfig: Path, *arguments: str) -> list[str]:
    """Return the command line of `kubectl metagpu`."""
    options = (f"--kubeconfig={kubeconfig}", f"--agent-namespace={SYSTEM}")
    return [sys.executable, "-m", "metagpu.kubectl.program", *arguments, *options]


def _view_of(command: Sequence[str]) -> Document:
    """Read the view of the cluster's page as a browser does, and end the command by Ctrl-C."""
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as popen:
        assert popen.stdout is not None
        try:
            url = popen.stdout.readline().partition(" ")[0]
            assert url.startswith("http://127.0.0.1:"), popen.communicate(timeout=SOON_S)
            with urlopen(f"{url}api/v1/changes", timeout=SOON_S) as stream:  # noqa: S310 - ours
                assert stream.readline() == b"event: change\n"
                with urlopen(f"{url}api/v1/view", timeout=SOON_S) as answer:  # noqa: S310 - ours
                    view: Document = json.load(answer)
        finally:
            popen.send_signal(signal.SIGINT)
        assert (*popen.communicate(timeout=SOON_S), popen.returncode) == ("", "", 0)
    return view


def _daemon_port(release: Release) -> str:
    """Return pod and port of the status, as the pod proxy takes them."""
    (pod,) = release.daemons().values()
    (container,) = pod["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    return f"{pod['metadata']['name']}:{ports['status-api']}"


def test_a_changed_profile_restarts_nothing_and_can_be_rolled_back(
    release: Release, cluster: Cluster
) -> None:
    """An upgrade of the configuration is a reload, and so is its rollback."""
    before = release.daemons().keys()
    release.upgrade(*inline(CONFIGURATION.replace("sharesPerGpu: 100", "sharesPerGpu: 10")))
    cluster.await_amounts(GPUS * 10, GPUS * 10)
    release.helm("rollback", NAME, "--wait")
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)
    assert release.daemons().keys() == before
    assert release.restarts() == 0


@pytest.mark.long
def test_few_pods_are_refused_during_a_rollout(release: Release, cluster: Cluster) -> None:
    """Pods that arrive while the DaemonSet is replaced succeed, but for some in one moment."""
    before, pods = release.daemons().keys(), 30
    held = cluster.run("holds", 50)
    with arrivals(cluster, pods):
        release.upgrade("--set", "podAnnotations.rollout=one")

    await_ended(cluster, pods, exchanges=1)
    assert cluster.inspect_container("holds") == held
    assert not release.daemons().keys() & before


@pytest.mark.long
def test_a_bad_image_leaves_the_old_daemon_serving(release: Release, cluster: Cluster) -> None:
    """An image that does not start is rolled back, and pods get shares all the while."""
    before = release.daemons().keys()
    repository, _, tag = BUSYBOX_IMAGE.rpartition(":")
    with arrivals(cluster, 10), pytest.raises(RigError, match="rolled back"):
        release.upgrade(
            *("--atomic", "--timeout=15s"),
            *("--set", f"image.repository={repository},image.tag={tag}"),
        )

    def all_ended() -> bool:
        return set(phases(cluster).values()) == {"Succeeded"}

    wait_for("all pods to succeed", all_ended, within_s=SOON_S)
    wait_for("the old pod alone", lambda: release.daemons().keys() == before, within_s=SOON_S)
    assert release.restarts() == 0
