"""The kubelet's pods and their devices, by its PodResources service, as one fact."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from metagpu.core.model.pods import KnownPod
from metagpu.core.model.resource_claims import parse_claim_device
from metagpu.core.model.shares import Holder, ResourceName, ShareId
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import LeasesObserved
from metagpu.plugins.kubelet.fast_codec import decode_pod_list
from metagpu.plugins.kubelet.grpc_client import call_raw
from metagpu.plugins.kubelet.pb import v1
from metagpu.plugins.kubelet.timing import TIMING

_LIST: Final = "/v1.PodResourcesLister/List"


async def read_leases(
    socket: Path, asked: float, deadline: float = TIMING.poll_deadline
) -> LeasesObserved:
    """Ask the kubelet for its pods and the holders of all resources' devices.

    Raises:
        OSError: the kubelet cannot be reached, or exceeds `deadline` seconds.
        GRPCError: the kubelet refuses, as it does above 100 requests a second.
        StreamTerminatedError: the kubelet goes away meanwhile.
        ValueError: the answer is no list of pods.
    """
    request = bytes(v1.ListPodResourcesRequest())
    return parse_leases(await call_raw(socket, _LIST, request, deadline), asked)


def parse_leases(data: bytes, asked: float) -> LeasesObserved:
    """Return the holders in a ListPodResourcesResponse to a request at `asked`.

    Raises:
        ValueError: the bytes are no such message.
    """
    return replace(_parse(data), at=asked)


@lru_cache(maxsize=1)  # while no pod comes or goes, each answer is the same
def _parse(data: bytes) -> LeasesObserved:
    holders: dict[ShareId, Holder] = {}
    resources: dict[ShareId, ResourceName] = {}
    of_claims = defaultdict[tuple[str, ShareId], list[Holder]](list)
    listed = decode_pod_list(data)
    for pod in listed:
        for container in pod.containers:
            holder = Holder(pod.namespace, pod.name, container.name)
            for resource, ids in container.devices:
                for device in map(ShareId, ids):
                    holders[device] = holder
                    resources[device] = ResourceName(resource)
            # After a restart the kubelet may list a device twice (kubelet.md §6).
            for name in dict.fromkeys(container.cdi_names):
                if (of_claim := parse_claim_device(name)) is not None:
                    for share_id in of_claim.share_ids:
                        of_claims[of_claim.claim, share_id].append(holder)
    pods = frozenset((pod.namespace, pod.name) for pod in listed)
    named = {key: tuple(those) for key, those in of_claims.items()}
    return LeasesObserved(holders, 0.0, resources=resources, pods=pods, of_claims=named)


Holders = Mapping[tuple[str, ShareId], tuple[Holder, ...]]
"""Containers by the uid of their ResourceClaim and the share."""
RequestsOf = Callable[[str], Mapping[ShareId, str]]
"""Returns the request of each share of a claim with several requests, by the uid of the claim."""


def no_requests(_: str) -> Mapping[ShareId, str]:
    """Return nothing: no claim has several requests."""
    return {}


def holders_by_request(of_claims: Holders, snapshot: Snapshot, requests_of: RequestsOf) -> Holders:
    """Return the holders without containers that name other requests of the claim.

    The kubelet lists a container with all devices of a claim, whichever request it names: the Pod
    says which. Without the API server's pods, all containers of the claim stay holders.
    """
    requests = {uid: requests_of(uid) for uid in {uid for uid, _ in of_claims}}
    if not any(requests.values()):
        return of_claims
    names = {claim.uid: claim.name for claim, _ in snapshot.claim_leases}
    found = {}
    for (uid, share), holders in of_claims.items():
        own = holders
        if (request := requests[uid].get(share)) and (name := names.get(uid)):
            pods = ((holder, snapshot.pods.find(holder, None)) for holder in holders)
            own = tuple(user for user, pod in pods if _names(pod, user.container, name, request))
        found[uid, share] = own or holders
    return found


def _names(pod: KnownPod | None, container: str, claim: str, request: str) -> bool:
    """Return whether a container names a request, or may do so."""
    if pod is None or container not in pod.claims:
        return True
    return not pod.claims[container].isdisjoint({(claim, ""), (claim, request)})
