"""Kueue's own manager: its chart on the node, and its program as a process of this machine."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import yaml

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.helm import Helm
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.programs import Program
from tests.e2e.rig.service_address import service_address
from tests.e2e.rig.settings import LOOPBACK
from tests.e2e.rig.tools import Tools
from tests.e2e.rig.waiting import wait_for

SYSTEM, ACCOUNT = "kueue-system", "kueue-controller-manager"
WEBHOOKS, CERTIFICATE = "kueue-webhook-service", "kueue-webhook-server-cert"
PORT, HEALTH_PORT = 29443, 29446
READY_S = 120.0
NO_POD = ("Deployment", "APIService", "ConfigMap")
"""Kinds of the chart that need its pod, whose place the process takes."""


@contextmanager
def running_kueue(node: Node) -> Iterator[None]:
    """Install Kueue's chart and run its manager in the block; remove what both have made."""
    objects = _rendered(node)
    texts = [yaml.safe_dump(entry) for entry in objects if entry["kind"] not in NO_POD]
    node.kubectl.create_namespace(SYSTEM)
    # The definition of a Workload is too large for the annotation of `kubectl apply`.
    node.kubectl("apply", "--server-side", "-f", "-", feed="\n---\n".join(texts))
    folder = node.paths.home / "kueue"
    program = _manager(node, folder, objects)
    address = node.kubectl.get("service", WEBHOOKS, SYSTEM)["spec"]["clusterIP"]
    try:
        program.start()
        wait_for("Kueue to make a certificate", lambda: _mount(node, folder), within_s=READY_S)
        with service_address(address, lambda: (LOOPBACK, PORT)):
            wait_for("Kueue to be ready", lambda: _ready(program), within_s=READY_S)
            try:
                yield
            finally:
                for kinds in ("localqueues,clusterqueues", "resourceflavors"):
                    node.kubectl("delete", kinds, "--all", "--all-namespaces", "--timeout=60s")
    finally:
        program.stop()
        kinds = "mutatingwebhookconfigurations,validatingwebhookconfigurations,crds"
        node.kubectl("delete", kinds, "--selector=app.kubernetes.io/name=kueue", "--timeout=60s")
        node.kubectl(
            *("delete", "-f", "-", "--ignore-not-found", "--wait=false"),
            feed="\n---\n".join(texts),
        )
        node.kubectl("delete", "namespace", SYSTEM, "--wait=false")


def _rendered(node: Node) -> list[Document]:
    tools = Tools.cached()
    helm = Helm(tools.path("helm"), node.kubeconfig, node.paths.home / "helm", SYSTEM)
    text = helm("template", "kueue", f"{tools.path('charts')}/kueue", "--kube-version=1.36.0")
    return [document for document in yaml.safe_load_all(text) if document]


def _manager(node: Node, folder: Path, objects: list[Document]) -> Program:
    """Return the manager with the chart's configuration, as far as a process can have it."""
    [given] = [entry for entry in objects if entry["kind"] == "ConfigMap"]
    configuration: dict[str, Any] = yaml.safe_load(*given["data"].values())
    configuration |= {
        "webhook": {"host": LOOPBACK, "port": PORT, "certDir": str(folder)},
        "health": {"healthProbeBindAddress": f"{LOOPBACK}:{HEALTH_PORT}"},
        "metrics": {"bindAddress": "0"},
        "leaderElection": {"leaderElect": False},
        "integrations": {"frameworks": ["batch/job"]},
    }
    folder.mkdir()
    file = folder / "configuration.yaml"
    file.write_text(yaml.safe_dump(configuration))
    return Program(
        "kueue",
        [
            *(Tools.cached().path("kueue"), f"--config={file}"),
            # Its API for pending Jobs asks for another port, and for an APIService.
            "--feature-gates=VisibilityOnDemand=false",
        ],
        logs=node.paths.logs,
        pids=node.paths.pids,
        environment={"KUBECONFIG": node.credentials(SYSTEM, ACCOUNT, "")},
    )


def _mount(node: Node, folder: Path) -> bool:
    """Write Kueue's certificate into its folder, as the kubelet mounts the Secret into a pod."""
    data = node.kubectl.get("secret", CERTIFICATE, SYSTEM).get("data", {})
    for name, content in data.items():
        (folder / name).write_bytes(base64.b64decode(content))
    return "tls.crt" in data


def _ready(program: Program) -> bool:
    program.require_alive()
    try:
        with urlopen(f"http://{LOOPBACK}:{HEALTH_PORT}/readyz", timeout=READY_S) as answer:
            return bool(answer.status == 200)
    except OSError as error:
        raise RigError(f"Kueue is not ready: {error}") from error
