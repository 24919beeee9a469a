"""What a container gets for its shares: the answer to Allocate, without Kubernetes' words."""

from collections.abc import Mapping

import msgspec


class Mount(msgspec.Struct, frozen=True):
    """A path of the host to be seen in the container."""

    container_path: str
    host_path: str
    read_only: bool = True


class DeviceNode(msgspec.Struct, frozen=True):
    """A device file of the host to be opened from the container; permissions of `r`, `w`, `m`."""

    container_path: str
    host_path: str
    permissions: str = "rw"


class Grant(msgspec.Struct, frozen=True):
    """What a container gets.

    The kubelet keeps it and replays it at every container start: nothing in it may depend on the
    moment.
    """

    envs: Mapping[str, str] = msgspec.field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    nodes: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    cdi_names: tuple[str, ...] = ()
