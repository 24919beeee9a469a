"""A simulated cluster as plain values, for JSON and tables."""

from collections.abc import Mapping

import msgspec

from metagpu.core.model.gpu import MIB


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


class ClaimedDeviceView(msgspec.Struct, frozen=True):
    """A device that a claim has.

    Attributes:
        request: the request of the claim, `request/alternative` for one of several.
        gpu: the index of its GPU, `None` for one of no GPU here.
        part: what it is of the GPU: `gpu` for all of it, `fraction`, `mig-1g5gb-4`.
        consumed: the amount of each capacity that the claim consumes.
    """

    request: str
    gpu: int | None
    part: str
    consumed: Mapping[str, str] = {}

    def __str__(self) -> str:
        amounts = ", ".join(f"{name}={amount}" for name, amount in self.consumed.items())
        amount = f" ({amounts})" if amounts else ""
        what = "all" if self.part == "gpu" else f"{self.part}{amount}"
        return f"{what} of GPU {'?' if self.gpu is None else self.gpu}"


class ClaimView(msgspec.Struct, frozen=True, rename="camel"):
    """A ResourceClaim.

    Attributes:
        state: `Pending`, `Allocated` by the scheduler, or `Prepared` on its node.
        node: the node of its devices, empty without some.
        pods: the names of the pods that use it.
        message: why it waits.
    """

    name: str
    namespace: str
    uid: str
    state: str
    node: str
    devices: tuple[ClaimedDeviceView, ...]
    pods: tuple[str, ...]
    message: str = ""

    def __str__(self) -> str:
        return self.name if self.namespace == "default" else f"{self.namespace}/{self.name}"


class PodProcessView(msgspec.Struct, frozen=True):
    """A process in a pod's container.

    Attributes:
        gpu: the index of its GPU, `None` for one that is not there any more.
        memory: in bytes, `None` where NVML does not know it.
        load: the percent of the multiprocessors that it would use alone.
    """

    pid: int
    namespace: str
    pod: str
    container: str
    gpu: int | None
    memory: int | None
    load: int

    @property
    def title(self) -> str:
        """Return the pod's name, with its namespace if that is not `default`."""
        return self.pod if self.namespace == "default" else f"{self.namespace}/{self.pod}"

    @property
    def amount(self) -> str:
        """Return its memory as text."""
        return "unknown" if self.memory is None else f"{self.memory // MIB} MiB"

    def __str__(self) -> str:
        place = f"pod {self.title} ({self.container}) on GPU {self.gpu}"
        return f"process {self.pid} runs in {place}: memory {self.amount}, load {self.load} %"


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
    claims: tuple[ClaimView, ...] | None = None
    node: ClusterNodeView | None = None
    events: tuple[EventView, ...] | None = None
    processes: tuple[PodProcessView, ...] | None = None
