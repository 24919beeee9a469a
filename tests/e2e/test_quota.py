"""A namespace has at most as many shares as its quota says: Kubernetes counts them by name."""

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import NAMESPACE, RESOURCE, Cluster, idle_pod
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.waiting import wait_for

GUESTS = "cnvrg-guests"
HARD = {NAMESPACE: 400, GUESTS: 100}
"""What each namespace may have: four GPUs, and one."""
COUNTED_S = 60.0


@pytest.fixture
def two_namespaces(cluster: Cluster) -> Iterator[Cluster]:
    """A second namespace, and a hard quota in each that Kubernetes counts already."""
    cluster.kubectl.make_namespace(GUESTS)
    cluster.kubectl.apply(*(quota(name, hard) for name, hard in HARD.items()))
    for name in HARD:
        wait_for("the quota to count", lambda: used(cluster, name) == 0, within_s=COUNTED_S)  # noqa: B023 - called at once
    yield cluster
    cluster.kubectl("delete", "resourcequota", "gpus", f"--namespace={NAMESPACE}")
    cluster.kubectl("delete", "namespace", GUESTS, "--wait=false")


def test_a_quota_stops_the_second_namespace(two_namespaces: Cluster) -> None:
    """Who has used up their quota is told so by the API server; others are not concerned."""
    kubectl = two_namespaces.kubectl
    kubectl.apply(in_namespace(GUESTS, idle_pod("within", 60)))

    with pytest.raises(RigError) as refused:
        kubectl.apply(in_namespace(GUESTS, idle_pod("above", 60)))
    assert (
        f'pods "above" is forbidden: exceeded quota: gpus, requested: requests.{RESOURCE}=60, '
        f"used: requests.{RESOURCE}=60, limited: requests.{RESOURCE}=100"
    ) in str(refused.value)

    kubectl.apply(in_namespace(GUESTS, idle_pod("just-right", 40)))
    assert two_namespaces.run("of-the-first", 250).share_ids
    wait_for("the account", lambda: used(two_namespaces, NAMESPACE) == 250, within_s=COUNTED_S)


def quota(namespace: str, hard: int) -> Document:
    """A hard quota of shares."""
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "gpus", "namespace": namespace},
        "spec": {"hard": {f"requests.{RESOURCE}": str(hard)}},
    }


def used(cluster: Cluster, namespace: str) -> int | None:
    """How much of its quota a namespace has by Kubernetes' account, None before it counts."""
    status = cluster.kubectl.get("resourcequota", "gpus", namespace).get("status", {})
    counted = status.get("used", {}).get(f"requests.{RESOURCE}")
    return None if counted is None else int(counted)


def in_namespace(namespace: str, document: Document) -> Document:
    """The same pod elsewhere."""
    return {**document, "metadata": {**document["metadata"], "namespace": namespace}}
