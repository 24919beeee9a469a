"""Events of refused pods and of a faulty GPU, and the janitor, on a real API server."""

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import NAMESPACE, Cluster, container, idle_pod
from tests.e2e.joined import ACCOUNT, SOON_S, SYSTEM_NAMESPACE, Joined, joined
from tests.e2e.rig.host_daemon import HostDaemon
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.rig.waiting import wait_for
from tests.e2e.test_admission_policy import Token
from tests.e2e.test_cluster import SHARED, SLICES

RIGHT = REPOSITORY / "deploy" / "janitor.yaml"
LIMIT = REPOSITORY / "deploy" / "janitor-policy.yaml"
POLICY = ("validatingadmissionpolicy", "metagpu-janitor")
STRICT = SLICES.replace("replicas: 4", "replicas: 4, failRequestsGreaterThanOne: true")
STORM = "storm"
CLEANED_S = 240.0
"""A storm of some seconds is some ten pods, and the janitor deletes one a second after 30 s."""
FELL_OFF_THE_BUS = 79


@pytest.fixture
def with_janitor(node: Node, daemon: HostDaemon, account: tuple[str, ...]) -> Iterator[Joined]:
    """Run a daemon whose janitor is opted in, with the limits of its right, then the right."""
    node.kubectl.apply(LIMIT.read_text())
    node.kubectl("wait", "--for=jsonpath={.status.observedGeneration}", "/".join(POLICY))
    node.kubectl.apply(RIGHT.read_text())
    with joined(Cluster(node, daemon), (*account, "--cluster", "all,janitor")) as member:
        yield member
        node.kubectl("delete", "replicasets", "--all", f"--namespace={NAMESPACE}", "--wait")
    for file in (RIGHT, LIMIT):
        node.kubectl("delete", "-f", "-", feed=file.read_text())


@pytest.mark.long
def test_a_storm_is_counted_at_its_controller_and_cleaned_up(with_janitor: Joined) -> None:
    """Pods that can never be admitted are one Event of their ReplicaSet, and go by the janitor."""
    member, kubectl = with_janitor, with_janitor.kubectl
    member.profiles(strict=STRICT, other="")
    member.label("strict")
    member.cluster.await_amounts(16, 16, SHARED)

    kubectl.apply(replica_set(2))
    message = wait_for("an Event of the ReplicaSet", lambda: events(member, STORM), within_s=SOON_S)
    kubectl("scale", "replicaset", STORM, "--replicas=0", f"--namespace={NAMESPACE}")
    assert "ask for 1: several replicas" in message[0]["message"]
    assert message[0]["reason"] == "GPURequestTooLarge"
    assert (
        len([document for document in message if document["reason"] == "GPURequestTooLarge"]) == 1
    )
    member.await_event("GPURequestTooLarge", SHARED)

    wait_for("the janitor", lambda: not kubectl.list("pods", NAMESPACE), within_s=CLEANED_S)
    reasons = {event["reason"] for event in events(member, STORM)}
    assert reasons >= {"GPURequestTooLarge", "RejectedPodDeleted"}
    assert member.problems() == {}


def test_the_janitors_right_ends_at_rejected_pods(with_janitor: Joined) -> None:
    """A token that may delete pods may delete no pod that runs, and none of another node."""
    member = with_janitor
    member.cluster.start(idle_pod("runs", 1))
    member.cluster.await_running()
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/runs"

    own = Token(member.node.credentials(SYSTEM_NAMESPACE, ACCOUNT))
    refused = own.send("DELETE", path, {}, "application/json")
    assert "rejected with UnexpectedAdmissionError alone" in refused
    another = Token(member.node.credentials(SYSTEM_NAMESPACE, ACCOUNT, node=""))
    assert "of its own node alone" in another.send("DELETE", path, {}, "application/json")


def test_the_api_server_finds_no_fault_in_the_limits(with_janitor: Joined) -> None:
    """The API server has checked the types of all expressions, and warns of none."""
    assert with_janitor.kubectl.get(*POLICY)["status"]["typeChecking"] == {}


def test_a_pod_hears_of_its_gpu(member: Joined) -> None:
    """A fault of a GPU and its return are Events of the pod that holds it, of no other pod."""
    cluster = member.cluster
    for name in ("first", "second"):
        cluster.run(name, 100)
    index = int(cluster.inspect_container("first").gpu_indices[0])

    member.daemon.fault(index, FELL_OFF_THE_BUS)
    wait_for(
        "the pod's Event",
        lambda: "XID 79" in cluster.event_messages("first", "GPUUnhealthy"),
        within_s=SOON_S,
    )
    member.daemon.reset(index)
    wait_for(
        "the pod's Event of the return",
        lambda: "in service again" in cluster.event_messages("first", "GPURecovered"),
        within_s=SOON_S,
    )
    assert cluster.event_messages("second", "GPUUnhealthy") == ""


def replica_set(shares: int) -> Document:
    """Return a ReplicaSet of one pod that asks for so many replicas of a GPU."""
    labels = {"app": STORM}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": STORM, "namespace": NAMESPACE},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [container("main", shares, resource=SHARED)]},
            },
        },
    }


def events(member: Joined, replica_set: str) -> list[Document]:
    """Return metagpu's Events of a ReplicaSet."""
    selector = f"involvedObject.kind=ReplicaSet,involvedObject.name={replica_set}"
    found = member.kubectl.list("events", NAMESPACE, f"--field-selector={selector}")
    return [
        document for document in found if document.get("reportingComponent") == "metagpu.io/agent"
    ]
