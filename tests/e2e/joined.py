"""A daemon that is joined to the API server, in the words the tests of that are written in."""

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
"""What metagpu may do at the API server: these tests have exactly that."""
ACCOUNT, PLACE, EVENTS = "metagpu", "kube-system", "default"
CONFIG_MAP = "metagpu"
OUR_LABEL = "metagpu.io/config"
BOARDS = "a100-40gb:4,h100-80gb:4"
"""The H100s, at 4 to 7, change their MIG mode without a reset."""

SOON_S = 60.0


def credentials(node: Node) -> tuple[str, ...]:
    """Give the daemon its account at the API server; the options that join it."""
    node.kubectl.apply(RULES.read_text(), _config_map({}))
    kubeconfig = node.credentials(PLACE, ACCOUNT)
    return (
        *("--simulate", BOARDS, "--node-name", node.name, "--kubeconfig", kubeconfig),
        *("--config-map", f"{PLACE}/{CONFIG_MAP}"),
    )


class Joined:
    """What a test does to a joined daemon by the API server alone, and reads there."""

    def __init__(self, cluster: Cluster, options: tuple[str, ...]) -> None:
        self.cluster = cluster
        self.node, self.daemon, self.kubectl = cluster.node, cluster.daemon, cluster.kubectl
        self.options = options

    def reset(self) -> None:
        """Have the node go by the daemon's own file again, with all rights."""
        self.kubectl.apply(RULES.read_text())
        self.label(None)
        self.profiles()

    def forbid(self, verb: str, resource: str, subresource: str) -> None:
        """Take the rule about a resource from the account, and wait until it counts no more."""
        role = self.kubectl.get("clusterrole", ACCOUNT)
        whole = f"{resource}/{subresource}"
        role["rules"] = [rule for rule in role["rules"] if whole not in rule["resources"]]
        self.kubectl("replace", "-f", "-", feed=json.dumps(role))
        asked = {"verb": verb, "resource": resource, "subresource": subresource}
        user = f"system:serviceaccount:{PLACE}:{ACCOUNT}"
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
        """Set a label of the node, or take it away."""
        change = f"{name}-" if value is None else f"{name}={value}"
        self.kubectl("label", "node", self.node.name, change, "--overwrite")

    @property
    def labels(self) -> dict[str, str]:
        """The node's labels."""
        found: dict[str, str] = self._node["metadata"]["labels"]
        return found

    @property
    def report(self) -> Document:
        """What the daemon says of its side of the API server."""
        found: Document = self.daemon.status()["cluster"]
        return found

    def problems(self) -> dict[str, str]:
        """The uses of the API server that do not go well -> why."""
        return {use: why for use, why in self.report["uses"].items() if why}

    def gpu(self, index: int) -> Document:
        """What the daemon says of a GPU."""
        gpus = {gpu["index"]: gpu for gpu in self.daemon.status()["gpus"]}
        found: Document = gpus[index]
        return found

    def await_event(self, reason: str, *words: str) -> str:
        """Wait for an Event about the node that says all of this, and give its message."""

        def probe() -> str:
            messages = self._events(reason)
            for message in messages:
                if all(word in message for word in words):
                    return message
            raise RigError(f"{reason} says {messages}")

        return wait_for(f"an Event {reason} with {words}", probe, within_s=SOON_S)

    def await_condition(self, status: str, *words: str) -> None:
        """Wait until the node's GPUProblem is that, with a message that says all of this."""

        def probe() -> bool:
            conditions = self._node["status"]["conditions"]
            (found,) = [it for it in conditions if it["type"] == "GPUProblem"] or [{}]
            if found.get("status") != status:
                raise RigError(f"the condition is {found}")
            return all(word in found["message"] for word in words)

        wait_for(f"GPUProblem to be {status} with {words}", probe, within_s=SOON_S)

    def messages(self, resource: str) -> tuple[int, int]:
        """How often the kubelet took a resource's registration, and how many lists it was sent."""
        log = self.node.kubelet.log.read_text(errors="replace")
        registered = f'device plugin with resource" resourceName="{resource}"'
        told = f'"State pushed for device plugin" resource="{resource}"'
        return log.count(registered), log.count(told)

    @property
    def _node(self) -> Document:
        return self.kubectl.get("node", self.node.name)

    def _events(self, reason: str) -> list[str]:
        about = f"involvedObject.kind=Node,involvedObject.name={self.node.name},reason={reason}"
        events = self.kubectl.list("events", EVENTS, f"--field-selector={about}")
        return [event["message"] for event in events]


@contextmanager
def joined(cluster: Cluster, options: tuple[str, ...]) -> Iterator[Joined]:
    """Give a node whose daemon is joined, every share on offer; and all as it was afterwards."""
    it = Joined(cluster, options)
    it.reset()
    cluster.repair(*options)
    yield it
    if not it.node.apiserver.alive:
        it.node.start_api()
    cluster.clear()
    it.reset()
    if it.daemon.alive:
        with suppress(RigError):  # who comes next has it repaired
            cluster.await_amounts(ALL_SHARES, ALL_SHARES)


@contextmanager
def listening(name: str) -> Iterator[Path]:
    """Have another device plugin listen on a socket of that name while the block lasts."""
    path = KUBELET_HOME / "device-plugins" / name
    with socket.socket(socket.AF_UNIX) as plugin:
        plugin.bind(str(path))
        plugin.listen()
        try:
            yield path
        finally:
            path.unlink()


def _config_map(texts: dict[str, str]) -> dict[str, Any]:
    metadata = {"name": CONFIG_MAP, "namespace": PLACE}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": texts}
