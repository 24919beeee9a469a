"""A daemon with a connection to the API server: actions and checks."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.e2e.cluster import ALL_SHARES, Cluster
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.settings import KUBELET_HOME
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.rig.waiting import wait_for

RULES = REPOSITORY / "deploy" / "rbac.yaml"
"""The rights of metagpu at the API server: these tests have exactly these."""
POLICY = REPOSITORY / "deploy" / "admission-policy.yaml"
"""The limits of these rights, which RBAC cannot express: these tests keep them."""
ACCOUNT, SYSTEM_NAMESPACE, EVENTS = "metagpu", "kube-system", "default"
CONFIG_MAP = "metagpu"
OUR_LABEL = "metagpu.io/config"
NODE_GPUS = "a100-40gb:4,h100-80gb:4"
"""The H100s, at 4 to 7, change their MIG mode without a reset."""

SOON_S = 60.0


def credentials(node: Node) -> tuple[str, ...]:
    """Create the daemon's account at the API server; return the daemon's options."""
    node.kubectl.apply(RULES.read_text(), POLICY.read_text(), _config_map({}))
    kubeconfig = node.credentials(SYSTEM_NAMESPACE, ACCOUNT)
    return (
        *("--simulate", NODE_GPUS, "--node-name", node.name, "--kubeconfig", kubeconfig),
        *("--config-map", f"{SYSTEM_NAMESPACE}/{CONFIG_MAP}"),
    )


class Joined:
    """Actions and reads of a test at the API server of a connected daemon."""

    def __init__(self, cluster: Cluster, options: tuple[str, ...]) -> None:
        self.cluster = cluster
        self.node, self.daemon, self.kubectl = cluster.node, cluster.daemon, cluster.kubectl
        self.options = options

    def reset(self) -> None:
        """Return the node to the daemon's own configuration file, with all rights."""
        self.kubectl.apply(RULES.read_text())
        self.label(None)
        self.profiles()

    def forbid(self, verb: str, resource: str, subresource: str) -> None:
        """Remove the rule about a resource from the account, and wait until it has no effect."""
        role = self.kubectl.get("clusterrole", ACCOUNT)
        whole = f"{resource}/{subresource}"
        role["rules"] = [rule for rule in role["rules"] if whole not in rule["resources"]]
        self.kubectl("replace", "-f", "-", feed=json.dumps(role))
        asked = {"verb": verb, "resource": resource, "subresource": subresource}
        user = f"system:serviceaccount:{SYSTEM_NAMESPACE}:{ACCOUNT}"
        question = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": asked},
        }

        def refused() -> bool:
            answer = self.kubectl("create", "-f", "-", "-o", "json", feed=json.dumps(question))
            return not json.loads(answer)["status"]["allowed"]

        wait_for(f"{verb} {whole} to be forbidden", refused, within_s=SOON_S)

    def profiles(self, **texts: str) -> None:
        """Write the ConfigMap; several profiles without a label choose none."""
        self.kubectl("replace", "-f", "-", feed=json.dumps(_config_map(texts)))

    def label(self, value: str | None, name: str = OUR_LABEL) -> None:
        """Set or remove a label of the node."""
        change = f"{name}-" if value is None else f"{name}={value}"
        self.kubectl("label", "node", self.node.name, change, "--overwrite")

    @property
    def labels(self) -> dict[str, str]:
        """Return the node's labels."""
        found: dict[str, str] = self._node["metadata"]["labels"]
        return found

    @property
    def report(self) -> Document:
        """Return the daemon's report about the API server."""
        found: Document = self.daemon.status()["cluster"]
        return found

    def problems(self) -> dict[str, str]:
        """Return the failing features of the API server -> the reason."""
        return {use: why for use, why in self.report["features"].items() if why}

    def gpu(self, index: int) -> Document:
        """Return the daemon's status of a GPU."""
        gpus = {gpu["index"]: gpu for gpu in self.daemon.status()["gpus"]}
        found: Document = gpus[index]
        return found

    def await_event(self, reason: str, *words: str) -> str:
        """Wait for an Event about the node with all these words; return its message."""

        def probe() -> str:
            messages = self._events(reason)
            for message in messages:
                if all(word in message for word in words):
                    return message
            raise RigError(f"the messages of {reason} are {messages}")

        return wait_for(f"an Event {reason} with {words}", probe, within_s=SOON_S)

    def await_condition(self, status: str, *words: str) -> None:
        """Wait until the node's GPUProblem has a status and a message with these words."""

        def probe() -> bool:
            conditions = self._node["status"]["conditions"]
            (found,) = [
                condition for condition in conditions if condition["type"] == "GPUProblem"
            ] or [{}]
            if found.get("status") != status:
                raise RigError(f"the condition is {found}")
            return all(word in found["message"] for word in words)

        wait_for(f"GPUProblem to be {status} with {words}", probe, within_s=SOON_S)

    def messages(self, resource: str) -> tuple[int, int]:
        """Return the number of accepted registrations and of received lists of a resource."""
        log = self.node.kubelet.log.read_text(errors="replace")
        registered = f'device plugin with resource" resourceName="{resource}"'
        listed = f'"State pushed for device plugin" resource="{resource}"'
        return log.count(registered), log.count(listed)

    @property
    def _node(self) -> Document:
        return self.kubectl.get("node", self.node.name)

    def _events(self, reason: str) -> list[str]:
        selector = f"involvedObject.kind=Node,involvedObject.name={self.node.name},reason={reason}"
        events = self.kubectl.list("events", EVENTS, f"--field-selector={selector}")
        return [event["message"] for event in events]


@contextmanager
def joined(cluster: Cluster, options: tuple[str, ...]) -> Iterator[Joined]:
    """Run a node whose daemon is connected, with every share offered; restore it afterwards."""
    live_joined = Joined(cluster, options)
    live_joined.reset()
    cluster.repair(*options)
    yield live_joined
    if not live_joined.node.apiserver.alive:
        live_joined.node.start_api()
    cluster.clear()
    live_joined.reset()
    if live_joined.daemon.alive:
        with suppress(RigError):  # the next test repairs the node
            cluster.await_amounts(ALL_SHARES, ALL_SHARES)


@contextmanager
def competing_plugin_socket(name: str) -> Iterator[Path]:
    """Listen on a socket, as another device plugin does, until the block ends."""
    path = KUBELET_HOME / "device-plugins" / name
    with socket.socket(socket.AF_UNIX) as plugin:
        plugin.bind(str(path))
        plugin.listen()
        try:
            yield path
        finally:
            path.unlink()


def _config_map(texts: dict[str, str]) -> dict[str, Any]:
    metadata = {"name": CONFIG_MAP, "namespace": SYSTEM_NAMESPACE}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": texts}
