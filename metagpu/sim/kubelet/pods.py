"""Pods of the simulated kubelet, and the options for the container runtime."""

import uuid
from collections.abc import Iterator, Mapping
from typing import Self

import msgspec

from metagpu.plugins.kubelet.pb import v1beta1


class SimContainer(msgspec.Struct, frozen=True):
    """One container of a pod: its limits on extended resources.

    `restartable` matters for init containers only: a restartable one is a sidecar, which keeps its
    devices and does not hand them on.
    """

    name: str
    resources: Mapping[str, int] = msgspec.field(default_factory=dict)
    restartable: bool = False


class SimPod(msgspec.Struct, frozen=True):
    """A pod bound to this node; its UID is its identity, random by default."""

    name: str
    namespace: str = "default"
    uid: str = msgspec.field(default_factory=lambda: str(uuid.uuid4()))
    containers: tuple[SimContainer, ...] = ()
    init_containers: tuple[SimContainer, ...] = ()

    @classmethod
    def single(cls, name: str, resources: Mapping[str, int]) -> Self:
        """Create a pod with one container, `main`."""
        return cls(name, containers=(SimContainer("main", resources),))

    def in_order(self) -> Iterator[SimContainer]:
        """Yield all containers in the order of admission: init containers first."""
        yield from self.init_containers
        yield from self.containers

    def listed(self) -> Iterator[SimContainer]:
        """Yield the containers that PodResources lists: no ordinary init containers (§4)."""
        yield from (container for container in self.init_containers if container.restartable)
        yield from self.containers

    def container(self, name: str) -> SimContainer:
        """Return a container by name.

        Raises:
            KeyError: the pod has no such container.
        """
        for container in self.in_order():
            if container.name == name:
                return container
        raise KeyError(name)

    def request(self, resource: str) -> int:
        """Return the scheduler's request: the peak over the pod's start and its running."""
        sidecars, peak = 0, 0
        for container in self.init_containers:
            asked = container.resources.get(resource, 0)
            if container.restartable:
                sidecars += asked
            peak = max(peak, sidecars if container.restartable else sidecars + asked)
        running = sidecars + sum(c.resources.get(resource, 0) for c in self.containers)
        return max(peak, running)

    def resources(self) -> set[str]:
        """Return every extended resource that a container requests."""
        return {resource for container in self.in_order() for resource in container.resources}


class ContainerRunOptions(msgspec.Struct, frozen=True):
    """The options of a container: its resources' AllocateResponses, merged (§1.5)."""

    envs: Mapping[str, str] = msgspec.field(default_factory=dict)
    mounts: tuple[v1beta1.Mount, ...] = ()
    devices: tuple[v1beta1.DeviceSpec, ...] = ()
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()


def merge_responses(responses: list[v1beta1.ContainerAllocateResponse]) -> ContainerRunOptions:
    """Merge responses; of two with one key or container path, the first wins (§1.5)."""
    envs: dict[str, str] = {}
    annotations: dict[str, str] = {}
    mounts: dict[str, v1beta1.Mount] = {}
    devices: dict[str, v1beta1.DeviceSpec] = {}
    names: dict[str, None] = {}
    for response in responses:
        envs = {**response.envs, **envs}
        annotations = {**response.annotations, **annotations}
        mounts = {**{m.container_path: m for m in response.mounts}, **mounts}
        devices = {**{d.container_path: d for d in response.devices}, **devices}
        names.update((cdi.name, None) for cdi in response.cdi_devices)
    return ContainerRunOptions(
        envs=envs,
        mounts=tuple(mounts.values()),
        devices=tuple(devices.values()),
        annotations=annotations,
        cdi_devices=tuple(names),
    )


class AdmissionError(Exception):
    """Raised when a pod is refused for a reason; no controller retries it.

    Containers of a pod that ran are ended (`has_run`), and its phase is that of their exits.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.has_run = False


class ContainerStartError(Exception):
    """Raised for a container in CreateContainerConfigError; the kubelet retries."""

    reason = "CreateContainerConfigError"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class DeviceError(Exception):
    """Raised inside the device manager, with the kubelet's own text."""
