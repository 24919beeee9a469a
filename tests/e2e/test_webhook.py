"""The admission webhook at a real API server: what it translates, and that its failure is its own.

The webhook is a process of this machine with the rights of the chart's account; its registration
is the chart's, with an address in place of the Service.
"""

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.release import CHART, IMAGE, SYSTEM, helm_of
from tests.e2e.rig.waiting import wait_for
from tests.webhook.rig import A100, Authority

LABELLED, OTHER = "in-hamis-terms", "untouched"
REQUEST = {"nvidia.com/gpu": "2", "nvidia.com/gpumem": "8100"}
"""Not a multiple of 1000: the API server stores 8000 as 8k."""
SHARES = {"cnvrg.io/metagpu": "40"}
GPU_NODE = "hami-gpu-node"
REGISTRATION = "metagpu-webhook"
PORT, METRICS_PORT = 29443, 29400
SOON_S = 60.0
LONGEST_S = 30
"""The longest timeout of a webhook."""


class Webhook:
    """The process of the webhook, its certificate, and its registration at the API server."""

    def __init__(self, node: Node, folder: Path) -> None:
        self.node = node
        self._folder = folder
        self._authority = Authority(folder)
        self._certificate = folder / "tls"
        self._process: subprocess.Popen[bytes] | None = None
        self.renew()
        objects = self._rendered()
        node.kubectl.apply(*(objects[name] for name in ("ServiceAccount", "ClusterRole")))
        node.kubectl.apply(objects["ClusterRoleBinding"])
        self._kubeconfig = node.credentials(SYSTEM, REGISTRATION)
        self._registration = objects["MutatingWebhookConfiguration"]

    def _rendered(self) -> dict[str, Document]:
        authority = base64.b64encode(self._authority.certificate.read_bytes()).decode()
        values = (
            *("webhook.enabled=true", "webhook.events=true", "webhook.certificate.from=secret"),
            *("webhook.certificate.secret=mine", f"webhook.certificate.caBundle={authority}"),
        )
        options = [part for value in values for part in ("--set", value)]
        version = json.loads(self.node.kubectl("version", "-o", "json"))["serverVersion"]
        text = helm_of(self.node)(
            *("template", "metagpu", CHART, f"--kube-version={version['gitVersion']}"),
            *("--show-only", "templates/webhook.yaml", *IMAGE, *options),
        )
        objects = {document["kind"]: document for document in yaml.safe_load_all(text) if document}
        [webhook] = objects["MutatingWebhookConfiguration"]["webhooks"]
        del webhook["clientConfig"]["service"]
        webhook["clientConfig"]["url"] = f"https://127.0.0.1:{PORT}/mutate"
        return objects

    def register(self, **fields: object) -> None:
        """Apply the registration of the chart, with some fields changed."""
        [webhook] = self._registration["webhooks"]
        self.node.kubectl.apply({**self._registration, "webhooks": [{**webhook, **fields}]})

    def renew(self, *, days: int = 7) -> None:
        """Write a certificate, expired with a negative number of days."""
        self._authority.issue(self._certificate, name="IP:127.0.0.1", days=days)

    def start(self) -> None:
        """Start the process."""
        with (self._folder / "webhook.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "metagpu", "webhook"),
                    *("--address", f"127.0.0.1:{PORT}", "--metrics", f"127.0.0.1:{METRICS_PORT}"),
                    *(
                        "--certificate",
                        self._certificate,
                        "--kubeconfig",
                        self._kubeconfig,
                        "--events",
                    ),
                ],
                stdout=log,
                stderr=log,
            )

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End the process as a lost machine does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def page(self, path: str) -> str:
        """Return a page of metrics or probes.

        Raises:
            RigError: it does not answer with 200.
        """
        try:
            with urlopen(f"http://127.0.0.1:{METRICS_PORT}{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except (OSError, URLError) as error:
            detail = error.read().decode() if hasattr(error, "read") else ""
            raise RigError(f"{path}: {error} {detail}") from error

    def reviews(self) -> int:
        """Return how many reviews the webhook has answered."""
        lines = self.page("/metrics").splitlines()
        return sum(
            int(float(line.split()[-1]))
            for line in lines
            if line.startswith("metagpu_webhook_reviews_")
        )


@pytest.fixture(scope="module")
def installed(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    """Install the webhook beside a Node of two A100, and two namespaces; remove all of it then."""
    kubectl = node.kubectl
    for name, labels in ((LABELLED, {"metagpu.io/translate": "enabled"}), (OTHER, {})):
        metadata = {"name": name, "labels": labels}
        kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        kubectl.await_namespace(name)
    gpu_node = {"apiVersion": "v1", "kind": "Node"}
    kubectl.apply({**gpu_node, "metadata": {"name": GPU_NODE, "labels": dict(A100.labels)}})
    amounts = {name: str(count) for name, count in A100.allocatable.items()}
    status = json.dumps({"status": {"capacity": amounts, "allocatable": amounts}})
    kubectl("patch", "node", GPU_NODE, "--subresource=status", "--type=merge", f"--patch={status}")
    webhook = Webhook(node, tmp_path_factory.mktemp("webhook"))
    yield webhook
    webhook.kill()
    kubectl("delete", "mutatingwebhookconfiguration", REGISTRATION, "--ignore-not-found")
    kubectl("delete", "clusterrole,clusterrolebinding", REGISTRATION)
    kubectl("delete", "serviceaccount", REGISTRATION, f"--namespace={SYSTEM}")
    kubectl("delete", "node", GPU_NODE)
    kubectl("delete", "namespace", LABELLED, OTHER)


@pytest.fixture
def webhook(installed: Webhook) -> Webhook:
    """Return the webhook running and registered, without pods of earlier tests."""
    kubectl = installed.node.kubectl
    for namespace in (LABELLED, OTHER):
        gone = ("--grace-period=0", "--force", "--wait", "--timeout=60s")
        kubectl("delete", "pods", "--all", f"--namespace={namespace}", *gone)
    installed.kill()
    installed.renew()
    installed.start()
    wait_for("the webhook to be ready", lambda: installed.page("/readyz"), within_s=SOON_S)
    installed.register()
    wait_for("reviews", lambda: limits(create(installed.node, "probe")) == SHARES, within_s=SOON_S)
    return installed


def create(node: Node, name: str, namespace: str = LABELLED, **amounts: str) -> Document:
    """Create a pod that asks in HAMi's terms, or for other amounts; return it as it was stored."""
    limits = amounts or REQUEST
    options = ("--dry-run=server",) if name == "probe" else ()
    container = {"name": "main", "image": BUSYBOX_IMAGE, "resources": {"limits": limits}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [container]},
    }
    text = node.kubectl("create", "-f", "-", "-o", "json", *options, feed=json.dumps(pod))
    stored: Document = json.loads(text)
    return stored


def limits(pod: Document) -> dict[str, str]:
    """Return the limits of a pod's container."""
    [container] = pod["spec"]["containers"]
    found: dict[str, str] = container["resources"]["limits"]
    return found


def test_a_pod_is_translated_and_a_dry_run_shows_it(webhook: Webhook) -> None:
    """The API server stores the shares, and the request in an annotation; a dry run is alike."""
    shown = create(webhook.node, "probe")
    stored = create(webhook.node, "train")

    for pod in (shown, stored):
        assert limits(pod) == SHARES
        assert pod["spec"]["containers"][0]["resources"]["requests"] == SHARES
        original = json.loads(pod["metadata"]["annotations"]["metagpu.io/original-request"])
        assert original == {"main": REQUEST}
    with pytest.raises(RigError):
        webhook.node.kubectl.get("pod", "probe", LABELLED)


def test_only_pods_in_such_terms_of_labelled_namespaces_are_sent(webhook: Webhook) -> None:
    """The API server sends no other pod: namespaces and conditions of the registration filter."""
    assert limits(create(webhook.node, "other", OTHER)) == REQUEST
    create(webhook.node, "shares", **{"cnvrg.io/metagpu": "1"})
    create(webhook.node, "cpu", cpu="1")
    create(webhook.node, "one", **{"nvidia.com/gpumem": "1001"})

    def reviews() -> int | None:
        found = webhook.reviews()
        return found if found > 1 else None

    # The first was the fixture's own; the page is up to a second old.
    assert wait_for("the last pod's review", reviews, within_s=SOON_S) == 2


def test_an_impossible_request_warns(webhook: Webhook) -> None:
    """The pod is stored as it is; kubectl and an Event say why no node could serve it."""
    container = {
        "name": "main",
        "image": BUSYBOX_IMAGE,
        "resources": {"limits": {"nvidia.com/gpumem": "90001"}},
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "huge", "namespace": LABELLED}}
    with pytest.raises(RigError, match="90001"):
        webhook.node.kubectl(
            *("create", "--warnings-as-errors", "-f", "-"),
            feed=json.dumps({**pod, "spec": {"containers": [container]}}),
        )
    stored = webhook.node.kubectl.get("pod", "huge", LABELLED)
    assert limits(stored) == {"nvidia.com/gpumem": "90001"}
    about = ("--field-selector=reason=GPURequestImpossible,involvedObject.name=huge", "-o", "name")
    wait_for(
        "an Event",
        lambda: webhook.node.kubectl("get", "events", f"--namespace={LABELLED}", *about).strip(),
        within_s=SOON_S,
    )


def test_a_stopped_webhook_holds_up_no_other_namespace(webhook: Webhook) -> None:
    """While a pod of the namespace waits for a webhook that hangs, others are created."""
    webhook.register(timeoutSeconds=LONGEST_S)
    with ThreadPoolExecutor() as pool:
        webhook.signal(signal.SIGSTOP)
        try:
            waiting = pool.submit(create, webhook.node, "waits")
            assert limits(create(webhook.node, "passes", OTHER)) == REQUEST
            create(webhook.node, "shares", **{"cnvrg.io/metagpu": "1"})
            assert not waiting.done()
        finally:
            webhook.signal(signal.SIGCONT)
        assert limits(waiting.result()) == SHARES


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param("killed", marks=pytest.mark.long),
        "stopped",
        pytest.param("expired certificate", marks=pytest.mark.long),
    ],
)
def test_a_failed_webhook_costs_the_translation_alone(webhook: Webhook, failure: str) -> None:
    """Pods are created as they are, in both namespaces; it translates again once it is back."""
    if failure == "stopped":
        webhook.signal(signal.SIGSTOP)
    else:
        webhook.kill()
    if failure == "expired certificate":
        webhook.renew(days=-1)
        webhook.start()
        wait_for("the probe to name it", lambda: expiry_is_named(webhook), within_s=SOON_S)

    assert limits(create(webhook.node, "labelled")) == REQUEST
    assert limits(create(webhook.node, "other", OTHER)) == REQUEST

    if failure == "stopped":
        webhook.signal(signal.SIGCONT)
    elif failure == "killed":
        webhook.start()
    else:
        webhook.renew()
    wait_for("reviews", lambda: limits(create(webhook.node, "probe")) == SHARES, within_s=SOON_S)


def expiry_is_named(webhook: Webhook) -> bool:
    """Return whether the readiness probe fails for the certificate."""
    try:
        webhook.page("/readyz")
    except RigError as error:
        return "expired" in str(error)
    return False


def test_its_account_reads_nodes_and_nothing_else(webhook: Webhook) -> None:
    """The API server allows the account what docs/permissions.md says."""

    def may(verb: str, resource: str) -> bool:
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{SYSTEM}:{REGISTRATION}",
                "resourceAttributes": {"verb": verb, "resource": resource},
            },
        }
        text = webhook.node.kubectl("create", "-f", "-", "-o", "json", feed=json.dumps(review))
        return bool(json.loads(text)["status"]["allowed"])

    assert may("list", "nodes")
    assert may("watch", "nodes")
    for verb, resource in (
        *(("get", "nodes"), ("patch", "nodes"), ("get", "secrets")),
        *(("list", "pods"), ("create", "events"), ("list", "namespaces")),
    ):
        assert not may(verb, resource), (verb, resource)
