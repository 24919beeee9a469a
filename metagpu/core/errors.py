"""Every error of ours; a class says whose fault it is or what its reader can do.

MetagpuError
├── ConfigError          the operator's: a file says something we cannot follow
├── RequestError         the pod's: what it asks for cannot be given (its text reaches the pod)
│   ├── UnknownShare     an id that is not, or no longer, on offer
│   ├── GpuUnhealthy     the share's GPU is out of service
│   ├── GpuPaused        an operator or the backend gives no new shares of the GPU for now
│   ├── ShareTaken       another backend or an overlapping share holds the GPU
│   ├── NotMade          the share could not be made in hardware
│   ├── NotNamed         the container runtime would not find it by its CDI name
│   ├── Overlap          the kubelet chose shares that cannot be together
│   ├── FractionSplit    the ids would spread one fraction over several GPUs
│   ├── OneDeviceOnly    the ids are of several devices, and MPS serves a container on one
│   ├── TooManyClients   the GPU or instance serves as many containers through MPS as it can
│   └── TooManyReplicas  more than one time-slice where one is all that may be asked for
├── DriverError          the machine's: NVML could not do it
│   ├── DriverUnavailable  NVML as a whole: no library, no driver, or lost while running
│   ├── GpuLost          this GPU does not answer any more, or wants a reset first
│   ├── DriverTimeout    this call did not come back in time
│   ├── InUse            not while programs use it; may be tried again
│   ├── NoRoom           what is there already leaves no room for it
│   ├── NotThere         what it is about does not exist, or not any more
│   └── Unsupported      this GPU, or its driver, cannot do it
├── ToolError            the host's: a program of it failed
│   └── ToolMissing      the program is not there
├── HostError            the host's: the kernel refused us
├── CdiError             the host's: the CDI specification cannot be written
├── KubeletError         the kubelet's: it refused us, or is not there
└── ClusterError         the API server's: it refused us, or is not there
"""


def why(error: BaseException) -> str:
    """Say why something failed: in the system's words without its number, or what failed at all."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class MetagpuError(Exception):
    """Base of all errors that metagpu raises on purpose."""


class ConfigError(MetagpuError):
    """Raised when a configuration cannot be used; says where, what is wrong, what is allowed.

    Attributes:
        file: path as the operator gave it, or `<default>`.
        line: 1-based line in that file, 0 when the whole file is meant.
        path: keys to the value, as in `pools[0].backends[0].resource`; empty for the document.
        problem: what is wrong and what is allowed, one line.
    """

    def __init__(self, problem: str, *, file: str = "", line: int = 0, path: str = "") -> None:
        self.file, self.line, self.path, self.problem = file, line, path, problem
        where = [part for part in (file, str(line) if line else "", path) if part]
        super().__init__(": ".join([*where, problem]))


class RequestError(MetagpuError):
    """Raised when a pod's request cannot be met; the message is written for the pod's owner."""


class UnknownShare(RequestError):
    """Raised when the kubelet names an id that the resource does not offer."""

    def __init__(self, resource: str, share: str) -> None:
        super().__init__(
            f"{resource}: no share has the id {share!r}; the list of shares was sent again, "
            "a new pod will get one that exists"
        )


class GpuUnhealthy(RequestError):
    """Raised when a share is asked for whose GPU is out of service."""

    def __init__(self, resource: str, gpu: str, reason: str) -> None:
        super().__init__(f"{resource}: GPU {gpu} is unhealthy: {reason}")


class InstanceUnhealthy(RequestError):
    """Raised when a share is asked for whose MIG device is out of service."""

    def __init__(self, resource: str, share: str, gpu: str, reason: str) -> None:
        super().__init__(
            f"{resource}: MIG instance {share} of GPU {gpu} is unhealthy: {reason}; it is made "
            "anew once nobody holds or uses it"
        )


class GpuPaused(RequestError):
    """Raised when no new shares of a GPU are given for now; `why` says what to wait for."""

    def __init__(self, resource: str, gpu: str, why: str) -> None:
        super().__init__(f"{resource}: GPU {gpu} gives no new shares: {why}")


class ShareTaken(RequestError):
    """Raised when a share conflicts with one that is held already."""

    def __init__(self, share: str, holder: str) -> None:
        super().__init__(f"share {share} cannot be given: {holder}")


class NotMade(RequestError):
    """Raised when what stands for a share in hardware could not be made."""

    def __init__(self, resource: str, share: str, reason: str) -> None:
        super().__init__(f"{resource}: {share} could not be made: {reason}")


class NotNamed(RequestError):
    """Raised when a container would be given by CDI what no specification has."""

    def __init__(self, names: str, why: str) -> None:
        super().__init__(f"CDI has no {names}: {why}")


class Overlap(RequestError):
    """Raised when the kubelet chose shares of one GPU of which there can be one at a time."""

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


class OneDeviceOnly(RequestError):
    """Raised when a container would be a client of MPS on several devices.

    `kind` is what they are, `larger` what to ask for instead.
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
    ) -> None:
        super().__init__(
            f"{resource}: {wanted} units do not fit: MPS serves a container on one {kind}, and the "
            f"kubelet chose {chosen}; free now: {free}. Ask for less, wait for a pod to end, or "
            f"ask for {larger}"
        )


class TooManyClients(RequestError):
    """Raised when a GPU or MIG instance has as many clients of MPS as it can serve."""

    def __init__(self, resource: str, device: str, most: int) -> None:
        super().__init__(
            f"{resource}: {device} serves {most} containers through MPS and can serve no more, "
            "though it has units left; wait for a pod to end"
        )


class TooManyReplicas(RequestError):
    """Raised when a pool allows one replica for each container and more were asked for.

    The words are those of NVIDIA's device plugin: runbooks and users know them.
    """

    def __init__(self, resource: str, wanted: int) -> None:
        super().__init__(
            f'invalid allocation request for "{resource}": invalid request: '
            f"maximum request size for shared resources is 1; found {wanted}"
        )


class DriverError(MetagpuError):
    """Raised when NVML could not do what was asked."""


class DriverUnavailable(DriverError):
    """Raised when NVML as a whole cannot be used; the session has to be opened again."""


class GpuLost(DriverError):
    """Raised when one GPU does not answer any more or needs a reset before it will."""


class DriverTimeout(DriverError):
    """Raised when an NVML call did not come back within its deadline."""


class InUse(DriverError):
    """Raised when something cannot be changed because programs use it; may be tried again."""


class NoRoom(DriverError):
    """Raised when what is on a GPU already leaves no room for what was asked."""


class NotThere(DriverError):
    """Raised when NVML does not find what a call is about."""


class Unsupported(DriverError):
    """Raised when a GPU, its driver, or its present mode cannot do what was asked."""


class ToolError(MetagpuError):
    """Raised when a program of the host failed or did not end in time."""


class ToolMissing(ToolError):
    """Raised when a program is not on the host, or not where we look."""


class HostError(MetagpuError):
    """Raised when the kernel does not let us do what was decided."""


class CdiError(MetagpuError):
    """Raised when the specification for container runtimes cannot be written; says how to mend."""


class KubeletError(MetagpuError):
    """Raised when the kubelet refuses a registration or cannot be reached."""


class ClusterError(MetagpuError):
    """Raised when the API server refuses a request or cannot be reached.

    Attributes:
        status: of HTTP, 0 when there was no answer.
        retry_after: seconds for which it asks to be left alone.
        fields: what of an object it is about, as in `.metadata.labels.nvidia.com/gpu.count`.
    """

    def __init__(
        self,
        problem: str,
        *,
        status: int = 0,
        retry_after: float = 0.0,
        fields: tuple[str, ...] = (),
    ) -> None:
        self.status, self.retry_after, self.fields = status, retry_after, fields
        super().__init__(problem)
