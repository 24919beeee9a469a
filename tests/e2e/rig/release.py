"""A release of the chart on the node: its DaemonSet's pods are metagpu.

Pods reach the API server through `service_address`, and the node has the image imported.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from tests.e2e.rig import host_folders
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.helm import Helm
from tests.e2e.rig.images import METAGPU_IMAGE, metagpu_image
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.service_address import service_address
from tests.e2e.rig.tools import Tools
from tests.e2e.rig.waiting import wait_for

CHART = "deploy/chart"
SYSTEM = "kube-system"
GPU_LABEL = "nvidia.com/gpu.present"
"""A label by which the chart finds nodes with GPUs."""
DEVICE_ROOT = host_folders.NVIDIA_DIR / "driver"
"""The device files of simulated GPUs are where a driver container has its own."""
IMAGE = ("--set", f"image.repository={METAGPU_IMAGE.partition(':')[0]}")
"""The option of every release: the image that the node has imported."""
DEVICES = ("--set", f"nvidiaDevRoot={DEVICE_ROOT}")
"""Options of a release whose containers get the device files, which the test creates."""
_WAIT = ("--wait", "--timeout=120s")


def inline(configuration: str) -> tuple[str, str]:
    """Return helm's options for a configuration of all nodes."""
    return "--set-json", f"config.inline={json.dumps(yaml.safe_load(configuration))}"


def helm_of(node: Node) -> Helm:
    """Return helm for releases in kube-system."""
    return Helm(Tools.cached().path("helm"), node.kubeconfig, node.paths.home / "helm", SYSTEM)


class Release:
    """The chart on the node, under a NAME; nothing is installed before `install`."""

    def __init__(self, node: Node, name: str) -> None:
        self.node, self.name, self.helm = node, name, helm_of(node)
        self.selector = f"--selector=app.kubernetes.io/instance={name}"
        self.of_daemons = f"{self.selector},app.kubernetes.io/name=metagpu"
        self.notes = ""

    def install(self, *options: str, chart: str = CHART) -> None:
        """Install the release, and wait until its pod is ready."""
        self.notes = self.helm("install", self.name, chart, *_WAIT, *IMAGE, *options)

    def upgrade(self, *options: str, chart: str = CHART) -> None:
        """Change the release, and wait until it is rolled out."""
        self.helm("upgrade", self.name, chart, "--reset-then-reuse-values", *_WAIT, *options)

    def daemons(self) -> dict[str, Document]:
        """Return the pods of the DaemonSet that do not end, by uid."""
        found = self.node.kubectl.list("pods", SYSTEM, self.of_daemons)
        alive = [document for document in found if "deletionTimestamp" not in document["metadata"]]
        return {document["metadata"]["uid"]: document for document in alive}

    def await_free(self) -> None:
        """Wait until the daemon knows of no holder, also none of the kubelet's checkpoint.

        The checkpoint names pods of earlier tests until the kubelet admits another one.
        """

        def free() -> bool:
            (pod,) = self.daemons().values()
            target = (pod["metadata"]["name"], f"--namespace={SYSTEM}")
            status = self.node.kubectl("exec", *target, "--", "metagpu", "status", "--json")
            if leases := json.loads(status)["leases"]:
                raise RigError(f"held is {leases}")
            return True

        wait_for("every share to be free", free, within_s=60)

    def restarts(self) -> int:
        """Return how often the container of the DaemonSet's only pod was started again."""
        (pod,) = self.daemons().values()
        (container,) = pod["status"]["containerStatuses"]
        return int(container["restartCount"])


@contextmanager
def released(node: Node, name: str, *options: str, chart: str = CHART) -> Iterator[Release]:
    """Run a release in the block, on a node that has the label of GPUs; remove all of it then."""
    release = Release(node, name)
    node.import_images(metagpu_image())
    node.kubectl("label", "node", node.name, f"{GPU_LABEL}=true", "--overwrite")
    with service_address():
        try:
            release.install(*options, chart=chart)
            yield release
        finally:
            release.helm("uninstall", name, "--ignore-not-found", "--wait", "--cascade=foreground")
            node.kubectl(
                "delete", "pods", "--all", "--all-namespaces", "--grace-period=1", "--wait"
            )
            node.kubectl("label", "node", node.name, f"{GPU_LABEL}-")
            host_folders.clear()
