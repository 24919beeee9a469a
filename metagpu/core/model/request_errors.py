"""Errors of requests that cannot be met; the class names the cause.

MetagpuError
└── RequestError            the pod: its request cannot be met (the pod's events show the message)
    ├── UnknownShare        the id is not, or no longer, on offer
    ├── UnknownDevice       the allocated device of a ResourceClaim is not, or no longer, on offer
    ├── GpuUnhealthy        the share's GPU is out of service
    ├── InstanceUnhealthy   the share's MIG device is out of service
    ├── GpuPaused           an operator or the backend grants no new shares of the GPU for now
    ├── ShareTaken          another backend or an overlapping share holds the GPU
    ├── ProvisioningFailed  the share's hardware device could not be created
    │   └── ProvisioningLasts  its creation goes on, and the request may be repeated
    ├── CdiNameMissing      the container runtime would not find the share's CDI name
    ├── SharesOverlap       the kubelet chose shares that exclude each other
    ├── FractionSplit       the ids would spread one fraction over several GPUs
    ├── MultipleDevices     the ids are of several devices, and MPS serves a container on one
    ├── TooManyClients      the GPU or instance serves its maximum of MPS clients
    ├── ResourceClaimUnusable  the ResourceClaim is not what the kubelet or its author meant
    ├── SharingUnavailable  the GPU's pool does not share it as the ResourceClaim says
    ├── DeviceOccupied      an allocated device has too few free shares
    └── TooManyReplicas     the pod asks for several time-slices where one is the maximum
"""

from typing import ClassVar, Final

from metagpu.core.errors import MetagpuError

INIT_CONTAINERS: Final = (
    "If init containers of the pod ask for this resource, let each ask for as much as the pod's "
    "largest container"
)
"""The kubelet gives the shares of an init container to later containers, which need more."""


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
            "less, wait for a pod to end, or set `split: accept` in the pool's backend. "
            + INIT_CONTAINERS
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
            f"ask for {larger}. {INIT_CONTAINERS}"
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
