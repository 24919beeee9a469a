"""Pods as the simulated kubelet sees them, and what it hands to the container runtime."""

import uuid
from collections.abc import Iterator, Mapping
from typing import Self

import msgspec

from metagpu.plugins.pb import v1beta1


class Container(msgspec.Struct, frozen=True):
    """One container of a pod: its limits on extended resources.

    `restartable` means something for init containers only: such a one is a sidecar, which keeps
    its devices instead of handing them on.
    """

    name: str
    resources: Mapping[str, int] = msgspec.field(default_factory=dict)
    restartable: bool = False


class Pod(msgspec.Struct, frozen=True):
    """A pod bound to this node. The UID is its identity; a random one is made up by default."""

    name: str
    namespace: str = "default"
    uid: str = msgspec.field(default_factory=lambda: str(uuid.uuid4()))
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()

    @classmethod
    def single(cls, name: str, resources: Mapping[str, int]) -> Self:
        """Make a pod of one container, `main`."""
        return cls(name, containers=(Container("main", resources),))

    def in_order(self) -> Iterator[Container]:
        """Give all containers in the order of admission: init containers first."""
        yield from self.init_containers
        yield from self.containers

    def listed(self) -> Iterator[Container]:
        """Give the containers that PodResources names: no ordinary init containers (§4)."""
        yield from (container for container in self.init_containers if container.restartable)
        yield from self.containers

    def container(self, name: str) -> Container:
        """Find a container by name.

        Raises:
            KeyError: the pod has none of that name.
        """
        for container in self.in_order():
            if container.name == name:
                return container
        raise KeyError(name)

    def request(self, resource: str) -> int:
        """Count what the scheduler reserves: the peak over the pod's start and its running."""
        sidecars, peak = 0, 0
        for container in self.init_containers:
            asked = container.resources.get(resource, 0)
            if container.restartable:
                sidecars += asked
            peak = max(peak, sidecars if container.restartable else sidecars + asked)
        running = sidecars + sum(c.resources.get(resource, 0) for c in self.containers)
        return max(peak, running)

    def resources(self) -> set[str]:
        """Name every extended resource that any container asks for."""
        return {resource for container in self.in_order() for resource in container.resources}


class RunOptions(msgspec.Struct, frozen=True):
    """What a container is created with: its resources' AllocateResponses, merged (§1.5)."""

    envs: Mapping[str, str] = msgspec.field(default_factory=dict)
    mounts: tuple[v1beta1.Mount, ...] = ()
    devices: tuple[v1beta1.DeviceSpec, ...] = ()
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()


def merge(responses: list[v1beta1.ContainerAllocateResponse]) -> RunOptions:
    """Merge responses: of two with the same key or container path, the first wins (§1.5)."""
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
    return RunOptions(
        envs=envs,
        mounts=tuple(mounts.values()),
        devices=tuple(devices.values()),
        annotations=annotations,
        cdi_devices=tuple(names),
    )


class AdmissionError(Exception):
    """The pod is Failed with this reason and message; no controller retries that pod."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class ContainerStartError(Exception):
    """The container waits with reason CreateContainerConfigError; the kubelet tries it again."""

    reason = "CreateContainerConfigError"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class DeviceError(Exception):
    """An error inside the device manager; its text is what the kubelet would print."""
