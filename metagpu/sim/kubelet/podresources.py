"""The simulated kubelet's PodResources API, v1 and v1alpha1 (kubelet.md §4)."""

from collections.abc import Callable, Iterable, Iterator

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from metagpu.plugins.pb import v1, v1alpha1
from metagpu.sim.kubelet.ledger import NO_NODE, Ledger, nodes_of
from metagpu.sim.kubelet.pods import Pod


class RateLimit:
    """A token bucket, shared by all clients and methods: 100 a second, bursts of 10."""

    def __init__(
        self, clock: Callable[[], float], *, per_second: float = 100, burst: float = 10
    ) -> None:
        self._clock = clock
        self._per_second = per_second
        self._burst = burst
        self._tokens = burst
        self._counted_at = clock()

    def take(self) -> None:
        """Spend a token.

        Raises:
            GRPCError: RESOURCE_EXHAUSTED; there is none.
        """
        now = self._clock()
        earned = (now - self._counted_at) * self._per_second
        self._tokens = min(self._burst, self._tokens + earned)
        self._counted_at = now
        if self._tokens < 1:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._tokens -= 1


class Resources:
    """What both versions tell: the holders, and what there is to hold.

    `active` gives the pods to be listed; `free` is called before a list is made, since listing
    is one of the two occasions on which the kubelet frees what ended pods held.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        active: Callable[[], Iterable[Pod]],
        free: Callable[[], None],
        limit: RateLimit,
    ) -> None:
        self._ledger = ledger
        self.active = active
        self.free = free
        self.limit = limit

    def of_pod(self, pod: Pod) -> v1.PodResources:
        """Describe a pod; ordinary init containers are left out."""
        containers = [
            v1.ContainerResources(
                name=container.name, devices=list(self._held(pod.uid, container.name))
            )
            for container in pod.listed()
        ]
        return v1.PodResources(name=pod.name, namespace=pod.namespace, containers=containers)

    def _held(self, uid: str, container: str) -> Iterator[v1.ContainerDevices]:
        for resource, entry in self._ledger.of_container(uid, container).items():
            for node, devices in entry.devices.items():
                for device in devices:
                    yield _entry(resource, device, node if node != NO_NODE else None)

    def healthy(self) -> Iterator[v1.ContainerDevices]:
        """Describe the healthy devices; one with an empty topology is missing (rule 9)."""
        for resource, healthy in self._ledger.healthy.items():
            devices = self._ledger.devices.get(resource, {})
            for name in sorted(healthy):
                if devices[name].topology is None:
                    yield _entry(resource, name, None)
                for node in sorted(nodes_of(devices[name])):
                    yield _entry(resource, name, node)


def _entry(resource: str, device: str, node: int | None) -> v1.ContainerDevices:
    topology = v1.TopologyInfo(nodes=[v1.NumaNode(id=node)]) if node is not None else None
    return v1.ContainerDevices(resource_name=resource, device_ids=[device], topology=topology)


class Lister(v1.PodResourcesListerBase):
    """PodResources v1."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    async def list(self, message: v1.ListPodResourcesRequest) -> v1.ListPodResourcesResponse:  # noqa: ARG002  it is empty
        """List the active pods."""
        resources = self._resources
        resources.limit.take()
        resources.free()
        return v1.ListPodResourcesResponse(
            pod_resources=[resources.of_pod(pod) for pod in resources.active()]
        )

    async def get_allocatable_resources(
        self,
        message: v1.AllocatableResourcesRequest,  # noqa: ARG002  it is empty
    ) -> v1.AllocatableResourcesResponse:
        """List the healthy devices, one entry per device and NUMA node."""
        self._resources.limit.take()
        return v1.AllocatableResourcesResponse(devices=[*self._resources.healthy()])

    async def get(self, message: v1.GetPodResourcesRequest) -> v1.GetPodResourcesResponse:
        """Describe one active pod."""
        self._resources.limit.take()
        name, namespace = message.pod_name, message.pod_namespace
        for pod in self._resources.active():
            if (pod.name, pod.namespace) == (name, namespace):
                return v1.GetPodResourcesResponse(pod_resources=self._resources.of_pod(pod))
        raise GRPCError(Status.UNKNOWN, f"pod {name} in namespace {namespace} not found")


class AlphaLister(v1alpha1.PodResourcesListerBase):
    """PodResources v1alpha1: the same entries without topology, app containers only."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    async def list(
        self,
        message: v1alpha1.ListPodResourcesRequest,  # noqa: ARG002  it is empty
    ) -> v1alpha1.ListPodResourcesResponse:
        """List the active pods."""
        self._resources.limit.take()
        self._resources.free()
        pods = [self._of_pod(pod) for pod in self._resources.active()]
        return v1alpha1.ListPodResourcesResponse(pod_resources=pods)

    def _of_pod(self, pod: Pod) -> v1alpha1.PodResources:
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
            for container in self._resources.of_pod(pod).containers
            if container.name in names
        ]
        return v1alpha1.PodResources(name=pod.name, namespace=pod.namespace, containers=containers)
