"""The kubelet's pods and their devices, by its PodResources service, as one fact."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from metagpu.core.model.resource_claims import ClaimDevice, parse_claim_device
from metagpu.core.model.shares import Holder, ResourceName, ShareId
from metagpu.core.state.facts import LeasesObserved
from metagpu.plugins.kubelet.fast_codec import Messages, check_message
from metagpu.plugins.kubelet.grpc_client import call_raw
from metagpu.plugins.kubelet.pb import v1
from metagpu.plugins.kubelet.timing import TIMING

_LIST: Final = "/v1.PodResourcesLister/List"
_MESSAGES: Final[Messages] = {1: {3: {2: {3: {1: {}}}, 5: {4: {1: {}}}}}}
"""The numbers of the fields that are messages, in a ListPodResourcesResponse, as far as needed."""


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
    check_message(data, _MESSAGES)
    holders: dict[ShareId, Holder] = {}
    resources: dict[ShareId, ResourceName] = {}
    of_claims = defaultdict[tuple[str, ShareId], list[Holder]](list)
    listed = v1.ListPodResourcesResponse.parse(data).pod_resources
    for pod in listed:
        for container in pod.containers:
            holder = Holder(pod.namespace, pod.name, container.name)
            for devices in container.devices:
                for device in map(ShareId, devices.device_ids):
                    holders[device] = holder
                    resources[device] = ResourceName(devices.resource_name)
            for of_claim in _claim_devices(container):
                for share_id in of_claim.share_ids:
                    of_claims[of_claim.claim, share_id].append(holder)
    pods = frozenset((pod.namespace, pod.name) for pod in listed)
    named = {key: tuple(those) for key, those in of_claims.items()}
    return LeasesObserved(holders, asked, resources=resources, pods=pods, of_claims=named)


def _claim_devices(container: v1.ContainerResources) -> Iterator[ClaimDevice]:
    """Yield the devices of ResourceClaims that a container has of metagpu."""
    for resource in container.dynamic_resources:
        for claimed in resource.claim_resources:
            for device in claimed.cdi_devices:
                if (found := parse_claim_device(device.name)) is not None:
                    yield found
