"""The kubelet's pods and their devices, by its PodResources service, as one fact."""

from collections import defaultdict
from pathlib import Path
from typing import Final

from metagpu.core.model.resource_claims import parse_claim_device
from metagpu.core.model.shares import Holder, ResourceName, ShareId
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
    return LeasesObserved(holders, asked, resources=resources, pods=pods, of_claims=named)
