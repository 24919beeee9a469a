"""The webhook of the chart's release: two pods of metagpu's image behind a Service."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import urlopen

from tests.e2e.cluster import NAMESPACE
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.pod_daemon import NAME
from tests.e2e.rig.release import SYSTEM, Release
from tests.e2e.rig.service_address import Endpoint, service_address
from tests.e2e.rig.waiting import wait_for

SERVICE = f"{NAME}-metagpu-webhook"
LABEL = "metagpu.io/translate"
METRICS_PORT = 9400
REVIEWS = "metagpu_webhook_reviews_total{"
PATIENCE = "webhook.timeoutSeconds=30"
"""The longest: on a busy machine no test shall depend on how fast a review is."""
SOON_S = 60.0


class InstalledWebhook:
    """The Deployment of the webhook, and what its pods know."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def pods(self) -> list[Document]:
        """Return the pods that do not end."""
        found = self.node.kubectl.list("pods", SYSTEM, f"--selector={_selector(self.node)}")
        return [document for document in found if "deletionTimestamp" not in document["metadata"]]

    def endpoint(self) -> Endpoint:
        """Return an endpoint of the Service that is ready, as kube-proxy chooses one by chance.

        Raises:
            RigError: none is.
        """
        slices = self.node.kubectl.list(
            "endpointslices", SYSTEM, f"--selector=kubernetes.io/service-name={SERVICE}"
        )
        ready = [
            (endpoint["addresses"][0], each["ports"][0]["port"])
            for each in slices
            for endpoint in each.get("endpoints") or ()
            if endpoint["conditions"]["ready"]
        ]
        if not ready:
            raise RigError(f"{SERVICE} has no endpoint that is ready")
        return random.choice(ready)  # noqa: S311 - no secret

    def await_nodes(self, count: int) -> None:
        """Wait until both pods know so many Nodes with GPUs."""

        def know() -> bool:
            pages = self.metrics().values()
            return [page["metagpu_webhook_nodes"] for page in pages] == [count] * 2

        wait_for(f"the webhook to know {count} Nodes", know, within_s=SOON_S)

    def reviews(self) -> Counter[str]:
        """Return how many reviews each pod has answered; up to a second ago."""
        return Counter(
            {
                pod: sum(number for name, number in page.items() if name.startswith(REVIEWS))
                for pod, page in self.metrics().items()
            }
        )

    def metrics(self) -> dict[str, dict[str, int]]:
        """Return the metrics of each pod that are whole numbers, by their lines' begin.

        Raises:
            RigError: a pod does not answer.
        """
        return {pod["metadata"]["name"]: _page(pod["status"].get("podIP")) for pod in self.pods()}


@contextmanager
def installed_webhook(node: Node) -> Iterator[InstalledWebhook]:
    """Install the webhook beside the daemon of `PodDaemon`, for the tests' namespace."""
    release, webhook = Release(node, NAME), InstalledWebhook(node)
    node.kubectl("label", "namespace", NAMESPACE, f"{LABEL}=enabled")
    try:
        release.upgrade("--set", f"webhook.enabled=true,{PATIENCE}")
        address = node.kubectl.get("service", SERVICE, SYSTEM)["spec"]["clusterIP"]
        with service_address(address, webhook.endpoint):
            yield webhook
    finally:
        node.kubectl("label", "namespace", NAMESPACE, f"{LABEL}-")
        release.upgrade("--set", "webhook.enabled=false")


def _selector(node: Node) -> str:
    labels = node.kubectl.get("service", SERVICE, SYSTEM)["spec"]["selector"]
    return ",".join(f"{name}={value}" for name, value in labels.items())


def _page(address: str | None) -> dict[str, int]:
    try:
        with urlopen(f"http://{address}:{METRICS_PORT}/metrics", timeout=SOON_S) as answer:
            text = str(answer.read().decode())
    except OSError as error:
        raise RigError(f"no metrics of {address}: {error}") from error
    samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {
        name: int(float(value))
        for name, _, value in samples
        if value.removesuffix(".0").isdecimal()
    }
