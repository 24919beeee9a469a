"""Errors of metagpu; the class names the cause, or the remedy.

Those of one subject are beside it: `core.config.errors`, `core.model.request_errors` (of pods),
`kubectl.errors`. docs/events.md lists all with their reasons.

MetagpuError
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
├── CdiError                the host: the CDI specification cannot be written
├── ClaimCheckpointUnreadable  the kubelet: its checkpoint of ResourceClaims cannot be read
├── KubeletError            the kubelet: it refused a registration, or cannot be reached
└── ClusterError            the API server: it refused a request, or cannot be reached
"""

import re


def describe_error(error: BaseException) -> str:
    """Return the cause of an error in words, else the name of its class."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


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


class CdiError(MetagpuError):
    """Raised when the CDI specification cannot be written; the message names the fix."""


class ClaimCheckpointUnreadable(MetagpuError):
    """Raised when the kubelet's checkpoint of ResourceClaims cannot be read."""


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
