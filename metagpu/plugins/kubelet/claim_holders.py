"""The containers that have a request of a ResourceClaim. Pure.

The kubelet lists a container with all devices of a claim, whichever request it names: the Pod says
which. Without the API server's pods, all containers of the claim stay holders.
"""

from collections.abc import Callable, Mapping

from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder, ShareId
from metagpu.core.model.snapshot import Snapshot

Holders = Mapping[tuple[str, ShareId], tuple[Holder, ...]]
"""Containers by the uid of their ResourceClaim and the share."""
RequestsOf = Callable[[str], Mapping[ShareId, str]]
"""Returns the request of each share of a claim with several requests, by the uid of the claim."""


def no_requests(_: str) -> Mapping[ShareId, str]:
    """Return nothing: no claim has several requests."""
    return {}


def holders_by_request(of_claims: Holders, snapshot: Snapshot, requests_of: RequestsOf) -> Holders:
    """Return the holders without containers that name other requests of the claim."""
    requests = {uid: requests_of(uid) for uid in {uid for uid, _ in of_claims}}
    if not any(requests.values()):
        return of_claims
    names = {
        lease.resource_claim.uid: lease.resource_claim.name
        for state in snapshot.gpus.values()
        for lease in state.leases.values()
        if lease.resource_claim is not None
    }
    found = {}
    for (uid, share), holders in of_claims.items():
        own = holders
        if (request := requests[uid].get(share)) and (name := names.get(uid)):
            pods = ((it, snapshot.pods.find(it, None)) for it in holders)
            own = tuple(it for it, pod in pods if _names(pod, it.container, name, request))
        found[uid, share] = own or holders
    return found


def _names(pod: KnownPod | None, container: str, claim: str, request: str) -> bool:
    """Return whether a container names a request, or may do so."""
    if pod is None or container not in pod.claims:
        return True
    return not pod.claims[container].isdisjoint({(claim, ""), (claim, request)})
