"""What can happen: facts, which enter the registry, and are news if they changed something.

At the end there is news that changes nothing which is kept: it is only heard.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from metagpu.core.gpu import Gpu, GpuId, Topology
from metagpu.core.model import Fault, Holder, ResourceName, Share, ShareId, Stock
from metagpu.core.pods import KnownPod
from metagpu.core.snapshot import Versions


@dataclass(frozen=True, slots=True)
class GpusFound:
    """NVML was read: these GPUs exist. One known before and missing now stays known."""

    gpus: tuple[Gpu, ...]
    at: float


@dataclass(frozen=True, slots=True)
class TopologyRead:
    """NVML told how GPUs are connected. What was known before and is missing now stays known."""

    topology: Topology


@dataclass(frozen=True, slots=True)
class DriverRead:
    """NVML told its versions."""

    versions: Versions


@dataclass(frozen=True, slots=True)
class RivalMet:
    """Another device plugin serves a resource of ours, so that we do not; `where` names it."""

    resource: ResourceName
    where: str


@dataclass(frozen=True, slots=True)
class RivalLeft:
    """The other device plugin is gone, and the resource is served again."""

    resource: ResourceName


@dataclass(frozen=True, slots=True)
class GpuFaulted:
    """A GPU went out of service. While it is out, the first reason, kind and time stand."""

    gpu: GpuId
    reason: str
    at: float
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class GpuRecovered:
    """A GPU is fit to serve again; `reason` says what that rests on."""

    gpu: GpuId
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class InstanceFaulted:
    """A MIG device went out of service, and nothing else of its GPU.

    While it is out, the first reason and time stand.
    """

    gpu: GpuId
    device: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class InstanceRecovered:
    """A MIG device is fit to serve again, or is no more; `reason` says which."""

    gpu: GpuId
    device: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class SharesOffered:
    """The configuration was laid over the GPUs: this is on offer from now on.

    `resources` names every resource, also those without a share.
    """

    resources: tuple[ResourceName, ...]
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class SharesGranted:
    """A container was given these shares."""

    shares: tuple[Share, ...]
    at: float


@dataclass(frozen=True, slots=True)
class SharesAwaited:
    """A container that holds these shares waits at its start for what stands for them.

    Told when they are granted so, and at a start that finds something missing.

    Who holds them stays as it was known; of shares that nobody holds this says nothing.
    """

    shares: tuple[Share, ...]
    at: float


@dataclass(frozen=True, slots=True)
class SharesReleased:
    """Nobody holds these shares any more: the pod is gone, the grant failed, or was never used."""

    shares: tuple[Share, ...]
    at: float


@dataclass(frozen=True, slots=True)
class LeasesObserved:
    """The kubelet's own account of who holds what, complete.

    `at` is when it was asked: of younger leases it says nothing, neither their end nor a holder.
    A lease that it does not name ends, but one whose holder was never told is kept for `patience`
    seconds: a pod is told of once it is admitted, and what its init containers hold never is.
    What is held on a GPU of ours and is not on offer, or under another name, is a lease too: it
    keeps the GPU from being given away twice.

    Attributes:
        resources: the name each is held under; left out, it is the one that offers it.
        settled: whether the kubelet knows its pods; if it may not yet, nothing ends.
    """

    holders: Mapping[ShareId, Holder]
    at: float
    patience: float = 20.0
    resources: Mapping[ShareId, ResourceName] = field(default_factory=dict)
    settled: bool = True


@dataclass(frozen=True, slots=True)
class PodsTold:
    """The API server's account of this node's pods, complete."""

    pods: tuple[KnownPod, ...]


@dataclass(frozen=True, slots=True)
class GpuCordoned:
    """An operator wants no new shares of a GPU to be given. The latest reason stands."""

    gpu: GpuId
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class GpuUncordoned:
    """An operator lets shares of a GPU be given again."""

    gpu: GpuId
    at: float


@dataclass(frozen=True, slots=True)
class GpuKept:
    """A backend keeps a GPU from now on (`Backend.serve`), with these options.

    Attributes:
        readies: whether it gives no share before it says so.
        cleans: whether the GPU stays its own after its last lease, until it says so.
    """

    gpu: GpuId
    backend: str
    readies: bool
    cleans: bool
    at: float


@dataclass(frozen=True, slots=True)
class GpuLeft:
    """A backend does not keep a GPU any more: nothing waits for its word."""

    gpu: GpuId
    backend: str
    at: float


@dataclass(frozen=True, slots=True)
class BackendSuspended:
    """A backend can give no shares of a GPU for now. The latest reason and the first time stand.

    Attributes:
        reset: whether that lasts until somebody resets the GPU.
    """

    gpu: GpuId
    backend: str
    reason: str
    at: float
    reset: bool = False


@dataclass(frozen=True, slots=True)
class BackendResumed:
    """A backend is ready to give shares of a GPU, for the first time or again."""

    gpu: GpuId
    backend: str
    at: float


@dataclass(frozen=True, slots=True)
class GpuReturned:
    """A backend has cleaned a GPU after its last lease: it is anyone's.

    `since` is when the cleaning began that has ended. One that began later, after a share was
    given once more, is another: this says nothing about it.
    """

    gpu: GpuId
    backend: str
    since: float
    at: float


@dataclass(frozen=True, slots=True)
class StockTold:
    """A backend tells what it has made of a GPU: all of it."""

    gpu: GpuId
    backend: str
    stock: Stock
    at: float


GpuFact = (
    GpuFaulted
    | GpuRecovered
    | InstanceFaulted
    | InstanceRecovered
    | GpuCordoned
    | GpuUncordoned
    | GpuKept
    | GpuLeft
    | BackendSuspended
    | BackendResumed
    | GpuReturned
    | StockTold
)
"""What concerns one GPU alone."""

Fact = (
    GpusFound
    | TopologyRead
    | DriverRead
    | RivalMet
    | RivalLeft
    | SharesOffered
    | SharesGranted
    | SharesAwaited
    | SharesReleased
    | LeasesObserved
    | PodsTold
    | GpuFact
)


@dataclass(frozen=True, slots=True)
class MemoryExceeded:
    """A container was found to use more of a GPU's memory than it may: once for each excess.

    Attributes:
        pod_uid: tells its pod from an earlier one of its name.
        used: bytes that its processes have together; `share` what it holds, `limit` what it may.
        will_end: whether processes of it will be ended if it stays so.
    """

    gpu: GpuId
    holder: Holder
    pod_uid: str | None
    used: int
    share: int
    limit: int
    will_end: bool
    at: float


@dataclass(frozen=True, slots=True)
class ProcessSignalled:
    """A process was made to end because its container used too much of a GPU's memory.

    Attributes:
        signal: `SIGTERM`, or `SIGKILL` for one that did not go.
        memory: bytes that the process had of the GPU.
    """

    gpu: GpuId
    holder: Holder
    pod_uid: str | None
    pid: int
    signal: str
    memory: int
    used: int
    share: int
    limit: int
    at: float


@dataclass(frozen=True, slots=True)
class StrangerFound:
    """A container uses a GPU of which it holds no share: once for each container and GPU.

    Attributes:
        holder: its names, `None` if nobody knows them.
        memory: bytes that one of its processes has, `None` when the driver does not say.
    """

    gpu: GpuId
    holder: Holder | None
    container_id: str
    pod_uid: str
    pid: int
    memory: int | None
    at: float


@dataclass(frozen=True, slots=True)
class ConfigurationRefused:
    """What the configuration says now cannot be taken; the last good one stays. Once a fault.

    Attributes:
        why: file, line and path, and what is wrong there.
    """

    why: str
    at: float


@dataclass(frozen=True, slots=True)
class XidHeard:
    """NVML told of an XID, be it fatal or not; `gpu` is `None` when it did not say of which GPU."""

    gpu: GpuId | None
    code: int
    at: float


@dataclass(frozen=True, slots=True)
class MemoryErrorHeard:
    """NVML told of a memory error, once for each event; `gpu` as of `XidHeard`."""

    gpu: GpuId | None
    corrected: bool
    at: float


@dataclass(frozen=True, slots=True)
class PodEnded:
    """A pod has gone, or its containers have ended: what it holds will soon be free."""

    pod: KnownPod


@dataclass(frozen=True, slots=True)
class WishRefused:
    """A pod wishes something about its GPU memory that it does not get: once for each reason."""

    pod: KnownPod
    why: str
    at: float


Event = (
    Fact
    | MemoryExceeded
    | ProcessSignalled
    | StrangerFound
    | ConfigurationRefused
    | XidHeard
    | MemoryErrorHeard
    | PodEnded
    | WishRefused
)
"""What is heard on the bus: facts that changed something, and news that change nothing we keep."""
