"""What is heard on the bus: facts that changed something, and what changes nothing we keep."""

import msgspec

from metagpu.core.facts import Fact
from metagpu.core.gpu import GpuId
from metagpu.core.model import Holder
from metagpu.core.pods import KnownPod


class MemoryExceeded(msgspec.Struct, frozen=True):
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


class ProcessSignalled(msgspec.Struct, frozen=True):
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


class StrangerFound(msgspec.Struct, frozen=True):
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


class ConfigurationRefused(msgspec.Struct, frozen=True):
    """What the configuration says now cannot be taken; the last good one stays. Once a fault.

    Attributes:
        why: file, line and path, and what is wrong there.
    """

    why: str
    at: float


class XidHeard(msgspec.Struct, frozen=True):
    """NVML told of an XID, be it fatal or not; `gpu` is `None` when it did not say of which GPU."""

    gpu: GpuId | None
    code: int
    at: float


class MemoryErrorHeard(msgspec.Struct, frozen=True):
    """NVML told of a memory error, once for each event; `gpu` as of `XidHeard`."""

    gpu: GpuId | None
    corrected: bool
    at: float


class PodEnded(msgspec.Struct, frozen=True):
    """A pod has gone, or its containers have ended: what it holds will soon be free."""

    pod: KnownPod


class WishRefused(msgspec.Struct, frozen=True):
    """A pod wishes something about its GPU memory that it does not get: once for each reason."""

    pod: KnownPod
    why: str
    at: float


class DevicesLost(msgspec.Struct, frozen=True):
    """A container was given MIG devices that are no more: once for each container.

    Attributes:
        mend: the command that helps.
    """

    holder: Holder
    pod_uid: str
    devices: tuple[str, ...]
    mend: str
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
    | DevicesLost
)
"""What is heard on the bus: facts that changed something, and what is only heard."""
