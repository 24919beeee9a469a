"""Shares, leases and what backends created for them, as frozen values.

A share is one id offered to the kubelet; a lease is a share that a container holds. The other
words are in `docs/glossary.md`. Times are seconds since the epoch, but for those of leases,
which are the event loop's: decisions depend on them. Memory is in bytes.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, NewType

import msgspec

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.mig import Placement

ShareId = NewType("ShareId", str)
"""`GPU-<uuid>::<slot>`, or `GPU-<uuid>` for a whole GPU; at most 63 characters."""
UNKNOWN_BACKEND: Final = "foreign"
"""The backend of a lease on a share that no backend of metagpu offers, or not any more."""
ResourceName = NewType("ResourceName", str)
"""The name a pod asks for, such as `cnvrg.io/metagpu`."""


class Share(msgspec.Struct, frozen=True, gc=False):
    """One id on offer: a part of `gpu` that `backend` shares as `resource`.

    Attributes:
        number: its position among the shares of this GPU and resource, from 0.
        footprint: the slots of the GPU that it occupies; two shares of one backend with a slot in
            common exclude each other.
        memory: bytes of GPU memory that it stands for, 0 where the GPU's memory is unknown.
        replica: whether it stands for one container of those that take turns, and not for a part:
            the memory of a replica is nominal.
        interchangeable: whether its backend offers the whole GPU in such shares, all alike, so that
            held ones can be counted as any of them; never a share of a MIG instance.
        by_size: whether people ask for memory, as 10Gi, of which each share has `memory`.
    """

    id: ShareId
    gpu: GpuId
    resource: ResourceName
    backend: str
    number: int
    footprint: frozenset[str]
    memory: int
    replica: bool = False
    interchangeable: bool = False
    by_size: bool = False

    def __hash__(self) -> int:
        """Return the hash of the id: sets of shares are built while the kubelet waits."""
        return hash(self.id)


class Holder(msgspec.Struct, frozen=True):
    """The container that holds a share.

    Attributes:
        container: its name; empty for one of the pod's containers of which the name is unknown.
    """

    namespace: str
    pod: str
    container: str

    def __str__(self) -> str:
        name = self.container or "a container of unknown name"
        return f"{self.namespace}/{self.pod} ({name})"

    def covers(self, other: "Holder") -> bool:
        """Return whether `other` is this container, or may be, where its name is unknown."""
        return self == other or (
            not self.container and (self.namespace, self.pod) == (other.namespace, other.pod)
        )


class ResourceClaimRef(msgspec.Struct, frozen=True):
    """A ResourceClaim: its name, and the uid that no other one ever has."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Lease(msgspec.Struct, frozen=True, gc=False):
    """A share that a container holds, by itself or by a ResourceClaim of its pod.

    Leases are built by the hundred while the kubelet waits: a Struct takes a sixth of a
    dataclass's time.

    Attributes:
        since: the event loop's time of the claim.
        holder: `None` until the kubelet names the container.
        provisioned_at_start: whether the container waits at each of its starts for the share's
            hardware device, whichever device that is then.
        unanswered: whether Allocate still waits for the share's hardware device.
        unconfirmed: whether the lease is known from an earlier kubelet alone: the present kubelet
            neither asked for the share nor names it, and may take it for free.
        from_checkpoint: whether the kubelet's checkpoint began the lease: its container, if it
            still exists, had its answer long ago, and no device is created for it.
        resource_claim: the ResourceClaim that holds the share until it is unprepared; `holder` is
            one of its containers then. `None` for a lease of the device plugin API.
        sharers: the other containers of the ResourceClaim: all use the share together.
        settings: what the parameters of the ResourceClaim ask of the backend, mostly nothing.
        pool: the driver and pool of the ResourceClaim's device, as `gpu.metagpu.io/node-1`: under
            these the scheduler counts it.
    """

    share: Share
    since: float
    holder: Holder | None = None
    provisioned_at_start: bool = False
    unanswered: bool = False
    unconfirmed: bool = False
    from_checkpoint: bool = False
    resource_claim: ResourceClaimRef | None = None
    sharers: tuple[Holder, ...] = ()
    settings: str = ""
    pool: str = ""


def holders_of(lease: Lease) -> tuple[Holder, ...]:
    """Return the containers that hold a lease: none before the kubelet names one."""
    return () if lease.holder is None else (lease.holder, *lease.sharers)


class Fault(StrEnum):
    """The kind of a GPU's fault, for counters; `reason` of the verdict is for people.

    - xid: a fatal XID.
    - memory: an uncorrected memory error, or a row that could not be remapped.
    - recovery_action: NVML reports that the GPU needs a recovery action.
    - no_answer: NVML does not answer calls about the GPU.
    - not_listed: NVML does not list the GPU any more.
    - driver: NVML as a whole cannot be used.
    """

    XID = "xid"
    MEMORY = "memory"
    RECOVERY_ACTION = "recovery_action"
    NO_ANSWER = "no_answer"
    NOT_LISTED = "not_listed"
    DRIVER = "driver"


class Recovery(msgspec.Struct, frozen=True):
    """The way back of a GPU that is out of service.

    Attributes:
        since: when the present run of passed checks began.
        returns_at: when the GPU returns if each check until then passes; `None` where it waits for
            an operator.
    """

    since: float
    returns_at: float | None = None


class Verdict(msgspec.Struct, frozen=True):
    """Health of a GPU or MIG device, since when, and the reason and kind of its fault.

    `recovery` is set while the checks of a GPU that is out of service pass. `needs_proof` is set
    once a fault came of which a passed check says nothing (`GpuRecovery` in `core.health.rules`).
    """

    healthy: bool
    since: float
    reason: str = ""
    fault: Fault | None = None
    recovery: Recovery | None = None
    needs_proof: bool = False


class Pause(msgspec.Struct, frozen=True):
    """A reason to grant nothing new: a suspended backend, or a cordon.

    Existing leases stay.

    Attributes:
        until_reset: whether the pause lasts until the GPU is reset.
    """

    reason: str
    since: float
    until_reset: bool = False


class CordonSource(StrEnum):
    """The sources of cordons: a GPU has one of each, and each source lifts its own."""

    OPERATOR = "operator"
    DRIVER_UPGRADE = "driver upgrade"
    NODE = "annotation of the Node"


class OfferTurn(msgspec.Struct, frozen=True):
    """The backend that offers an idle GPU now, where several take turns.

    Attributes:
        since: the event loop's time of its beginning.
        withdrawn: whether the turn ends: bound pods are still admitted, and no others are bound.
        next: the backend that follows, at `until`; the same one where it goes on.
    """

    backend: str
    since: float
    withdrawn: bool = False
    next: str = ""
    until: float = 0.0


class HardwareDevice(msgspec.Struct, frozen=True):
    """The hardware device of a share: a MIG device.

    Attributes:
        device: the name that programs use, such as `MIG-<uuid>`.
        gpu_instance: NVML's id of the GPU instance; `compute_instance` is the id inside it.
        idle: no container holds the device and no process is on it: it may be reused or removed.
        reusable: the share may be granted again before the device is known to be idle: the next
            pod is sent here before the kubelet reports the end of the last one.
        placement: the memory slices of its GPU instance, where they are known.
    """

    device: str
    gpu_instance: int
    compute_instance: int
    idle: bool = False
    reusable: bool = False
    placement: Placement | None = None


class ProvisionFailure(msgspec.Struct, frozen=True):
    """The failure to create a device, for the lease that began at `since`."""

    reason: str
    since: float


class ProvisionedState(msgspec.Struct, frozen=True):
    """All that a backend has created on a GPU.

    Devices are created for shares that are held.

    Attributes:
        devices: the existing devices. A device that no container holds and that is not idle
            makes other shares unavailable.
        failed: leases whose devices could not be created.
        blocked: slots that something else occupies, and what.
        paused: shares that are not granted for now, and why; leased ones are listed Unhealthy too.
        exclusive: whether the GPU is in a mode in which no other backend can use it.
        named_devices: all existing MIG devices, of other programs too, by each of their CDI names:
            their uuids, and the names of the slots where they may be created again.
        delayed: shares that are not on offer yet, although nothing conflicts with them any more.
        pending: instances that the driver was asked to create and has not reported: an instance
            that appears there belongs to metagpu, also after another backend attached to the GPU.
    """

    devices: Mapping[ShareId, HardwareDevice] = msgspec.field(default_factory=dict)
    failed: Mapping[ShareId, ProvisionFailure] = msgspec.field(default_factory=dict)
    blocked: Mapping[str, str] = msgspec.field(default_factory=dict)
    paused: Mapping[ShareId, str] = msgspec.field(default_factory=dict)
    exclusive: bool = False
    named_devices: Mapping[str, HardwareDevice] = msgspec.field(default_factory=dict)
    delayed: frozenset[ShareId] = frozenset()
    pending: frozenset[str] = frozenset()


def gpu_of(share: ShareId) -> GpuId:
    """Return the GPU in the id of a share."""
    return GpuId(share.partition("::")[0])


def count_containers(leases: Iterable[Lease]) -> int:
    """Count the containers of leases; one without a name yet counts by its time."""
    return len({holder for lease in leases for holder in holders_of(lease) or (lease.since,)})


def by_gpu(shares: Iterable[Share]) -> dict[GpuId, list[Share]]:
    """Group shares by their GPU, in order; a share that is given twice counts once."""
    once = list({share.id: share for share in shares}.values())
    if len({share.gpu for share in once}) == 1:
        return {once[0].gpu: once}  # nearly always, and the kubelet waits

    found: dict[GpuId, list[Share]] = {}
    for share in once:
        found.setdefault(share.gpu, []).append(share)
    return found
