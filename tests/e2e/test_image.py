"""metagpu out of its image: a DaemonSet's pod serves the kubelet, with few rights."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import ALL_SHARES, CONFIGURATION, GPUS, MODEL, RESOURCE, Cluster
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import METAGPU_IMAGE, metagpu_image
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.settings import KUBELET_HOME
from tests.e2e.rig.waiting import wait_for

AGENT, SYSTEM = "metagpu-agent", "kube-system"
READY_S = 60.0
NO_KERNEL_MODULE = "MG201"
"""The only error of a node whose GPUs are simulated."""
RESTRICTED = {
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


def manifests(cluster: Cluster) -> tuple[Document, ...]:
    """Return a DaemonSet of the image, and its configuration."""
    run, devices = cluster.daemon.run_folder, cluster.daemon.device_root
    kubelet = (KUBELET_HOME / "device-plugins", KUBELET_HOME / "pod-resources")
    folders = [*kubelet, run, devices, Path("/var/log"), Path("/sys/fs/cgroup")]
    mounts = [{"name": f"host-{n}", "mountPath": str(it)} for n, it in enumerate(folders)]
    volumes = [{"name": f"host-{n}", "hostPath": {"path": str(it)}} for n, it in enumerate(folders)]
    container = {
        "name": "metagpu",
        "image": METAGPU_IMAGE,
        "imagePullPolicy": "Never",
        "args": ["run", "--config=/etc/metagpu/config.yaml", f"--simulate={MODEL}:{GPUS}"],
        "env": [
            {"name": "METAGPU_RUN_DIR", "value": str(run)},
            {"name": "METAGPU_DEV_ROOT", "value": str(devices)},
        ],
        "securityContext": RESTRICTED,
        "volumeMounts": [*mounts, {"name": "config", "mountPath": "/etc/metagpu"}],
    }
    spec = {
        "hostPID": True,
        "automountServiceAccountToken": False,
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
        "volumes": [*volumes, {"name": "config", "configMap": {"name": AGENT}}],
    }
    labels = {"app": AGENT}
    named = {"name": AGENT, "namespace": SYSTEM}
    template = {"metadata": {"labels": labels}, "spec": spec}
    return (
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": named,
            "data": {"config.yaml": CONFIGURATION},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": named,
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        },
    )


@pytest.fixture(scope="module")
def archive() -> Path:
    """Return the archive of the image, built before the node's daemon stops."""
    return metagpu_image()


@pytest.fixture
def agent(cluster: Cluster, archive: Path) -> Iterator[str]:
    """Run the image as a DaemonSet in place of the daemon beside the kubelet; return its pod."""
    node = cluster.node
    node.import_images(archive)
    cluster.daemon.stop()
    try:
        with cluster.wait_for_new_list():
            cluster.kubectl.apply(*manifests(cluster))
        yield str(wait_for("the agent's pod to run", lambda: running(cluster), within_s=READY_S))
    finally:
        cluster.clear()
        cluster.kubectl("delete", "daemonset,configmap", AGENT, f"--namespace={SYSTEM}", "--wait")


def running(cluster: Cluster) -> str:
    """Return the name of the agent's pod.

    Raises:
        RigError: it does not run; the text is the end of its log.
    """
    for pod in cluster.kubectl.list("pods", SYSTEM, f"--selector=app={AGENT}"):
        (status,) = pod["status"].get("containerStatuses", [{}])
        if status.get("ready"):
            return str(pod["metadata"]["name"])
        raise RigError(json.dumps(status.get("state")))
    return ""


def test_the_image_serves_a_node(cluster: Cluster, agent: str) -> None:
    """With a read-only root and no capability, the image registers, and a pod gets shares."""

    def inside(*command: str) -> str:
        return cluster.kubectl("exec", agent, f"--namespace={SYSTEM}", "--", *command)

    wait_for(
        "the node to have the agent's shares",
        lambda: cluster.node.resource(RESOURCE) == (ALL_SHARES, ALL_SHARES),
        within_s=READY_S,
    )
    holding = cluster.run("first", 25)

    assert sum(holding.shares_by_gpu.values()) == 25
    assert len(holding.gpu_devices) == 1
    [lease] = json.loads(inside("metagpu", "status", "--json"))["leases"]
    assert lease
    checks = json.loads(inside("sh", "-c", "mgctl doctor -o json; true"))
    assert {it["code"] for it in checks if it["result"] == "error"} == {NO_KERNEL_MODULE}
    assert "first" in inside("mgctl", "get", "pods")
