"""Everything known at one moment, for whoever reads."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from metagpu.core.gpu import Gpu, GpuId, Topology
from metagpu.core.model import Lease, Pause, ResourceName, Share, ShareId, Stock, Verdict
from metagpu.core.pods import KnownPods
from metagpu.core.sharing import strays


class GpuState(msgspec.Struct, frozen=True):
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
        faults: the MIG devices of it that are out of service; `broken` their shares.
        elsewhere: the MIG devices that containers hold through another plugin; the same for every
            GPU, `None` until the kubelet has told.
    """

    gpu: Gpu
    verdict: Verdict
    shares: tuple[Share, ...] = ()
    leases: MappingProxyType[ShareId, Lease] = MappingProxyType({})
    withheld: frozenset[ShareId] = frozenset()
    contended: bool = False
    suspended: Mapping[str, Pause] = msgspec.field(default_factory=dict)
    cordon: Pause | None = None
    cleans: frozenset[str] = frozenset()
    cleaning: Mapping[str, float] = msgspec.field(default_factory=dict)
    stocks: Mapping[str, Stock] = msgspec.field(default_factory=dict)
    faults: Mapping[str, Verdict] = msgspec.field(default_factory=dict)
    broken: frozenset[ShareId] = frozenset()
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
    def paused(self) -> Mapping[ShareId, str]:
        """The shares of which a backend gives nothing new for now, and why; others it may give."""
        return {i: why for stock in self.stocks.values() for i, why in stock.paused.items()}

    @property
    def shut(self) -> frozenset[ShareId]:
        """The shares that are listed Unhealthy, be the GPU as healthy as it may.

        A cordon says nothing against those who hold a share: it stays listed as it was, because a
        kubelet that restarts fails pods whose devices are not healthy.
        """
        lost = self.withheld
        if self.stocks:  # only what was made breaks or is paused; this is asked for every list
            lost = lost | self.broken | self.paused.keys()
        if not self.suspended and self.cordon is None:
            return lost

        return lost | {
            share.id
            for share in self.shares
            if share.backend in self.suspended
            or (self.cordon is not None and share.id not in self.leases)
        }

    def fault_of(self, share: ShareId) -> Verdict | None:
        """Say what is wrong with the MIG device that stands for a share, `None` for nothing."""
        if share not in self.broken:
            return None
        devices = (
            stock.made[share].device for stock in self.stocks.values() if share in stock.made
        )
        return next((self.faults[it] for it in devices if it in self.faults), None)

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


class Offer(msgspec.Struct, frozen=True):
    """One resource: its shares in order, grouped by GPU."""

    resource: ResourceName
    by_gpu: Mapping[GpuId, tuple[Share, ...]]
    shares: Mapping[ShareId, Share]


class Versions(msgspec.Struct, frozen=True):
    """The driver's version as it writes it, and CUDA's; empty and `None` while they are unknown."""

    driver: str = ""
    cuda: tuple[int, int] | None = None


class Snapshot(msgspec.Struct, frozen=True):
    """Everything known at one moment. GPUs are in the order of their index.

    Attributes:
        rivals: the resources that another device plugin serves in our stead, and where.
        pods: those of this node, where the API server tells them.
    """

    gpus: MappingProxyType[GpuId, GpuState] = MappingProxyType({})
    offers: Mapping[ResourceName, Offer] = msgspec.field(default_factory=dict)
    topology: Topology = msgspec.field(default_factory=Topology)
    versions: Versions = msgspec.field(default_factory=Versions)
    rivals: Mapping[ResourceName, str] = msgspec.field(default_factory=dict)
    pods: KnownPods = msgspec.field(default_factory=KnownPods)
