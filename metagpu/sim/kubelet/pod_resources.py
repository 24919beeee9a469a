"""The simulated kubelet's PodResources API, v1 and v1alpha1 (kubelet.md §4)."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.plugins.kubelet.pb import v1, v1alpha1
from metagpu.sim.kubelet.device_manager import NO_NODE, DeviceManagerState, nodes_of
from metagpu.sim.kubelet.pods import SimPod

BURST: Final = 10
RATE: Final = 100
"""Calls at once and calls per second, of all clients and methods together."""


Claimed = Callable[[str, str], Iterable[v1.DynamicResource]]
"""Returns the devices of claims of a container, by the uid of its pod and its name."""


class PodResourcesSource:
    """The data of both API versions: pods with their devices, and allocatable devices.

    `active` returns the listed pods. `free` runs before each list, since listing is one of the two
    occasions on which the kubelet releases the devices of ended pods. `claimed` returns what
    containers have by claims.
    """

    def __init__(
        self,
        state: DeviceManagerState,
        *,
        active: Callable[[], Iterable[SimPod]],
        free: Callable[[], None],
        clock: Callable[[], float],
        claimed: Claimed = lambda _uid, _container: (),
    ) -> None:
        self._state = state
        self.active = active
        self.release_ended_pods = free
        self._clock = clock
        self._claimed = claimed
        self._rate = TokenBucket(burst=BURST, rate=RATE)

    def check_rate(self) -> None:
        """Count a call.

        Raises:
            GRPCError: RESOURCE_EXHAUSTED; too many calls in the last second.
        """
        if not self._rate.take(self._clock()):
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")

    def describe_pod(self, pod: SimPod) -> v1.PodResources:
        """Return a pod's entry, without ordinary init containers."""
        containers = [
            v1.ContainerResources(
                name=container.name,
                devices=list(self._held(pod.uid, container.name)),
                dynamic_resources=list(self._claimed(pod.uid, container.name)),
            )
            for container in pod.listed()
        ]
        return v1.PodResources(name=pod.name, namespace=pod.namespace, containers=containers)

    def _held(self, uid: str, container: str) -> Iterator[v1.ContainerDevices]:
        for resource, entry in self._state.allocations_of(uid, container).items():
            for node, devices in entry.devices.items():
                for device in devices:
                    yield _entry(resource, device, node if node != NO_NODE else None)

    def healthy(self) -> Iterator[v1.ContainerDevices]:
        """Yield the healthy devices; a device with an empty topology is missing (rule 9)."""
        for resource, healthy in self._state.healthy.items():
            devices = self._state.devices.get(resource, {})
            for name in sorted(healthy):
                if devices[name].topology is None:
                    yield _entry(resource, name, None)
                for node in sorted(nodes_of(devices[name])):
                    yield _entry(resource, name, node)


def _entry(resource: str, device: str, node: int | None) -> v1.ContainerDevices:
    topology = v1.TopologyInfo(nodes=[v1.NumaNode(id=node)]) if node is not None else None
    return v1.ContainerDevices(resource_name=resource, device_ids=[device], topology=topology)


class PodResourcesV1(v1.PodResourcesListerBase):
    """The PodResources service v1."""

    def __init__(self, resources: PodResourcesSource) -> None:
        self._resources = resources

    async def list(self, message: v1.ListPodResourcesRequest) -> v1.ListPodResourcesResponse:  # noqa: ARG002  it is empty
        """List the active pods."""
        resources = self._resources
        resources.check_rate()
        resources.release_ended_pods()
        return v1.ListPodResourcesResponse(
            pod_resources=[resources.describe_pod(pod) for pod in resources.active()]
        )

    async def get_allocatable_resources(
        self,
        message: v1.AllocatableResourcesRequest,  # noqa: ARG002  it is empty
    ) -> v1.AllocatableResourcesResponse:
        """List the healthy devices, one entry per device and NUMA node."""
        self._resources.check_rate()
        return v1.AllocatableResourcesResponse(devices=[*self._resources.healthy()])

    async def get(self, message: v1.GetPodResourcesRequest) -> v1.GetPodResourcesResponse:
        """Return one active pod's entry."""
        self._resources.check_rate()
        name, namespace = message.pod_name, message.pod_namespace
        for pod in self._resources.active():
            if (pod.name, pod.namespace) == (name, namespace):
                return v1.GetPodResourcesResponse(pod_resources=self._resources.describe_pod(pod))
        raise GRPCError(Status.UNKNOWN, f"pod {name} in namespace {namespace} not found")


class PodResourcesV1Alpha1(v1alpha1.PodResourcesListerBase):
    """The PodResources service v1alpha1: no topology, app containers only."""

    def __init__(self, resources: PodResourcesSource) -> None:
        self._resources = resources

    async def list(
        self,
        message: v1alpha1.ListPodResourcesRequest,  # noqa: ARG002  it is empty
    ) -> v1alpha1.ListPodResourcesResponse:
        """List the active pods."""
        self._resources.check_rate()
        self._resources.release_ended_pods()
        pods = [self._of_pod(pod) for pod in self._resources.active()]
        return v1alpha1.ListPodResourcesResponse(pod_resources=pods)

    def _of_pod(self, pod: SimPod) -> v1alpha1.PodResources:
        names = {container.name for container in pod.containers}
        containers = [
            v1alpha1.ContainerResources(
                name=container.name,
                devices=[
                    v1alpha1.ContainerDevices(
                        resource_name=entry.resource_name, device_ids=entry.device_ids
                    )
                    for entry in container.devices
                ],
            )
            for container in self._resources.describe_pod(pod).containers
            if container.name in names
        ]
        return v1alpha1.PodResources(name=pod.name, namespace=pod.namespace, containers=containers)
