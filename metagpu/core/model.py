"""The words of metagpu; shares and who holds them, as frozen values.

- **Gpu**: a physical GPU of this node (`core/gpu.py`).
- **Share**: one id offered to the kubelet; it stands for a piece of one GPU.
- **Footprint**: the slots of a GPU that a share occupies.
- **Offer**: all shares under one resource name.
- **Grant**: what a container gets for its shares: the answer to Allocate (`core/grant.py`).
- **Lease**: a share that is held: by whom, since when.
- **Owner**: the backend whose leases sit on a GPU, or that cleans it after them; an idle GPU has
  none.
- **Verdict**: whether a GPU is healthy, why not, since when.
- **Pause**: why nothing new is given, and since when: of one backend on a GPU (it is suspended), or
  of a GPU as a whole (a cordon).
- **Stock**: what a backend has made of a GPU in hardware, such as MIG instances.
- **Topology**: how the GPUs are connected with each other (`core/gpu.py`).
- **Snapshot**: everything known, at one moment (`core/snapshot.py`).
- **Fact**: something that happened (`core/facts.py`).

Times are seconds since the epoch, memory is in bytes.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, NewType

import msgspec

from metagpu.core.gpu import GpuId

ShareId = NewType("ShareId", str)
"""`GPU-<uuid>::<slot>`, or `GPU-<uuid>` for a whole GPU; at most 63 characters."""
FOREIGN: Final = "foreign"
"""Stands for the backend of a share that is held on our GPU and was not cut by us, or not now."""
ResourceName = NewType("ResourceName", str)
"""The name a pod asks for, such as `cnvrg.io/metagpu`."""


class Share(msgspec.Struct, frozen=True):
    """One id on offer: a piece of `gpu` that `backend` cuts and `resource` names.

    Attributes:
        number: its place among the shares of this GPU and resource, from 0.
        footprint: the slots of the GPU it occupies; two shares of one backend that have a slot in
            common exclude each other.
        memory: bytes of GPU memory it stands for.
    """

    id: ShareId
    gpu: GpuId
    resource: ResourceName
    backend: str
    number: int
    footprint: frozenset[str]
    memory: int

    def __hash__(self) -> int:
        """Hash the id alone: sets of shares are made while the kubelet waits."""
        return hash(self.id)


class Holder(msgspec.Struct, frozen=True):
    """The container that holds a share."""

    namespace: str
    pod: str
    container: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pod} ({self.container})"


class Lease(msgspec.Struct, frozen=True, gc=False):
    """A share that is held; `holder` is `None` until the kubelet tells who it was granted to.

    `awaited` says that its container waits at each start for what stands for the share, whichever
    it is then.

    Leases are made by the hundred while the kubelet waits: a Struct is made in a sixth of a
    dataclass's time.
    """

    share: Share
    since: float
    holder: Holder | None = None
    awaited: bool = False


class Fault(StrEnum):
    """What kind of thing takes a GPU out of service: for counting, `reason` is for reading.

    - xid: an XID that is fatal.
    - memory: an uncorrected memory error, or a row that could not be remapped.
    - recovery_action: NVML says that the GPU needs one.
    - no_answer: NVML does not answer about it.
    - not_listed: NVML does not list it any more.
    - driver: NVML as a whole cannot be used.
    """

    XID = "xid"
    MEMORY = "memory"
    RECOVERY_ACTION = "recovery_action"
    NO_ANSWER = "no_answer"
    NOT_LISTED = "not_listed"
    DRIVER = "driver"


class Verdict(msgspec.Struct, frozen=True):
    """Whether a GPU may serve; `reason` says why not, `since` when that began, `fault` its kind."""

    healthy: bool
    since: float
    reason: str = ""
    fault: Fault | None = None


class Pause(msgspec.Struct, frozen=True):
    """Why nothing new is given, and since when; what is held stays held.

    Attributes:
        reset: whether it lasts until somebody resets the GPU.
    """

    reason: str
    since: float
    reset: bool = False


class Made(msgspec.Struct, frozen=True):
    """What stands for a share in hardware: a MIG device.

    Attributes:
        device: the name that programs know it by, such as `MIG-<uuid>`.
        gpu_instance: the numbers by which NVML knows it, as `compute_instance` is.
        idle: nobody holds it, and no program was found on it: it may be reused, or removed.
        again: once its holder has gone, the share may be had again before that is known: whoever
            comes next is sent before the kubelet tells of the end.
    """

    device: str
    gpu_instance: int
    compute_instance: int
    idle: bool = False
    again: bool = False


class Failure(msgspec.Struct, frozen=True):
    """Why a share could not be made, for the lease that began at `since`."""

    reason: str
    since: float


class Stock(msgspec.Struct, frozen=True):
    """What a backend has made of a GPU, complete; shares are made once they are held.

    Attributes:
        made: what there is. What nobody holds and is not idle is in the way of other shares.
        failed: leases whose shares could not be made.
        blocked: slots that are taken otherwise, and by what.
        paused: shares of which nothing new is given for now, and why; those held are listed
            Unhealthy too.
        alone: whether the GPU is in a mode in which no other backend can give any of it.
        named: the MIG devices that there are, whoever made them, by all names that CDI knows them
            by: their uuids, and those of the places where they may be made again.
        late: shares that are not on offer yet, though nothing may be in their way any more.
        making: instances that the driver was asked for and has not answered about: what turns up
            there is ours, whoever keeps the GPU by then.
    """

    made: Mapping[ShareId, Made] = msgspec.field(default_factory=dict)
    failed: Mapping[ShareId, Failure] = msgspec.field(default_factory=dict)
    blocked: Mapping[str, str] = msgspec.field(default_factory=dict)
    paused: Mapping[ShareId, str] = msgspec.field(default_factory=dict)
    alone: bool = False
    named: Mapping[str, Made] = msgspec.field(default_factory=dict)
    late: frozenset[ShareId] = frozenset()
    making: frozenset[str] = frozenset()


def gpu_of(share: ShareId) -> GpuId:
    """Tell which GPU an id is about: the id itself says it."""
    return GpuId(share.partition("::")[0])


def by_gpu(shares: Iterable[Share]) -> dict[GpuId, list[Share]]:
    """Group shares by their GPU, in order; one that is named twice counts once."""
    once = list({share.id: share for share in shares}.values())
    if len({share.gpu for share in once}) == 1:
        return {once[0].gpu: once}  # nearly always, and somebody waits for it

    found: dict[GpuId, list[Share]] = {}
    for share in once:
        found.setdefault(share.gpu, []).append(share)
    return found
