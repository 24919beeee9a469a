"""A token of metagpu writes its own node alone, and there only what metagpu writes."""

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.e2e.fake_node import dra_objects
from tests.e2e.joined import ACCOUNT, EVENTS, POLICY, SYSTEM_NAMESPACE, Joined
from tests.e2e.rig.node import Node
from tests.e2e.rig.waiting import wait_for

NAMES = (
    *("metagpu-nodes", "metagpu-objects", "metagpu-slices", "metagpu-claims"),
    "metagpu-claim-status",
)
NEIGHBOUR = "neighbour"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
MERGE = "application/merge-patch+json"
TAINT = {"key": "metagpu.io/starting", "effect": "NoSchedule"}
FOREIGN_TAINT = {"key": "example.com/keep-out", "effect": "NoSchedule"}


class Token:
    """Requests with the credentials of a kubeconfig; kubectl would read before it writes."""

    def __init__(self, kubeconfig: str) -> None:
        document = json.loads(Path(kubeconfig).read_text())
        cluster = document["clusters"][0]["cluster"]
        self._server = cluster["server"]
        self._trust = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._bearer = f"Bearer {document['users'][0]['user']['token']}"

    def send(self, method: str, path: str, body: dict[str, Any], content: str) -> str:
        """Send a request; return the API server's refusal, empty when it accepts the request."""
        headers = {"Authorization": self._bearer, "Content-Type": content}
        data = json.dumps(body).encode()
        request = Request(self._server + path, data, headers, method=method)  # noqa: S310 - the rig's
        try:
            with urlopen(request, context=self._trust, timeout=30):  # noqa: S310 - the rig's
                return ""
        except HTTPError as error:
            return str(json.load(error)["message"])


@pytest.fixture(scope="module")
def token(node: Node, account: tuple[str, ...]) -> Iterator[Token]:
    """Install the policies, beside a second node; yield the token of the first node."""
    del account  # its rights and the policy are in force
    spec = {"taints": [FOREIGN_TAINT, TAINT], "unschedulable": True}
    node.kubectl.apply(
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NEIGHBOUR}, "spec": spec}
    )
    of_node = Token(node.credentials(SYSTEM_NAMESPACE, ACCOUNT))
    wait_for("the policy to be in force", lambda: refusal(of_node, NEIGHBOUR, LABELS), within_s=60)
    with dra_objects(node.kubectl):
        wait_for(
            "the policy of slices to be in force",
            lambda: OWN_SLICES in publish(of_node, "elsewhere", "elsewhere/gpu-1"),
            within_s=60,
        )
        yield of_node
    node.kubectl("delete", "node", NEIGHBOUR)


LABELS: dict[str, Any] = {
    "metadata": {"labels": {"nvidia.com/gpu.count": "8", "nvidia.com/mps.capable": "true"}}
}
ALLOWED: dict[str, tuple[dict[str, Any], bool]] = {
    "labels": (LABELS, False),
    "condition": (
        {"status": {"conditions": [{"type": "GPUProblem", "status": "True", "reason": "Test"}]}},
        True,
    ),
    "allocatable": ({"status": {"allocatable": {"cnvrg.io/metagpu": "3"}}}, True),
}
"""What metagpu writes, and whether it is in the status."""
FORBIDDEN: dict[str, tuple[dict[str, Any], bool, str]] = {
    "label-of-the-operator": (
        {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}},
        False,
        "does not write these labels: node-role.kubernetes.io/control-plane",
    ),
    "choice-of-the-operator": (
        {"metadata": {"labels": {"nvidia.com/gpu.deploy.driver": "false"}}},
        False,
        "does not write these labels: nvidia.com/gpu.deploy.driver",
    ),
    "annotation": ({"metadata": {"annotations": {"a": "b"}}}, False, "no annotation"),
    "finalizer": ({"metadata": {"finalizers": ["example.com/a"]}}, False, "no finalizer"),
    "uncordon": ({"spec": {"unschedulable": None}}, False, "nothing in the spec"),
    "new-taint": (
        {"spec": {"taints": [{"key": "example.com/b", "effect": "NoExecute"}]}},
        False,
        "changes no other",
    ),
    "readiness": (
        {"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "Test"}]}},
        True,
        "GPUProblem and GPUResetNeeded",
    ),
    "cpu": ({"status": {"allocatable": {"cpu": "1000"}}}, True, "these amounts: cpu"),
    "capacity": (
        {"status": {"capacity": {"cnvrg.io/metagpu": "1000"}}},
        True,
        "nothing in the status",
    ),
    "addresses": (
        {"status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]}},
        True,
        "nothing in the status",
    ),
}
"""What it does not write, and the words of the refusal."""
OWN_SLICES = (
    "metagpu writes the ResourceSlices of its own node alone, in pool NODE of gpu.metagpu.io "
    "and in NODE/..."
)


@pytest.fixture(scope="module")
def neighbour(node: Node, token: Token) -> Token:
    """Return the token of the second node, which nobody else writes."""
    del token  # the policy is in force
    return Token(node.credentials(SYSTEM_NAMESPACE, ACCOUNT, NEIGHBOUR))


@pytest.mark.parametrize("what", ALLOWED)
def test_a_token_writes_what_metagpu_writes(neighbour: Token, what: str) -> None:
    """The policy lets through each of the daemon's own writes."""
    body, status = ALLOWED[what]
    assert refusal(neighbour, NEIGHBOUR, body, status=status) == ""


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_token_writes_nothing_else(neighbour: Token, what: str) -> None:
    """The policy refuses other fields of the own node, and says which."""
    body, status, words = FORBIDDEN[what]
    assert words in refusal(neighbour, NEIGHBOUR, body, status=status)


@pytest.mark.parametrize("what", ALLOWED)
def test_another_nodes_token_is_refused(token: Token, what: str) -> None:
    """A token writes nothing at another node, not even what it may write at its own."""
    body, status = ALLOWED[what]
    assert "this token is of node 127.0.0.1" in refusal(token, NEIGHBOUR, body, status=status)


@pytest.mark.parametrize("taint", [TAINT, FOREIGN_TAINT], ids=lambda document: str(document["key"]))
def test_a_token_removes_the_startup_taint_alone(
    node: Node, neighbour: Token, taint: dict[str, str]
) -> None:
    """A token may remove the startup taint of its node, and no other."""
    before = node.kubectl.get("node", NEIGHBOUR)["spec"]["taints"]
    rest = [document for document in before if document["key"] != taint["key"]]
    assert len(rest) == len(before) - 1

    body = {"spec": {"taints": rest}}
    refused = neighbour.send("PATCH", f"/api/v1/nodes/{NEIGHBOUR}", body, MERGE)
    assert ("changes no other" in refused) is (taint == FOREIGN_TAINT)


def test_a_token_without_a_node_is_refused(node: Node, token: Token) -> None:
    """A token that no pod and no node is bound to writes no node."""
    del token
    unbound = Token(node.credentials(SYSTEM_NAMESPACE, ACCOUNT, node=""))
    assert "this token is of no node" in refusal(unbound, NEIGHBOUR, LABELS)


def test_a_token_reports_events_in_its_own_name(token: Token) -> None:
    """An Event in the name of the scheduler, or of another node's metagpu, is refused."""
    assert "as metagpu.io/agent" in report(token, "default-scheduler", "default-scheduler-1")
    assert "as metagpu.io/agent" in report(token, "metagpu.io/agent", f"metagpu-{NEIGHBOUR}")
    assert report(token, "metagpu.io/agent", "metagpu-127.0.0.1") == ""


def test_a_token_publishes_the_gpus_of_its_node(neighbour: Token) -> None:
    """The policy lets through the ResourceSlices of the own node."""
    assert publish(neighbour, NEIGHBOUR, NEIGHBOUR) == ""
    assert publish(neighbour, NEIGHBOUR, f"{NEIGHBOUR}/monitor") == ""


@pytest.mark.parametrize(
    ("of_node", "pool"),
    [
        ("127.0.0.1", f"{NEIGHBOUR}/gpu-1"),
        (NEIGHBOUR, "127.0.0.1/gpu-1"),
        (NEIGHBOUR, f"{NEIGHBOUR}2/gpu-1"),
        (NEIGHBOUR, f"{NEIGHBOUR}2"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_a_token_publishes_nothing_else(neighbour: Token, of_node: str, pool: str) -> None:
    """A ResourceSlice of another node, or in a pool of another name, is refused."""
    refused = publish(neighbour, of_node, pool)
    assert f"{OWN_SLICES}: this token is of node {NEIGHBOUR}" in refused


def test_slices_of_another_driver_are_not_touched(node: Node, neighbour: Token) -> None:
    """A token writes and deletes none of another driver of its node, whose pool is the node."""
    node.kubectl.apply(_slice(NEIGHBOUR, NEIGHBOUR, "gpu.example.com"))
    try:
        refused = neighbour.send("DELETE", f"{SLICES}/policy?dryRun=All", {}, "application/json")
        assert OWN_SLICES in refused
        assert OWN_SLICES in publish(neighbour, NEIGHBOUR, NEIGHBOUR, "gpu.example.com")
    finally:
        node.kubectl("delete", "resourceslice", "policy")


def test_the_daemon_keeps_the_policy(member: Joined) -> None:
    """A daemon with labels, conditions, amounts and Events has no problem with the policy."""
    assert member.kubectl.get("validatingadmissionpolicy", "metagpu-nodes")
    wait_for("the labels", lambda: "nvidia.com/gpu.count" in member.labels, within_s=60)
    assert member.problems() == {}


def test_the_api_server_finds_no_fault_in_the_policy(node: Node, token: Token) -> None:
    """The API server checks the types of all expressions, and warns of none."""
    del token  # the policies are in force

    def checked() -> bool:
        policies = [node.kubectl.get("validatingadmissionpolicy", other) for other in NAMES]
        return all("typeChecking" in policy["status"] for policy in policies)

    wait_for("the types to be checked", checked, within_s=60)
    for name in NAMES:
        status = node.kubectl.get("validatingadmissionpolicy", name)["status"]
        assert status["typeChecking"] == {}, POLICY


def refusal(token: Token, name: str, body: dict[str, Any], *, status: bool = False) -> str:
    """Patch a node; return the API server's refusal, empty when it accepts the patch."""
    path = f"/api/v1/nodes/{name}{'/status' if status else ''}"
    return token.send("PATCH", path, body, "application/strategic-merge-patch+json")


def report(token: Token, controller: str, instance: str) -> str:
    """Report an Event; return the API server's refusal, empty when it accepts the Event."""
    event = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"generateName": "policy-", "namespace": EVENTS},
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": controller,
        "reportingInstance": instance,
        "action": "Test",
        "reason": "Test",
        "type": "Normal",
        "regarding": {"kind": "Node", "name": "127.0.0.1", "apiVersion": "v1"},
    }
    path = f"/apis/events.k8s.io/v1/namespaces/{EVENTS}/events"
    return token.send("POST", path, event, "application/json")


def publish(token: Token, of_node: str, pool: str, driver: str = "gpu.metagpu.io") -> str:
    """Publish a ResourceSlice, which nobody sees; return the API server's refusal."""
    body = _slice(of_node, pool, driver)
    return token.send("POST", f"{SLICES}?dryRun=All", body, "application/json")


def _slice(of_node: str, pool: str, driver: str) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "policy"},
        "spec": {
            "driver": driver,
            "nodeName": of_node,
            "pool": {"name": pool, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-1"}],
        },
    }
