"""The words of metagpu, as frozen values, and the pure functions that give them meaning.

- **Gpu**: a physical GPU of this node.
- **Share**: one id offered to the kubelet; it stands for a piece of one GPU.
- **Footprint**: the slots of a GPU that a share occupies.
- **Offer**: all shares under one resource name.
- **Grant**: what a container gets for its shares: the answer to Allocate.
- **Lease**: a share that is held: by whom, since when.
- **Owner**: the backend whose leases sit on a GPU, or that cleans it after them; an idle GPU has
  none.
- **Verdict**: whether a GPU is healthy, why not, since when.
- **Pause**: why nothing new is given, and since when: of one backend on a GPU (it is suspended), or
  of a GPU as a whole (a cordon).
- **Stock**: what a backend has made of a GPU in hardware, such as MIG instances.
- **Topology**: how the GPUs are connected with each other.
- **Snapshot**: everything known, at one moment.
- **Fact**: something that happened (`core/facts.py`).

Times are seconds since the epoch, memory is in bytes.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Final, NewType

import msgspec

from metagpu.core.mig import MigProfile

GpuId = NewType("GpuId", str)
"""NVML's uuid: `GPU-` and 36 characters."""
ShareId = NewType("ShareId", str)
"""`GPU-<uuid>::<slot>`, or `GPU-<uuid>` for a whole GPU; at most 63 characters."""
FOREIGN: Final = "foreign"
"""Stands for the backend of a share that is held on our GPU and was not cut by us, or not now."""

ResourceName = NewType("ResourceName", str)
"""The name a pod asks for, such as `cnvrg.io/metagpu`."""

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Gpu:
    """What never changes about a GPU while the driver is loaded; `None` where it does not say.

    Attributes:
        index: NVML's number for it, by PCI order; people name GPUs by it.
        minor: N of its device node `/dev/nvidiaN`.
        memory: total memory; `reserved` of it belongs to the driver and firmware.
        pci_device: its kind by PCI ids: the device's in the upper 16 bits, the vendor's below.
        compute_capability: such as `(8, 0)`; `architecture` its family in lower case.
        ecc: whether error correction is on; it changes at a reset alone.
        mig_profiles: the instances it can be cut into, whether MIG mode is on or not; none where
            there is no MIG.
        listens: whether NVML delivers this GPU's XID events.
    """

    id: GpuId
    index: int
    name: str
    memory: int
    reserved: int | None = None
    minor: int | None = None
    pci_bus_id: str = ""
    pci_device: int | None = None
    numa_node: int | None = None
    compute_capability: tuple[int, int] | None = None
    architecture: str | None = None
    mig_enabled: bool | None = None
    ecc: bool | None = None
    mig_profiles: tuple[MigProfile, ...] = ()
    listens: bool = True

    def __str__(self) -> str:
        """Name it as messages do: index first, as people count, then the uuid."""
        return f"{self.index} ({self.id})"


class PciPath(IntEnum):
    """Where two GPUs meet on the PCI bus, the nearest first (NVML's levels, in NVML's numbers)."""

    BOARD = 0
    SWITCH = 10
    SWITCHES = 20
    HOST_BRIDGE = 30
    NUMA_NODE = 40
    SYSTEM = 50

    def __str__(self) -> str:
        """Name it as `nvidia-smi topo -m` does."""
        return _PCI_LABELS[self]


_PCI_LABELS: Final = dict(zip(PciPath, ("PSB", "PIX", "PXB", "PHB", "NODE", "SYS"), strict=True))


@dataclass(frozen=True, slots=True)
class Connection:
    """How two GPUs reach each other; `None` where the driver does not say.

    Attributes:
        nvlinks: how many NVLinks there are between them, or from each of them to NVSwitches.
        switched: whether NVSwitches connect them.
    """

    pci: PciPath | None = None
    nvlinks: int | None = None
    switched: bool = False

    def __str__(self) -> str:
        """Name it as `nvidia-smi topo -m` does; `?` when nothing is known."""
        if self.nvlinks:
            return f"NV{self.nvlinks}"
        return "?" if self.pci is None else str(self.pci)


_UNKNOWN: Final = Connection()


@dataclass(frozen=True, slots=True)
class Topology:
    """How the GPUs are connected: each pair once, those that are not known left out."""

    connections: Mapping[frozenset[GpuId], Connection] = field(default_factory=dict)

    def between(self, a: GpuId, b: GpuId) -> Connection:
        """Say how two GPUs are connected: the same both ways."""
        return self.connections.get(frozenset((a, b)), _UNKNOWN)


@dataclass(frozen=True, slots=True)
class Share:
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


@dataclass(frozen=True, slots=True)
class Holder:
    """The container that holds a share."""

    namespace: str
    pod: str
    container: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pod} ({self.container})"


class Lease(msgspec.Struct, frozen=True, gc=False):
    """A share that is held; `holder` is `None` until the kubelet tells who it was granted to.

    Leases are made by the hundred while the kubelet waits: a Struct is made in a sixth of a
    dataclass's time.
    """

    share: Share
    since: float
    holder: Holder | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a GPU may serve; `reason` says why not, `since` when that began."""

    healthy: bool
    since: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pause:
    """Why nothing new is given, and since when; what is held stays held."""

    reason: str
    since: float


@dataclass(frozen=True, slots=True)
class Made:
    """What stands for a share in hardware: a MIG device.

    Attributes:
        device: the name that programs know it by, such as `MIG-<uuid>`.
        gpu_instance: the numbers by which NVML knows it, as `compute_instance` is.
        idle: nobody holds it, and no program was found on it: it may be reused, or removed.
    """

    device: str
    gpu_instance: int
    compute_instance: int
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a share could not be made, for the lease that began at `since`."""

    reason: str
    since: float


@dataclass(frozen=True, slots=True)
class Stock:
    """What a backend has made of a GPU, complete; shares are made once they are held.

    Attributes:
        made: what there is. What nobody holds and is not idle is in the way of others.
        failed: leases whose shares could not be made.
        blocked: slots that are taken otherwise, and by what.
        alone: whether the GPU is in a mode in which no other backend can give any of it.
    """

    made: Mapping[ShareId, Made] = field(default_factory=dict)
    failed: Mapping[ShareId, Failure] = field(default_factory=dict)
    blocked: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Mount:
    """A path of the host to be seen in the container."""

    container_path: str
    host_path: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device file of the host to be opened from the container; permissions of `r`, `w`, `m`."""

    container_path: str
    host_path: str
    permissions: str = "rw"


@dataclass(frozen=True, slots=True)
class Grant:
    """What a container gets.

    The kubelet keeps it and replays it at every container start: nothing in it may depend on the
    moment.
    """

    envs: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    nodes: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU with everything that changes about it.

    Attributes:
        shares: all shares on offer from it, of every resource.
        leases: those that are held, and held ones that are no longer on offer.
        withheld: shares that conflict with a lease or a cleaning, so nobody may have them now.
        contended: whether any two of its shares could conflict at all.
        suspended: the backends that give no shares of it for now, and why.
        cordon: why nobody gives shares of it, on an operator's word.
        cleans: the backends that clean it when their last lease of it has ended.
        cleaning: those that do so now, and since when.
        stocks: what backends have made of it, where they have to make something.
        elsewhere: the MIG devices that containers hold through another plugin; the same for every
            GPU, `None` until the kubelet has told.
    """

    gpu: Gpu
    verdict: Verdict
    shares: tuple[Share, ...] = ()
    leases: Mapping[ShareId, Lease] = field(default_factory=dict)
    withheld: frozenset[ShareId] = frozenset()
    contended: bool = False
    suspended: Mapping[str, Pause] = field(default_factory=dict)
    cordon: Pause | None = None
    cleans: frozenset[str] = frozenset()
    cleaning: Mapping[str, float] = field(default_factory=dict)
    stocks: Mapping[str, Stock] = field(default_factory=dict)
    elsewhere: frozenset[str] | None = None

    @property
    def owner(self) -> str | None:
        """The backend that has this GPU, `None` when it is idle and clean."""
        holders = (lease.share.backend for lease in self.leases.values())
        return next(holders, next(iter(self.cleaning), None))

    def used_by(self, backend: str) -> bool:
        """Tell whether a backend has leases of this GPU, or cleans it after them."""
        return backend in self.cleaning or any(
            lease.share.backend == backend for lease in self.leases.values()
        )

    @property
    def waits_for(self) -> tuple[Lease, ...]:
        """The leases that must end before the present configuration takes hold of this GPU."""
        return strays(self.shares, self.leases)

    @property
    def shut(self) -> frozenset[ShareId]:
        """The shares that are listed Unhealthy, be the GPU as healthy as it may.

        A cordon says nothing against those who hold a share: it stays listed as it was, because a
        kubelet that restarts fails pods whose devices are not healthy.
        """
        if not self.suspended and self.cordon is None:
            return self.withheld

        return self.withheld | {
            share.id
            for share in self.shares
            if share.backend in self.suspended
            or (self.cordon is not None and share.id not in self.leases)
        }

    def open_to(self, backend: str) -> bool:
        """Tell whether a backend may give any share of this GPU now."""
        return (
            self.verdict.healthy
            and self.cordon is None
            and backend not in self.suspended
            and self.owner in (None, backend)
        )

    def free(self, resource: ResourceName) -> int:
        """Count the shares of a resource that could be granted now."""
        if not self.verdict.healthy:
            return 0

        shut = self.shut
        return sum(
            share.resource == resource and share.id not in self.leases and share.id not in shut
            for share in self.shares
        )


@dataclass(frozen=True, slots=True)
class Offer:
    """One resource: its shares in order, grouped by GPU."""

    resource: ResourceName
    by_gpu: Mapping[GpuId, tuple[Share, ...]]
    shares: Mapping[ShareId, Share]


@dataclass(frozen=True, slots=True)
class Versions:
    """The driver's version as it writes it, and CUDA's; empty and `None` while they are unknown."""

    driver: str = ""
    cuda: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything known at one moment. GPUs are in the order of their index.

    Attributes:
        rivals: the resources that another device plugin serves in our stead, and where.
    """

    gpus: Mapping[GpuId, GpuState] = field(default_factory=dict)
    offers: Mapping[ResourceName, Offer] = field(default_factory=dict)
    topology: Topology = field(default_factory=Topology)
    versions: Versions = field(default_factory=Versions)
    rivals: Mapping[ResourceName, str] = field(default_factory=dict)


def gpu_of(share: ShareId) -> GpuId:
    """Tell which GPU an id is about: the id itself says it."""
    return GpuId(share.partition("::")[0])


def by_gpu(shares: Iterable[Share]) -> dict[GpuId, list[Share]]:
    """Group shares by their GPU, in order; one that is named twice counts once."""
    found: defaultdict[GpuId, list[Share]] = defaultdict(list)

    for share in {share.id: share for share in shares}.values():
        found[share.gpu].append(share)
    return found


def bus_id(text: str) -> str:
    """Write a PCI address as the kernel does, four digits of domain, in lower case.

    Raises:
        ValueError: if it is none.
    """
    found = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", text.lower())
    if found is None:
        raise ValueError(f"{text!r} is no PCI bus id; write one like 0000:07:00.0")
    return f"{int(found[1], 16):04x}:{found[2]}"


def conflicts(a: Share, b: Share) -> bool:
    """Tell whether two shares exclude each other: the one rule of sharing.

    They do when they sit on the same GPU and belong to different backends (an idle GPU belongs to
    nobody, a held one to whoever came first) or occupy a slot in common.
    """
    return a.gpu == b.gpu and (a.backend != b.backend or not a.footprint.isdisjoint(b.footprint))


def strays(shares: Sequence[Share], leases: Mapping[ShareId, Lease]) -> tuple[Lease, ...]:
    """Find the leases of one GPU on shares that are not on offer as they were granted.

    A pod keeps what it got under an earlier configuration; another plugin may hold the GPU too.
    """
    offered = {share.id: share for share in shares}
    return tuple(
        lease for share_id, lease in leases.items() if offered.get(share_id) != lease.share
    )


def withheld(
    shares: Sequence[Share],
    leases: Mapping[ShareId, Lease],
    cleaning: Iterable[str] = (),
    stocks: Mapping[str, Stock] = MappingProxyType({}),
) -> frozenset[ShareId]:
    """Find the shares of one GPU that nobody may have while these leases and cleanings last.

    What a backend has made and nobody holds is in the way too, until it is known to be idle.

    While there are strays, nobody can say what of the GPU is left: all of it waits for their end.
    A backend that cleans the GPU excludes all others, as one that has leases does.
    """
    held = {lease.share for lease in leases.values()}
    if strays(shares, leases):
        return frozenset(
            share.id
            for share in shares
            if (lease := leases.get(share.id)) is None or lease.share != share
        )

    owners = {share.backend for share in held} | set(cleaning)
    taken = {slot for share in held for slot in share.footprint}
    owners |= {backend for backend, stock in stocks.items() if stock.alone}
    for stock in stocks.values():
        taken.update(stock.blocked)
        left = {i for i, made in stock.made.items() if i not in leases and not made.idle}
        taken.update(slot for share in shares if share.id in left for slot in share.footprint)

    # `conflicts` with any of the held shares, or with who cleans, said for all of them at once.
    return frozenset(
        share.id
        for share in shares
        if share.id not in leases
        and (not owners <= {share.backend} or not share.footprint.isdisjoint(taken))
    )


def contended(shares: Sequence[Share]) -> bool:
    """Tell whether any two shares of one GPU could conflict."""
    slots = [slot for share in shares for slot in share.footprint]

    return len({share.backend for share in shares}) > 1 or len(slots) != len(set(slots))
