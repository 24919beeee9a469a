"""A simulated cluster as plain values, for JSON and tables."""

from collections.abc import Mapping

import msgspec


class PodView(msgspec.Struct, frozen=True, rename="camel"):
    """A pod.

    Attributes:
        phase: as in Kubernetes: `Pending`, `Running`, `Succeeded` or `Failed`.
        resources: the number of requested devices by resource name.
        devices: the ids that the kubelet has allocated, by resource name.
        gpus: the indices of the GPUs of these ids.
        reason: why it is not running, in a word, as `Unschedulable`; empty if it runs.
        message: the same in a sentence.
    """

    name: str
    namespace: str
    uid: str
    phase: str
    node: str
    resources: Mapping[str, int]
    devices: Mapping[str, tuple[str, ...]] = {}
    gpus: tuple[int, ...] = ()
    annotations: Mapping[str, str] = {}
    reason: str = ""
    message: str = ""

    def __str__(self) -> str:
        return self.name if self.namespace == "default" else f"{self.namespace}/{self.name}"


class ResourceView(msgspec.Struct, frozen=True):
    """A resource on the Node; `requested` is that of bound pods which have not ended."""

    capacity: int
    allocatable: int
    requested: int


class ConditionView(msgspec.Struct, frozen=True):
    """A condition of the Node."""

    type: str
    status: str
    reason: str
    message: str


class ClusterNodeView(msgspec.Struct, frozen=True, rename="camel"):
    """The Node object, and whether its kubelet runs."""

    name: str
    kubelet_running: bool
    resources: Mapping[str, ResourceView]
    labels: Mapping[str, str]
    taints: tuple[str, ...]
    conditions: tuple[ConditionView, ...]


class EventView(msgspec.Struct, frozen=True):
    """An Event: `object` is `Node/NAME` or `Pod/NAMESPACE/NAME`."""

    type: str
    reason: str
    object: str
    count: int
    note: str


class ClusterReply(msgspec.Struct, frozen=True):
    """The outcome of a command: one line for the user, and what the command asks for."""

    message: str
    pods: tuple[PodView, ...] | None = None
    node: ClusterNodeView | None = None
    events: tuple[EventView, ...] | None = None
