"""Facts: what happened, as values that enter the registry.

A fact that changed the snapshot is also an event on the bus.
"""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from metagpu.core.model.gpu import Gpu, GpuId, Topology
from metagpu.core.model.offers import Api, OfferRule
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.resource_claims import ClaimDevice
from metagpu.core.model.shares import (
    CordonSource,
    Fault,
    Holder,
    OfferTurn,
    ProvisionedState,
    Recovery,
    ResourceClaimRef,
    ResourceName,
    Share,
    ShareId,
)
from metagpu.core.model.snapshot import AnsweredNodes, Versions


class GpusFound(msgspec.Struct, frozen=True):
    """NVML lists these GPUs. A known GPU that is missing from the list stays known."""

    gpus: tuple[Gpu, ...]
    at: float


class UnreadableGpusFound(msgspec.Struct, frozen=True):
    """NVML counts these GPUs and never described them: all of now, by index."""

    reasons: Mapping[int, str]
    at: float


class TopologyRead(msgspec.Struct, frozen=True):
    """NVML reported connections of GPUs. A missing connection stays as known."""

    topology: Topology


class DriverRead(msgspec.Struct, frozen=True):
    """NVML reported its versions."""

    versions: Versions


class CompetingPluginFound(msgspec.Struct, frozen=True):
    """Another device plugin serves a resource; `where` names the plugin."""

    resource: ResourceName
    where: str


class CompetingPluginGone(msgspec.Struct, frozen=True):
    """The competing plugin is gone, and metagpu serves the resource again."""

    resource: ResourceName


class RegistrationProblemFound(msgspec.Struct, frozen=True):
    """The kubelet lacks a resource on offer, or counts other shares than listed."""

    resource: ResourceName
    problem: str


class RegistrationProblemGone(msgspec.Struct, frozen=True):
    """The kubelet has a resource as metagpu lists it."""

    resource: ResourceName


class GpuFaulted(msgspec.Struct, frozen=True):
    """A GPU left service. Until it recovers, the first reason, kind and time stay.

    But a fault of the GPU itself replaces reason and kind of one of the driver as a whole.
    """

    gpu: GpuId
    reason: str
    at: float
    fault: Fault | None = None


class GpuFaultExplained(msgspec.Struct, frozen=True):
    """NVML as a whole cannot be used for another reason than before.

    The GPU is out of service for that: its time and kind of fault stay.
    """

    gpu: GpuId
    reason: str


class GpuNeedsProof(msgspec.Struct, frozen=True):
    """A GPU out of service had a fault of which a passed check says nothing."""

    gpu: GpuId


class GpuRecovered(msgspec.Struct, frozen=True):
    """A GPU is in service again; `reason` states the evidence."""

    gpu: GpuId
    reason: str
    at: float


class GpuRecovering(msgspec.Struct, frozen=True):
    """The checks of a GPU that is out of service pass; with `None` they fail again."""

    gpu: GpuId
    recovery: Recovery | None


class GpuUnheard(msgspec.Struct, frozen=True):
    """NVML does not deliver a GPU's XIDs. The first time and the latest reason stay."""

    gpu: GpuId
    reason: str
    at: float


class GpuHeard(msgspec.Struct, frozen=True):
    """NVML delivers a GPU's XIDs again."""

    gpu: GpuId
    at: float


class InstanceFaulted(msgspec.Struct, frozen=True):
    """A MIG device went out of service; the rest of its GPU stays in service.

    Until it recovers, the first reason and time stay.
    """

    gpu: GpuId
    device: str
    reason: str
    at: float


class InstanceRecovered(msgspec.Struct, frozen=True):
    """A MIG device is in service again, or no longer exists; `reason` states which."""

    gpu: GpuId
    device: str
    reason: str
    at: float


class SharesOffered(msgspec.Struct, frozen=True):
    """A configuration was applied to the GPUs: these shares are on offer from now on.

    Attributes:
        resources: every resource, also those without a share.
        rules: the rule by which free shares of a resource are held back; nothing is held back of a
            resource without one.
        apis: the API of each resource; of one that is missing it is that of device plugins.
    """

    resources: tuple[ResourceName, ...]
    shares: tuple[Share, ...]
    rules: Mapping[ResourceName, OfferRule] = msgspec.field(default_factory=dict)
    apis: Mapping[ResourceName, Api] = msgspec.field(default_factory=dict)


class TurnsChanged(msgspec.Struct, frozen=True):
    """Idle GPUs are offered by other backends from now on.

    With `None` all backends of a GPU offer it. GPUs that are missing keep their turns.
    """

    turns: Mapping[GpuId, OfferTurn | None]


class SharesClaimed(msgspec.Struct, frozen=True):
    """Allocate claimed these shares for a container, or confirmed the claim.

    Attributes:
        unanswered: whether Allocate waits for hardware before it answers.
        resource_claim: the ResourceClaim that they are prepared for, `None` for Allocate.
        settings: what the claim's parameters ask of the backends of shares.
        pools: the drivers and pools of the claim's devices.
    """

    shares: tuple[Share, ...]
    at: float
    unanswered: bool = False
    resource_claim: ResourceClaimRef | None = None
    settings: Mapping[ShareId, str] = {}
    pools: Mapping[ShareId, str] = {}


class ResourceClaimsRead(msgspec.Struct, frozen=True):
    """The kubelet's account of prepared ResourceClaims names these devices of them.

    Leases begin for shares that have none. `at` is the event loop's time.
    """

    claims: Mapping[ResourceClaimRef, tuple[ClaimDevice, ...]]
    at: float


class SharesPending(msgspec.Struct, frozen=True):
    """A container with these shares waits at its start for their hardware devices.

    The fact is applied when such shares are granted, and at a container start that finds a device
    missing. Known holders stay; shares without a lease are ignored.
    """

    shares: tuple[Share, ...]
    at: float


class SharesReleased(msgspec.Struct, frozen=True):
    """Leases ended: the pod is gone, the grant failed, or no pod used it."""

    shares: tuple[Share, ...]
    at: float


class KubeletStarted(msgspec.Struct, frozen=True):
    """A kubelet is about to get our shares: all earlier leases become unconfirmed.

    Attributes:
        kubelet: the identity of its socket; the same kubelet changes nothing.
    """

    kubelet: tuple[int, int, int]


class EarlierLeases(msgspec.Struct, frozen=True):
    """The leases that a kubelet gave before this daemon started are known, or are not.

    Attributes:
        unknown: why they are unknown, empty once they are known.
    """

    unknown: str


class LeasesObserved(msgspec.Struct, frozen=True):
    """All that one look at the kubelet found: its list of holders, and its checkpoint.

    `core/state/leases.py` has the rule by which leases begin and end with it. `at` is the time of
    the request, by the event loop's clock: the list says nothing about younger leases. A share that
    is held on our GPU and is not on offer, or not under that name, becomes a lease too: the GPU is
    not granted twice.

    Attributes:
        admission_timeout: seconds after the last claim until a lease without a holder ends. The
            kubelet lists a pod once it is admitted, and never lists the shares of init containers.
        longest_admission: the same while the checkpoint names the share. It names that of an ended
            pod too, until the kubelet admits another one.
        resources: the resource name of each share; a share that is missing here is held under the
            name that offers it.
        kubelet_ready: whether the kubelet knows its pods; before that, no lease ends.
        pods: namespace and name of all pods of the list, also of pods without devices.
        allocated: the ids that the checkpoint names, and their resources; `None` if it is unknown.
        containers: pod uid and name of the containers that have each of these ids.
        begins: whether ids of the checkpoint are held although the list does not name them.
        confirms: whether the present kubelet wrote the checkpoint.
        released: ids that the kubelet's checkpoint named for a lease and names no more.
        running: ids of pods that the API server reports as running, or that the host has.
        ended: ids that the checkpoint names for pods that have ended, and for no others.
        stopped: holders whose containers do not run any more.
        nodes: the device nodes of GPUs in the answers that the checkpoint keeps, by GPU.
        of_claims: the containers of ResourceClaims' shares, by the uid of the claim and the share.
    """

    holders: Mapping[ShareId, Holder]
    at: float
    admission_timeout: float = 20.0
    longest_admission: float = 120.0
    resources: Mapping[ShareId, ResourceName] = msgspec.field(default_factory=dict)
    kubelet_ready: bool = True
    pods: frozenset[tuple[str, str]] = frozenset()
    allocated: Mapping[ShareId, ResourceName] | None = None
    containers: Mapping[ShareId, frozenset[tuple[str, str]]] = msgspec.field(default_factory=dict)
    begins: bool = False
    confirms: bool = False
    released: frozenset[ShareId] = frozenset()
    running: frozenset[ShareId] = frozenset()
    ended: frozenset[ShareId] = frozenset()
    stopped: frozenset[Holder] = frozenset()
    nodes: Mapping[GpuId, AnsweredNodes] = MappingProxyType({})
    of_claims: Mapping[tuple[str, ShareId], tuple[Holder, ...]] = MappingProxyType({})


class NodeWithdrawn(msgspec.Struct, frozen=True):
    """This daemon is about to give the node up, and takes nothing back.

    Attributes:
        hands_over: whether another daemon waits for the node: GPUs, labels and conditions stay as
            they are for it.
    """

    hands_over: bool


class PodsListed(msgspec.Struct, frozen=True):
    """The API server's complete list of this node's pods, kept up to date since.

    Attributes:
        asked: the event loop's time at which the list was requested.
    """

    pods: tuple[KnownPod, ...]
    asked: float = float("-inf")


class GpuCordoned(msgspec.Struct, frozen=True):
    """A source keeps new pods from a GPU. Its latest reason replaces earlier ones."""

    gpu: GpuId
    reason: str
    at: float
    source: CordonSource = CordonSource.OPERATOR


class GpuUncordoned(msgspec.Struct, frozen=True):
    """A source allows new pods on a GPU again; the cordons of others stay."""

    gpu: GpuId
    at: float
    source: CordonSource = CordonSource.OPERATOR


class BackendAttached(msgspec.Struct, frozen=True):
    """A backend serves a GPU from now on (`ManagesGpu.serve`).

    Attributes:
        needs_setup: whether the backend grants no share before `BackendResumed`.
        needs_cleanup: whether the GPU stays with the backend after the last lease, until
            `CleanupFinished`.
    """

    gpu: GpuId
    backend: str
    needs_setup: bool
    needs_cleanup: bool
    at: float


class BackendDetached(msgspec.Struct, frozen=True):
    """A backend no longer serves a GPU; its pause, cleanup and devices are dropped."""

    gpu: GpuId
    backend: str
    at: float


class BackendSuspended(msgspec.Struct, frozen=True):
    """A backend grants no shares of a GPU for now.

    The first time and the latest reason stay.

    Attributes:
        until_reset: whether that lasts until the GPU is reset.
    """

    gpu: GpuId
    backend: str
    reason: str
    at: float
    until_reset: bool = False


class BackendResumed(msgspec.Struct, frozen=True):
    """A backend is ready to grant shares of a GPU, for the first time or again."""

    gpu: GpuId
    backend: str
    at: float


class CleanupFinished(msgspec.Struct, frozen=True):
    """A backend has cleaned a GPU up: every backend may use the GPU.

    The cleanup that began at `since` has ended; one that began later, after a grant, goes on.
    """

    gpu: GpuId
    backend: str
    since: float
    at: float


class ProvisioningReported(msgspec.Struct, frozen=True):
    """A backend reports all that it has created on a GPU."""

    gpu: GpuId
    backend: str
    provisioned: ProvisionedState
    at: float


GpuFact = (
    GpuFaulted
    | GpuFaultExplained
    | GpuNeedsProof
    | GpuRecovered
    | GpuRecovering
    | GpuUnheard
    | GpuHeard
    | InstanceFaulted
    | InstanceRecovered
    | GpuCordoned
    | GpuUncordoned
    | BackendAttached
    | BackendDetached
    | BackendSuspended
    | BackendResumed
    | CleanupFinished
    | ProvisioningReported
)
"""A fact about one GPU."""

Fact = (
    GpusFound
    | UnreadableGpusFound
    | TopologyRead
    | DriverRead
    | CompetingPluginFound
    | CompetingPluginGone
    | RegistrationProblemFound
    | RegistrationProblemGone
    | SharesOffered
    | TurnsChanged
    | SharesClaimed
    | SharesPending
    | ResourceClaimsRead
    | SharesReleased
    | KubeletStarted
    | EarlierLeases
    | LeasesObserved
    | NodeWithdrawn
    | PodsListed
    | GpuFact
)
