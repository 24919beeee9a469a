"""Errors of metagpu; the class names the cause, or the remedy.

MetagpuError
├── ConfigError             the operator: a file holds something that metagpu cannot follow
├── RequestError            the pod: its request cannot be met (the pod's events show the message)
│   ├── UnknownShare        the id is not, or no longer, on offer
│   ├── UnknownDevice       the allocated device of a ResourceClaim is not, or no longer, on offer
│   ├── GpuUnhealthy        the share's GPU is out of service
│   ├── InstanceUnhealthy   the share's MIG device is out of service
│   ├── GpuPaused           an operator or the backend grants no new shares of the GPU for now
│   ├── ShareTaken          another backend or an overlapping share holds the GPU
│   ├── ProvisioningFailed  the share's hardware device could not be created
│   │   └── ProvisioningLasts  its creation goes on, and the request may be repeated
│   ├── CdiNameMissing      the container runtime would not find the share's CDI name
│   ├── SharesOverlap       the kubelet chose shares that exclude each other
│   ├── FractionSplit       the ids would spread one fraction over several GPUs
│   ├── MultipleDevices     the ids are of several devices, and MPS serves a container on one
│   ├── TooManyClients      the GPU or instance serves its maximum of MPS clients
│   ├── ResourceClaimUnusable  the ResourceClaim is not what the kubelet or its author meant
│   ├── SharingUnavailable  the GPU's pool does not share it as the ResourceClaim says
│   ├── DeviceOccupied      an allocated device has too few free shares
│   └── TooManyReplicas     the pod asks for several time-slices where one is the maximum
├── InternalError           metagpu itself: it has a fault, which its log describes
├── PackageIncomplete       the installation: a file of the package is missing
├── NoDaemon                the node: no daemon answers on its socket
├── NotPermitted            the user: only root may ask the daemon
├── DaemonRefusal           the daemon: it answers with an error, which has its reason
├── UnknownCommand          the daemon: it does not have the command
├── MalformedRequest        the caller: the bytes on a socket are no request
├── UnknownGpu              the user: there is no such GPU
├── NotCordoned             the user: the GPU is not cordoned
├── NotAcknowledged         the GPU: it cannot come back into service, or has not left it
├── CordonFailed            a node's daemon: it does not follow the annotation of a cordon
├── DrainFailed             pods: they still hold the GPU
├── UnknownPod              the user: there is no such pod
├── NoKubeconfig            the user: there are no credentials for the API server
├── NotInstalled            the cluster: it has no daemon of metagpu, that the user may see
├── SeveralNamespaces       the cluster: more than one namespace has daemons
├── NodeNotServed           the node: metagpu does not run on it
├── NoAnswer                a node's daemon: it does not answer through the API server
├── AddressUnusable         the host: the address cannot be listened on
├── FileNotWritten          the host: a file or a folder cannot be written
├── LeftoverInUse           the host: what an uninstallation would remove is used
├── FaultNoteUnusable       the note of faults is not the last daemon's, or damaged
├── DriverError             the driver: an NVML call failed
│   ├── DriverUnavailable   NVML as a whole: no library, no driver, or the driver was unloaded
│   │   └── DriverReplaced  the loaded library is of another version than the driver
│   ├── GpuLost             the GPU does not answer any more, or needs a reset first
│   ├── DriverTimeout       the call did not return in time
│   ├── InUse               programs use the GPU or instance; the call may be tried again
│   ├── InsufficientResources  the GPU has no free capacity for the request
│   ├── NotFound            the subject of the call does not exist, or not any more
│   └── Unsupported         the GPU, its driver or its present mode does not support the call
├── ProgramError            the host: a program failed or did not end in time
│   └── ProgramMissing      the host has no such program
├── HostError               the host: the kernel refused a system call
├── AnotherDaemon           another metagpu has the node
├── TakeoverLasts           another daemon is taking the node over, and the command may be repeated
├── TakeoverFailed          the other metagpu keeps the node: the exchange of the daemon failed
├── CdiError                the host: the CDI specification cannot be written
├── ClaimAccountUnreadable  the kubelet: its account of ResourceClaims cannot be read
├── KubeletError            the kubelet: it refused a registration, or cannot be reached
└── ClusterError            the API server: it refused a request, or cannot be reached
"""

import re
from enum import StrEnum
from typing import ClassVar


def describe_error(error: BaseException) -> str:
    """Return the cause of an error in words, else the name of its class."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def at_place(problem: str, file: str, line: int, path: str) -> str:
    """Return a problem after its place, without what of the place is empty or 0."""
    return ": ".join([*filter(None, (file, str(line or ""), path)), problem])


def reason_of(name: str) -> str:
    """Return the reason that the name of a class means, such as `gpu_unhealthy`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class MetagpuError(Exception):
    """Base of all errors that metagpu raises on purpose.

    Attributes:
        reason: the stable name of the cause, for programs: that of the class, such as
            `gpu_unhealthy`.
    """

    reason: str

    def __init_subclass__(cls) -> None:
        cls.reason = reason_of(cls.__name__)


class ConfigReason(StrEnum):
    """The kind of an error of a configuration.

    - unreadable: a file cannot be read.
    - no_yaml: a text is no YAML.
    - too_large: a text, a list, or the shares of a node are more than is possible.
    - unknown_format: a file has no format that metagpu reads.
    - unknown_key: a key is not known where it stands.
    - unknown_value: a value is none of those that are allowed.
    - wrong_type: a value is of another type, such as a text for a number.
    - invalid_value: a value is out of range, or has another form than it should.
    - missing: a key, or each entry of a list, is missing.
    - given_twice: one thing is given twice, such as a key, a pool's name, or a file.
    - conflict: settings contradict each other, or one needs another that is not given.
    - invalid_name: Kubernetes does not allow the name of a resource.
    - name_taken: a resource would be offered by two backends, or through different fronts.
    - no_choice: nothing chooses among several profiles, layouts or nodes.
    - unknown_choice: the profile or layout that is chosen does not exist.
    - not_served: metagpu has no backend for a setting.
    - no_gpu: no GPU of the node can have what a pool offers.
    - not_written: the CDI specification cannot be written.
    """

    UNREADABLE = "unreadable"
    NO_YAML = "no_yaml"
    TOO_LARGE = "too_large"
    UNKNOWN_FORMAT = "unknown_format"
    UNKNOWN_KEY = "unknown_key"
    UNKNOWN_VALUE = "unknown_value"
    WRONG_TYPE = "wrong_type"
    INVALID_VALUE = "invalid_value"
    MISSING = "missing"
    GIVEN_TWICE = "given_twice"
    CONFLICT = "conflict"
    INVALID_NAME = "invalid_name"
    NAME_TAKEN = "name_taken"
    NO_CHOICE = "no_choice"
    UNKNOWN_CHOICE = "unknown_choice"
    NOT_SERVED = "not_served"
    NO_GPU = "no_gpu"
    NOT_WRITTEN = "not_written"


class ConfigError(MetagpuError):
    """Raised when a configuration cannot be used; names place, problem and fix.

    Attributes:
        reason: the kind of the problem.
        file: the path as the operator wrote it, or `<default>`.
        line: the 1-based line in that file, 0 for the whole file.
        path: the keys to the value, as `pools[0].backends[0].resource`; empty for the document.
        problem: the problem and the allowed values, in one line.
    """

    reason: ConfigReason

    def __init__(
        self, problem: str, reason: ConfigReason, *, file: str = "", line: int = 0, path: str = ""
    ) -> None:
        self.reason, self.problem = reason, problem
        self.file, self.line, self.path = file, line, path
        super().__init__(at_place(problem, file, line, path))


class RequestError(MetagpuError):
    """Raised when a pod's request cannot be met; the pod's owner reads the message.

    Attributes:
        remedy: what would help, where the message does not say so; for Kubernetes Events.
        never: whether the request itself has to change: no end of another pod would help.
    """

    remedy: ClassVar[str] = ""
    never: bool = False


class UnknownShare(RequestError):
    """Raised when the kubelet names an id that the resource does not offer."""

    def __init__(self, resource: str, share: str) -> None:
        super().__init__(
            f"{resource}: no share has the id {share!r}; the list of shares was sent again, "
            "a new pod will get one that exists"
        )


class UnknownDevice(RequestError):
    """Raised when a ResourceClaim is allocated a device that the node does not offer."""

    def __init__(self, pool: str, device: str, reason: str) -> None:
        super().__init__(f"device {device} of the ResourceSlice pool {pool} is not here: {reason}")


class GpuUnhealthy(RequestError):
    """Raised when a pod asks for a share of a GPU that is out of service."""

    remedy = "a new pod gets shares of another GPU, as soon as one has enough of them free"

    def __init__(self, resource: str, gpu: str, reason: str) -> None:
        super().__init__(f"{resource}: GPU {gpu} is unhealthy: {reason}")


class InstanceUnhealthy(RequestError):
    """Raised when a pod asks for a share whose MIG device is out of service."""

    def __init__(self, resource: str, share: str, gpu: str, reason: str) -> None:
        super().__init__(
            f"{resource}: MIG instance {share} of GPU {gpu} is unhealthy: {reason}; it is "
            "created again once no container holds it and no process uses it"
        )


class GpuPaused(RequestError):
    """Raised when a GPU has no new shares for now; `reason` names what must end."""

    remedy = "a new pod gets shares of another GPU, as soon as one has enough of them free"

    def __init__(self, resource: str, gpu: str, reason: str) -> None:
        super().__init__(f"{resource}: GPU {gpu} gives no new shares: {reason}")


class ShareTaken(RequestError):
    """Raised when a share conflicts with a share that is held already."""

    remedy = "a new pod gets other shares, as soon as enough of them are free"

    def __init__(self, share: str, reason: str) -> None:
        super().__init__(f"share {share} cannot be granted: {reason}")


class ProvisioningFailed(RequestError):
    """Raised when the hardware device of a share could not be created."""

    remedy = "`metagpu status` on the node shows what the driver answers"

    def __init__(self, resource: str, share: str, reason: str) -> None:
        super().__init__(f"{resource}: {share} could not be created: {reason}")


class ProvisioningLasts(ProvisioningFailed):
    """Raised when the creation of a share's hardware device outlasts the request."""


class CdiNameMissing(RequestError):
    """Raised when a grant would name a CDI device that no specification has."""

    remedy = "`mgctl doctor` on the node (MG602) checks the CDI specification"

    def __init__(self, names: str, reason: str) -> None:
        super().__init__(f"CDI has no {names}: {reason}")


class SharesOverlap(RequestError):
    """Raised when the kubelet chose shares of one GPU that exclude each other."""

    def __init__(self, resource: str, gpu: str, shares: str) -> None:
        super().__init__(
            f"{resource}: GPU {gpu} has room for one of {shares} at a time, and the kubelet chose "
            "them together; ask for fewer, or wait for another GPU"
        )


class FractionSplit(RequestError):
    """Raised when the kubelet's choice would spread one fraction over several GPUs."""

    def __init__(self, resource: str, wanted: int, chosen: str, free: str) -> None:
        super().__init__(
            f"{resource}: {wanted} shares do not fit: a request gets one GPU, or whole GPUs and "
            f"one part of another, and the kubelet chose {chosen}; free now: {free}. Ask for "
            "less, wait for a pod to end, or set `split: accept` in the pool's backend"
        )


class MultipleDevices(RequestError):
    """Raised when a container would be an MPS client on several devices.

    `kind` names the devices, `larger` the resource to ask for instead, and `most` the units of the
    largest device: a request of more can never be met.
    """

    def __init__(
        self,
        resource: str,
        wanted: int,
        chosen: str,
        free: str,
        *,
        kind: str = "GPU",
        larger: str = "whole GPUs",
        most: int,
    ) -> None:
        self.never = wanted > most
        if self.never:
            super().__init__(
                f"{resource}: no {kind} of this node can ever give {wanted} units: MPS serves a "
                f"container on one {kind}, and the largest has {most}; ask for at most {most}, or "
                f"for {larger}"
            )
            return
        super().__init__(
            f"{resource}: {wanted} units do not fit: MPS serves a container on one {kind}, and the "
            f"kubelet chose {chosen}; free now: {free}. Ask for less, wait for a pod to end, or "
            f"ask for {larger}"
        )


class TooManyClients(RequestError):
    """Raised when a GPU or MIG instance serves its maximum of MPS clients."""

    def __init__(self, resource: str, device: str, limit: int) -> None:
        super().__init__(
            f"{resource}: {device} serves {limit} containers through MPS and can serve no more, "
            "though it has units left; wait for a pod to end"
        )


class TooManyReplicas(RequestError):
    """Raised when a container asks for several replicas where its pool allows one.

    The message is that of NVIDIA's device plugin: runbooks and users know it.
    """

    remedy = "ask for 1: several replicas of one GPU give a container no more of it"
    never = True

    def __init__(self, resource: str, wanted: int) -> None:
        super().__init__(
            f'invalid allocation request for "{resource}": invalid request: '
            f"maximum request size for shared resources is 1; found {wanted}"
        )


class ResourceClaimUnusable(RequestError):
    """Raised when a ResourceClaim cannot be prepared as the API server has it."""

    def __init__(self, claim: str, reason: str) -> None:
        super().__init__(f"ResourceClaim {claim} cannot be prepared: {reason}")


class SharingUnavailable(RequestError):
    """Raised when a GPU cannot be shared as the parameters of a ResourceClaim say."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"opaque parameters: {field}: {problem}")


class DeviceOccupied(RequestError):
    """Raised when too few shares of an allocated device are free."""

    remedy = "it is prepared as soon as enough of them are free"

    def __init__(self, gpu: str, device: str, wanted: int, free: int) -> None:
        super().__init__(f"GPU {gpu}: device {device} has {free} free shares of {wanted} needed")


class InternalError(MetagpuError):
    """Raised when a fault of metagpu's own ends its work."""


class PackageIncomplete(MetagpuError):
    """Raised when the installation lacks a file of the package."""


class NoDaemon(MetagpuError):
    """Raised when no daemon answers on its socket."""


class NotPermitted(MetagpuError):
    """Raised when the user may not ask the daemon."""


class DaemonRefusal(MetagpuError):
    """Raised when the daemon answers with an error; the reason is the daemon's."""

    def __init__(self, problem: str, reason: str | None) -> None:
        super().__init__(problem)
        self.reason = reason or self.reason


class UnknownCommand(MetagpuError):
    """Raised when the daemon does not have a command."""


class MalformedRequest(MetagpuError):
    """Raised when the bytes on a socket are no request."""


class UnknownGpu(MetagpuError):
    """Raised when there is no GPU of a name."""


class NotCordoned(MetagpuError):
    """Raised when a GPU has no cordon that the user could end."""


class NotAcknowledged(MetagpuError):
    """Raised when a GPU cannot come back into service, or has not left it."""


class CordonFailed(MetagpuError):
    """Raised when a node's daemon does not follow the annotation of a cordon."""


class DrainFailed(MetagpuError):
    """Raised when pods still hold a GPU at the end of a drain."""


class UnknownPod(MetagpuError):
    """Raised when there is no pod of a name, nor a controller whose pods are refused."""


class NoKubeconfig(MetagpuError):
    """Raised when there are no credentials for the API server."""


class NotInstalled(MetagpuError):
    """Raised when no pod that the user may list is a daemon of metagpu."""


class SeveralNamespaces(MetagpuError):
    """Raised when several namespaces have daemons of metagpu."""


class NodeNotServed(MetagpuError):
    """Raised when a node has no daemon of metagpu."""


class NoAnswer(MetagpuError):
    """Raised when a node's daemon gives no answer, or an incomplete one."""


class AddressUnusable(MetagpuError):
    """Raised when an address cannot be listened on."""


class FileNotWritten(MetagpuError):
    """Raised when a file or a folder cannot be written."""


class LeftoverInUse(MetagpuError):
    """Raised when a program uses what an uninstallation would remove."""


class FaultNoteUnusable(MetagpuError):
    """Raised when the note of faults is damaged, or not that of the daemon before."""


class DriverError(MetagpuError):
    """Raised when an NVML call failed."""


class DriverUnavailable(DriverError):
    """Raised when NVML as a whole cannot be used; a new session must be opened."""


class DriverReplaced(DriverUnavailable):
    """Raised when the loaded library does not fit the driver; a new process may help."""


class GpuLost(DriverError):
    """Raised when a GPU does not answer any more, or only after a reset."""


class DriverTimeout(DriverError):
    """Raised when an NVML call did not return within its deadline."""


class InUse(DriverError):
    """Raised when programs use the GPU or instance; the call may be tried again."""


class InsufficientResources(DriverError):
    """Raised when a GPU has no free capacity for the request."""


class NotFound(DriverError):
    """Raised when NVML does not find the subject of a call."""


class Unsupported(DriverError):
    """Raised when a GPU, its driver or its present mode does not support a call."""


class ProgramError(MetagpuError):
    """Raised when a program of the host failed or did not end in time."""


class ProgramMissing(ProgramError):
    """Raised when the host has no such program, or not in the expected folders."""


class HostError(MetagpuError):
    """Raised when the kernel refuses a system call."""


class AnotherDaemon(MetagpuError):
    """Raised when another daemon of metagpu has the run folder or the kubelet's."""


class TakeoverLasts(MetagpuError):
    """Raised when another daemon is taking the node over."""


class TakeoverFailed(MetagpuError):
    """Raised when a daemon cannot take the node over from the one that has it."""


class CdiError(MetagpuError):
    """Raised when the CDI specification cannot be written; the message names the fix."""


class ClaimAccountUnreadable(MetagpuError):
    """Raised when the kubelet's account of ResourceClaims exists and cannot be read."""


class KubeletError(MetagpuError):
    """Raised when the kubelet refuses a registration or cannot be reached."""


class ClusterError(MetagpuError):
    """Raised when the API server refuses a request or cannot be reached.

    Attributes:
        message: the API server's own text, empty where it did not answer.
        status: the HTTP status, 0 where the API server did not answer.
        retry_after: the seconds to wait before the next request, as the API server asks.
        fields: the fields of an object that another manager owns, such as
            `.metadata.labels.nvidia.com/gpu.count`.
        causes: the API server's texts of what refuses the request, such as a PodDisruptionBudget.
    """

    def __init__(
        self,
        problem: str,
        *,
        message: str = "",
        status: int = 0,
        retry_after: float = 0.0,
        fields: tuple[str, ...] = (),
        causes: tuple[str, ...] = (),
    ) -> None:
        self.message, self.status = message, status
        self.retry_after, self.fields, self.causes = retry_after, fields, causes
        super().__init__(problem)
