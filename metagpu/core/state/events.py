"""Events on the bus: facts that changed the snapshot, and other messages."""

from collections.abc import Mapping

import msgspec

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import Holder, ResourceClaimRef, ResourceName
from metagpu.core.state.facts import Fact


class MemoryExceeded(msgspec.Struct, frozen=True):
    """A container uses more GPU memory than its limit, or than others leave.

    Attributes:
        pod_uid: the uid of its pod, which another pod of the same name does not have.
        used: bytes that its processes use; `share` are the bytes of its shares, `limit` its limit.
        will_end: whether its processes are ended if the excess lasts.
        borrowed: bytes within its limit that others need; 0 for a container above its limit.
    """

    gpu: GpuId
    holder: Holder
    pod_uid: str | None
    used: int
    share: int
    limit: int
    will_end: bool
    at: float
    borrowed: int = 0


class ProcessSignalled(msgspec.Struct, frozen=True):
    """A process got a signal: its container used more GPU memory than its limit.

    Attributes:
        signal: `SIGTERM`, or `SIGKILL` for a process that did not end.
        memory: bytes of GPU memory of the process.
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
    borrowed: int = 0


class TimeExceeded(msgspec.Struct, frozen=True):
    """A container takes more of a GPU's time than its shares give.

    Others want more. One event when that has lasted for the pool's window, and one each hour.

    Attributes:
        pod_uid: the uid of its pod, `None` where it is unknown.
        used: percent of the GPU's time that it takes; `given` is what its shares give.
        seconds: for how long.
    """

    gpu: GpuId
    holder: Holder
    pod_uid: str | None
    used: float
    given: float
    seconds: float
    at: float


class UnauthorizedUseFound(msgspec.Struct, frozen=True):
    """A container uses a GPU without a share: one event per container and GPU.

    Attributes:
        holder: the container's names, `None` where they are unknown.
        memory: bytes of one of its processes, `None` where the driver reports none.
    """

    gpu: GpuId
    holder: Holder | None
    container_id: str
    pod_uid: str
    pid: int
    memory: int | None
    at: float


class ContainerAbsent(msgspec.Struct, frozen=True):
    """A container holds shares and runs no longer: one event for each absence.

    Attributes:
        pod_uid: the uid of its pod, `None` where it is unknown.
        shares: the number of its shares on each GPU.
        seconds: since it was last seen to run.
    """

    holder: Holder
    pod_uid: str | None
    shares: Mapping[GpuId, int]
    seconds: float
    at: float


class MixedRequestFound(msgspec.Struct, frozen=True):
    """A container holds shares of several resources, and sees the devices of one.

    One event for each container.

    Attributes:
        pod_uid: the uid of its pod, `None` where it is unknown.
        devices: the devices of each resource, in words.
    """

    holder: Holder
    pod_uid: str | None
    devices: Mapping[ResourceName, str]
    at: float


class ConfigRejected(msgspec.Struct, frozen=True):
    """A configuration was rejected. One event per fault.

    Attributes:
        reason: file, line and path, and the problem there.
        effect: the configuration that is in force instead, if any.
    """

    reason: str
    at: float
    effect: str


class DaemonNotReady(msgspec.Struct, frozen=True):
    """This daemon cannot take the node, and takes nothing over from another one.

    Attributes:
        reason: all that is missing.
    """

    reason: str


class XidReported(msgspec.Struct, frozen=True):
    """NVML reported an XID; `gpu` is `None` where NVML did not name the GPU."""

    gpu: GpuId | None
    code: int
    at: float


class MemoryErrorReported(msgspec.Struct, frozen=True):
    """NVML reported a memory error; `gpu` is `None` where NVML did not name the GPU."""

    gpu: GpuId | None
    corrected: bool
    at: float


class LayoutApplied(msgspec.Struct, frozen=True):
    """A configuration has come into force, perhaps with the same shares as before."""


class PodListRequested(msgspec.Struct, frozen=True):
    """A complete list of pods would show whether those that hold shares have ended.

    Attributes:
        at: the event loop's time; a list of before does not show it.
    """

    at: float


class CheckpointRequested(msgspec.Struct, frozen=True):
    """The kubelet should write its checkpoint: each list that it gets makes it do so."""


class PodEnded(msgspec.Struct, frozen=True):
    """A pod is gone, or its containers have ended: its shares will soon be free."""

    pod: KnownPod


class AnnotationRejected(msgspec.Struct, frozen=True):
    """A pod's annotation about GPU memory is not followed: one event for each reason."""

    pod: KnownPod
    reason: str
    at: float


class PreferenceMissed(msgspec.Struct, frozen=True):
    """A preference of GPUs was not followed at the kubelet's request for shares.

    Attributes:
        containers: the pods' uids and the containers that it may have been asked for.
        reason: why, and what would help.
    """

    containers: tuple[tuple[str, str], ...]
    reason: str


class PreferenceNotMet(msgspec.Struct, frozen=True):
    """A container's shares are not on the GPUs that its pod prefers.

    One event for each container.

    Attributes:
        reason: the shares, the annotation, and why.
    """

    pod: KnownPod
    container: str
    reason: str
    at: float


class ResourceClaimRefused(msgspec.Struct, frozen=True):
    """A ResourceClaim was not prepared when the kubelet asked for it.

    Attributes:
        cause: the class of the error.
        reason: the sentence that the kubelet shows at the pods.
    """

    claim: ResourceClaimRef
    cause: type[RequestError]
    reason: str = ""


class ClaimRefusalEnded(msgspec.Struct, frozen=True):
    """A ResourceClaim was prepared or unprepared: an earlier refusal has ended."""

    claim: ResourceClaimRef


class DevicesLost(msgspec.Struct, frozen=True):
    """A container's GPUs or MIG devices no longer exist: one event for each container.

    Attributes:
        fix: the command that helps.
    """

    holder: Holder
    pod_uid: str
    devices: tuple[str, ...]
    fix: str
    at: float


class AllocationRefused(msgspec.Struct, frozen=True):
    """Allocate refused a request. It names no pod: the pod's status has the reason.

    Attributes:
        cause: the class of the error; refusals of one cause are alike.
        reason: the sentence that the kubelet copies into the pod's status.
        remedy: what would help, where the reason does not say so.
        never: whether the request itself has to change.
    """

    resource: ResourceName
    cause: str
    reason: str
    remedy: str = ""
    never: bool = False

    @classmethod
    def of(cls, resource: ResourceName, error: RequestError) -> "AllocationRefused":
        """Return the event of an error that refuses a request."""
        return cls(resource, type(error).__name__, str(error), error.remedy, error.never)


Event = (
    Fact
    | MemoryExceeded
    | ProcessSignalled
    | TimeExceeded
    | UnauthorizedUseFound
    | ContainerAbsent
    | MixedRequestFound
    | ConfigRejected
    | DaemonNotReady
    | XidReported
    | MemoryErrorReported
    | LayoutApplied
    | CheckpointRequested
    | PodListRequested
    | PodEnded
    | AnnotationRejected
    | PreferenceMissed
    | PreferenceNotMet
    | DevicesLost
    | AllocationRefused
    | ResourceClaimRefused
    | ClaimRefusalEnded
)
"""Everything that the bus carries."""
