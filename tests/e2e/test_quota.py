"""A quota limits the shares of a namespace: Kubernetes counts them by name."""

from collections.abc import Iterator

import pytest

from tests.e2e.claims import resource_claim, shares
from tests.e2e.cluster import NAMESPACE, RESOURCE, Cluster, idle_pod
from tests.e2e.fake_node import exactly
from tests.e2e.pages import manifests
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.waiting import wait_for

GUESTS = "cnvrg-guests"
HARD = {NAMESPACE: 400, GUESTS: 100}
"""The quota of each namespace: four GPUs, and one."""
COUNTED_S = 60.0
GPU, PART = (
    f"{name}.metagpu.io.deviceclass.resource.k8s.io/devices" for name in ("gpu", "fraction")
)


@pytest.fixture
def two_namespaces(cluster: Cluster) -> Iterator[Cluster]:
    """Create a second namespace, and a hard quota in each that Kubernetes counts already."""
    cluster.kubectl.create_namespace(GUESTS)
    cluster.kubectl.apply(*(quota(name, hard) for name, hard in HARD.items()))
    for name in HARD:
        wait_for("the quota to count", lambda: used(cluster, name) == 0, within_s=COUNTED_S)  # noqa: B023 - called at once
    yield cluster
    cluster.kubectl("delete", "resourcequota", "gpus", f"--namespace={NAMESPACE}")
    cluster.kubectl("delete", "namespace", GUESTS, "--wait=false")


def test_a_quota_stops_the_second_namespace(two_namespaces: Cluster) -> None:
    """The API server refuses a pod above its quota; the other namespace is not affected."""
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


def test_a_quota_counts_the_devices_of_claims(cluster: Cluster) -> None:
    """The API server refuses a claim above the page's quota, whatever its size."""
    kubectl = cluster.kubectl
    hard = manifests("batch.md", "Quotas")["ResourceQuota/devices"]
    kubectl.apply(hard)
    try:
        wait_for(
            "the quota to count", lambda: counted(cluster) == {GPU: 0, PART: 0}, within_s=COUNTED_S
        )
        kubectl.apply(resource_claim("two", exactly("gpu", "gpu.metagpu.io", 2)))
        with pytest.raises(RigError) as refused:
            kubectl.apply(resource_claim("third", exactly("gpu", "gpu.metagpu.io")))
        assert f"exceeded quota: devices, requested: {GPU}=1, used: {GPU}=2, limited: {GPU}=2" in (
            str(refused.value)
        )

        kubectl.apply(
            *(resource_claim(f"part-{number}", shares(number)) for number in (1, 10, 50, 100))
        )
        with pytest.raises(RigError, match=f"requested: {PART}=1, used: {PART}=4"):
            kubectl.apply(resource_claim("small", shares(1)))
        wait_for("the account", lambda: counted(cluster) == {GPU: 2, PART: 4}, within_s=COUNTED_S)
    finally:
        kubectl("delete", "resourceclaims", "--all", f"--namespace={NAMESPACE}")
        kubectl("delete", "resourcequota", "devices", f"--namespace={NAMESPACE}")


def counted(cluster: Cluster) -> dict[str, int]:
    """Return the used devices of each class by Kubernetes, empty before it counts."""
    status = cluster.kubectl.get("resourcequota", "devices", NAMESPACE).get("status", {})
    return {name: int(value) for name, value in status.get("used", {}).items()}


def quota(namespace: str, hard: int) -> Document:
    """Return a hard quota of shares."""
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "gpus", "namespace": namespace},
        "spec": {"hard": {f"requests.{RESOURCE}": str(hard)}},
    }


def used(cluster: Cluster, namespace: str) -> int | None:
    """Return the used part of a namespace's quota by Kubernetes, None before it counts."""
    status = cluster.kubectl.get("resourcequota", "gpus", namespace).get("status", {})
    counted = status.get("used", {}).get(f"requests.{RESOURCE}")
    return None if counted is None else int(counted)


def in_namespace(namespace: str, document: Document) -> Document:
    """Return the same pod in another namespace."""
    return {**document, "metadata": {**document["metadata"], "namespace": namespace}}
