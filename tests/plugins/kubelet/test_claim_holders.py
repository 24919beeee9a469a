"""Containers of a ResourceClaim: the kubelet lists them all, and the Pod says which names what."""

from metagpu.core.model.shares import Holder, ResourceClaimRef, ShareId
from metagpu.core.state.facts import PodsListed, SharesClaimed
from metagpu.plugins.cluster.pods import known_pod
from metagpu.plugins.kubelet.pod_list import holders_by_request
from tests.core.two_gpus import A_SHARES, NODE
from tests.rigs.build import after

UID, CLAIM = "uid-1", "split-x7k2p"
BIG, SMALL = A_SHARES[0], A_SHARES[1]
POD = {
    "metadata": {"namespace": "team", "name": "p", "uid": "p-1"},
    "spec": {
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "split"}],
        "containers": [
            {"name": "one", "resources": {"claims": [{"name": "gpu", "request": "big"}]}},
            {"name": "two", "resources": {"claims": [{"name": "gpu", "request": "small"}]}},
            {"name": "all", "resources": {"claims": [{"name": "gpu"}]}},
        ],
    },
    "status": {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": CLAIM}]},
}
EXTENDED = {
    "metadata": {"namespace": "team", "name": "p", "uid": "p-1"},
    "spec": {"containers": [{"name": name} for name in ("one", "two", "all")]},
    "status": {
        "extendedResourceClaimStatus": {
            "resourceClaimName": CLAIM,
            "requestMappings": [
                {"containerName": "one", "resourceName": "a/b", "requestName": "big"},
                {"containerName": "two", "resourceName": "a/b", "requestName": "small"},
                {"containerName": "all", "resourceName": "a/b", "requestName": "big"},
                {"containerName": "all", "resourceName": "a/c", "requestName": "small"},
            ],
        }
    },
}


def _holders(*containers: str) -> tuple[Holder, ...]:
    return tuple(Holder("team", "p", container) for container in containers)


def _requests(_: str) -> dict[ShareId, str]:
    return {BIG.id: "big", SMALL.id: "small"}


def test_each_container_has_the_requests_that_it_names() -> None:
    """Also of a claim for extended resources; without the pod all containers stay."""
    claimed = SharesClaimed((BIG, SMALL), 1, resource_claim=ResourceClaimRef("team", CLAIM, UID))
    everyone = _holders("one", "two", "all")
    listed = {(UID, share.id): everyone for share in (BIG, SMALL)}
    expected = {
        (UID, BIG.id): _holders("one", "all"),
        (UID, SMALL.id): _holders("two", "all"),
    }
    unknown = after(claimed, since=NODE)
    assert holders_by_request(listed, unknown, _requests) == listed
    for item in (POD, EXTENDED):
        known = after(PodsListed((known_pod(item),)), since=unknown)
        assert holders_by_request(listed, known, _requests) == expected
        assert holders_by_request(listed, known, lambda _: {}) is listed
