"""What can happen: facts, which enter the registry, and are news if they changed something."""

from collections.abc import Mapping

import msgspec

from metagpu.core.gpu import Gpu, GpuId, Topology
from metagpu.core.model import Fault, Holder, ResourceName, Share, ShareId, Stock
from metagpu.core.pods import KnownPod
from metagpu.core.snapshot import Versions


class GpusFound(msgspec.Struct, frozen=True):
    """NVML was read: these GPUs exist. One known before and missing now stays known."""

    gpus: tuple[Gpu, ...]
    at: float


class TopologyRead(msgspec.Struct, frozen=True):
    """NVML told how GPUs are connected. What was known before and is missing now stays known."""

    topology: Topology


class DriverRead(msgspec.Struct, frozen=True):
    """NVML told its versions."""

    versions: Versions


class RivalMet(msgspec.Struct, frozen=True):
    """Another device plugin serves a resource of ours, so that we do not; `where` names it."""

    resource: ResourceName
    where: str


class RivalLeft(msgspec.Struct, frozen=True):
    """The other device plugin is gone, and the resource is served again."""

    resource: ResourceName


class GpuFaulted(msgspec.Struct, frozen=True):
    """A GPU went out of service. While it is out, the first reason, kind and time stand."""

    gpu: GpuId
    reason: str
    at: float
    fault: Fault | None = None


class GpuRecovered(msgspec.Struct, frozen=True):
    """A GPU is fit to serve again; `reason` says what that rests on."""

    gpu: GpuId
    reason: str
    at: float


class InstanceFaulted(msgspec.Struct, frozen=True):
    """A MIG device went out of service, and nothing else of its GPU.

    While it is out, the first reason and time stand.
    """

    gpu: GpuId
    device: str
    reason: str
    at: float


class InstanceRecovered(msgspec.Struct, frozen=True):
    """A MIG device is fit to serve again, or is no more; `reason` says which."""

    gpu: GpuId
    device: str
    reason: str
    at: float


class SharesOffered(msgspec.Struct, frozen=True):
    """The configuration was laid over the GPUs: this is on offer from now on.

    `resources` names every resource, also those without a share.
    """

    resources: tuple[ResourceName, ...]
    shares: tuple[Share, ...]


class SharesGranted(msgspec.Struct, frozen=True):
    """A container was given these shares."""

    shares: tuple[Share, ...]
    at: float


class SharesAwaited(msgspec.Struct, frozen=True):
    """A container that holds these shares waits at its start for what stands for them.

    Told when they are granted so, and at a start that finds something missing.

    Who holds them stays as it was known; of shares that nobody holds this says nothing.
    """

    shares: tuple[Share, ...]
    at: float


class SharesReleased(msgspec.Struct, frozen=True):
    """Nobody holds these shares any more: the pod is gone, the grant failed, or was never used."""

    shares: tuple[Share, ...]
    at: float


class LeasesObserved(msgspec.Struct, frozen=True):
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
    resources: Mapping[ShareId, ResourceName] = msgspec.field(default_factory=dict)
    settled: bool = True


class PodsTold(msgspec.Struct, frozen=True):
    """The API server's account of this node's pods, complete."""

    pods: tuple[KnownPod, ...]


class GpuCordoned(msgspec.Struct, frozen=True):
    """An operator wants no new shares of a GPU to be given. The latest reason stands."""

    gpu: GpuId
    reason: str
    at: float


class GpuUncordoned(msgspec.Struct, frozen=True):
    """An operator lets shares of a GPU be given again."""

    gpu: GpuId
    at: float


class GpuKept(msgspec.Struct, frozen=True):
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


class GpuLeft(msgspec.Struct, frozen=True):
    """A backend does not keep a GPU any more: nothing waits for its word."""

    gpu: GpuId
    backend: str
    at: float


class BackendSuspended(msgspec.Struct, frozen=True):
    """A backend can give no shares of a GPU for now. The latest reason and the first time stand.

    Attributes:
        reset: whether that lasts until somebody resets the GPU.
    """

    gpu: GpuId
    backend: str
    reason: str
    at: float
    reset: bool = False


class BackendResumed(msgspec.Struct, frozen=True):
    """A backend is ready to give shares of a GPU, for the first time or again."""

    gpu: GpuId
    backend: str
    at: float


class GpuReturned(msgspec.Struct, frozen=True):
    """A backend has cleaned a GPU after its last lease: it is anyone's.

    `since` is when the cleaning began that has ended. One that began later, after a share was
    given once more, is another: this says nothing about it.
    """

    gpu: GpuId
    backend: str
    since: float
    at: float


class StockTold(msgspec.Struct, frozen=True):
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
