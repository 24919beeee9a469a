"""Grants: the answer to Allocate, independent of the kubelet's messages."""

from collections.abc import Mapping

import msgspec


class Mount(msgspec.Struct, frozen=True):
    """A path of the host, mounted into the container."""

    container_path: str
    host_path: str
    read_only: bool = True


class DeviceNode(msgspec.Struct, frozen=True):
    """A device file of the host in the container; permissions of `r`, `w`, `m`."""

    container_path: str
    host_path: str
    permissions: str = "rw"


class Grant(msgspec.Struct, frozen=True):
    """The answer to Allocate for one container.

    The kubelet stores a grant and replays it at every container start: nothing in it may depend on
    the time.
    """

    envs: Mapping[str, str] = msgspec.field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    nodes: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    cdi_names: tuple[str, ...] = ()
