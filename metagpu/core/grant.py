"""What a container gets for its shares: the answer to Allocate, without Kubernetes' words."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Mount:
    """A path of the host to be seen in the container."""

    container_path: str
    host_path: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device file of the host to be opened from the container; permissions of `r`, `w`, `m`."""

    container_path: str
    host_path: str
    permissions: str = "rw"


@dataclass(frozen=True, slots=True)
class Grant:
    """What a container gets.

    The kubelet keeps it and replays it at every container start: nothing in it may depend on the
    moment.
    """

    envs: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    nodes: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi_names: tuple[str, ...] = ()
