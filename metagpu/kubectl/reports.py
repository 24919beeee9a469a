"""The parts of a daemon's reports that the commands read.

A report is compared with them once, as it arrives: without one of them the node has no answer, and
the commands need no checks of their own. What is `NotRequired` they can do without.
"""

from typing import Any, NotRequired, TypedDict

from metagpu.core.model.offers import RequestRule

Texts = dict[str, str]
Amount = float | None


class DatedForm(TypedDict):
    """A pause, or why XIDs of a GPU are not heard."""

    reason: str
    since: str


class FaultForm(TypedDict):
    """A fault of a MIG device."""

    device: str
    shares: list[str]
    reason: str
    since: str


class RecoveryForm(TypedDict):
    """The return of a GPU."""

    since: str
    returnsAt: str | None


class SharesForm(TypedDict):
    """Shares of a resource on a GPU."""

    capacity: int
    held: int
    free: int


class GpuForm(TypedDict):
    """A GPU in a status."""

    index: int
    uuid: str
    product: str
    memoryMiB: Amount
    pciBusId: str | None
    numaNode: int | None
    healthy: bool
    reason: str
    since: str
    recovery: NotRequired[RecoveryForm | None]
    backends: list[str]
    owner: str | None
    pool: str | None
    poolReason: str
    shares: dict[str, SharesForm]
    faults: list[FaultForm]
    cordon: DatedForm | None
    unheard: NotRequired[DatedForm | None]
    suspended: dict[str, DatedForm]
    cleaning: Texts
    blocked: list[str]
    waitsFor: str | None
    turn: NotRequired[dict[str, Any] | None]


class ResourceForm(TypedDict):
    """A resource's amounts at the kubelet."""

    capacity: int
    allocatable: int


class NodeOfferForm(TypedDict):
    """The free shares of a resource."""

    free: int
    heldBack: int
    largestRequest: int
    requestRule: NotRequired[RequestRule]
    freeDevices: NotRequired[int]


class DevicesOfTypeForm(TypedDict):
    """The devices of a type that DRA has."""

    devices: int
    free: int
    largest: dict[str, int]


class HeldSharesForm(TypedDict):
    """A lease of shares."""

    resource: str
    gpu: int
    uuid: str
    shares: int
    holder: str | None
    sharers: NotRequired[list[str]]


class TextForm(TypedDict):
    """A remark."""

    text: str


class ReasonForm(TypedDict):
    """A GPU that cannot be read."""

    reason: str


class OfHolderForm(TypedDict):
    """A problem of a container."""

    holder: str
    reason: str


class LostDeviceForm(TypedDict):
    """A container whose MIG device exists no more."""

    holder: str
    fix: str


class PrivilegeUseForm(TypedDict):
    """A capability of the daemon."""

    held: bool
    neededFor: list[str]


class SlicesForm(TypedDict):
    """ResourceSlices and DeviceClasses."""

    problem: NotRequired[str | None]
    classesProblem: NotRequired[str | None]
    contested: NotRequired[Texts | None]
    extendedResources: NotRequired[dict[str, Any] | list[str]]


class ClusterPartForm(TypedDict):
    """The part of a status about the API server."""

    nodeDifferences: NotRequired[Texts | None]
    resourceSlices: NotRequired[SlicesForm | None]


class DraPartForm(TypedDict):
    """The DRA driver."""

    driver: str
    problem: str | None
    claims: int
    crowded: NotRequired[list[str] | None]
    statusProblem: NotRequired[str | None]


class ConfigurationForm(TypedDict):
    """The state of the daemon's configuration."""

    error: NotRequired[str | None]
    misfits: NotRequired[list[str] | None]


class EventForm(TypedDict):
    """An event of the node."""

    at: Any


class StatusForm(TypedDict):
    """A daemon's status."""

    resources: dict[str, ResourceForm]
    gpus: list[GpuForm]
    topology: list[list[str]]
    offers: dict[str, NodeOfferForm]
    leases: list[HeldSharesForm]
    remarks: list[TextForm]
    competingPlugins: Texts
    registrationProblems: Texts
    unreadableGpus: NotRequired[list[ReasonForm]]
    unusedPools: NotRequired[Texts]
    devices: NotRequired[dict[str, DevicesOfTypeForm]]
    privileges: NotRequired[dict[str, PrivilegeUseForm]]
    endedTasks: NotRequired[Texts | None]
    leaseDifferences: NotRequired[list[OfHolderForm] | None]
    mixedRequests: NotRequired[list[OfHolderForm] | None]
    lostDevices: NotRequired[list[LostDeviceForm] | None]
    configuration: NotRequired[ConfigurationForm | None]
    cluster: NotRequired[ClusterPartForm | None]
    dra: NotRequired[DraPartForm | None]
    events: NotRequired[list[EventForm]]


class UsedSharesForm(TypedDict):
    """Shares of a resource on a GPU, in a usage."""

    resource: str
    capacity: int
    held: int


class UsedGpuForm(TypedDict):
    """A GPU in a usage."""

    index: int
    uuid: str
    product: str
    usableMiB: Amount
    usedMiB: Amount
    utilization: Amount
    shares: list[UsedSharesForm]
    healthy: bool
    reason: str
    faults: Texts
    cordon: str | None
    policy: str
    failure: str | None


class PartForm(TypedDict):
    """The part of a GPU that a container holds."""

    index: int
    uuid: str
    resource: str
    shares: int
    capacity: int
    shareMiB: Amount
    limitMiB: Amount
    usedMiB: Amount
    utilization: Amount
    overLimit: bool
    processes: int
    guard: str | None


class ContainerForm(TypedDict):
    """A container that holds shares."""

    namespace: str
    pod: str
    container: str
    podUid: str | None
    podOwner: str | None
    podPhase: str | None
    gpus: list[PartForm]


class UsageForm(TypedDict):
    """The use of a node's GPUs."""

    version: str
    gpus: list[UsedGpuForm]
    containers: list[ContainerForm]
    unauthorized: int
