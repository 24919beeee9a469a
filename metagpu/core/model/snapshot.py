"""Snapshots: everything known at one moment, immutable."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, wraps
from itertools import chain
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from metagpu.core.model.gpu import Gpu, GpuId, Topology
from metagpu.core.model.offers import Api, OfferRule
from metagpu.core.model.pods import PodIndex
from metagpu.core.model.shares import (
    CordonSource,
    Holder,
    Lease,
    OfferTurn,
    Pause,
    ProvisionedState,
    ResourceClaimRef,
    ResourceName,
    Share,
    ShareId,
    Verdict,
    holders_of,
)

ResultT = TypeVar("ResultT")


class HiddenShares(msgspec.Struct, frozen=True):
    """The shares of one GPU that the scheduler is not to count.

    `core/availability/exact.py` finds them.

    Attributes:
        held_back: the resources whose free shares are hidden, each with the ids of its shares.
        ending: the leased shares of pods that may end in the next moment, or have ended. They are
            listed Unhealthy until they are free.
    """

    held_back: Mapping[ResourceName, frozenset[ShareId]] = msgspec.field(default_factory=dict)
    ending: frozenset[ShareId] = frozenset()


class Cleanup(msgspec.Struct, frozen=True):
    """The cleanups of one GPU.

    Attributes:
        backends: those that clean the GPU up when their last lease has ended.
        since: those that clean it up now, and since when.
    """

    backends: frozenset[str] = frozenset()
    since: Mapping[str, float] = msgspec.field(default_factory=dict)


NO_CLEANUP: Final = Cleanup()


AnsweredNodes = Mapping[frozenset[int], frozenset[ShareId]]
"""The shares of a GPU whose answers name device nodes `/dev/nvidiaN`, by the numbers named."""


class KubeletWord(msgspec.Struct, frozen=True):
    """The kubelet's word about what pods hold, beside the leases.

    Attributes:
        nodes: the device nodes in the answers of Allocate that its checkpoint keeps: it starts
            containers with these.
        unknown_leases: why the leases that a kubelet gave before this daemon started are unknown,
            empty once they are known.
        mig_devices_of_other_plugins: the MIG devices that containers hold through another plugin;
            `None` until the kubelet has reported.
    """

    unknown_leases: str = ""
    mig_devices_of_other_plugins: frozenset[str] | None = None
    nodes: AnsweredNodes = MappingProxyType({})


NO_WORD: Final = KubeletWord()


class GpuState(msgspec.Struct, frozen=True, dict=True):
    """One GPU with everything that changes about it.

    `core/availability` says what follows for its shares.

    Attributes:
        shares: all shares on offer from the GPU, of every resource.
        api: the API by which pods get them.
        leases: all leases on the GPU, also on shares that are no longer on offer.
        allocated: the ids that the kubelet's checkpoint names for pods that have not ended. The
            kubelet gives them to no other pod, and fails the pod at its own next start unless they
            are healthy. Some are without a lease: the shares of init containers. Each with pod uid
            and name of its containers.
        can_conflict: whether any two shares of the GPU, on offer or held, could conflict.
        hidden: the shares that the scheduler is not to count, although they could be granted.
        suspended: the backends that grant no shares of the GPU for now, and why.
        cordons: the reasons to grant no shares of the GPU, by who has them.
        unheard: why NVML does not deliver the GPU's XIDs, `None` while it does.
        cleanup: the backends that clean the GPU up after their last lease.
        provisioned: by backend, all that backends have created on the GPU.
        turn: the backend that offers the GPU while it is idle, `None` where all do.
        mig_faults: the MIG devices that are out of service.
        kubelet: what the kubelet has said beside leases; but for its nodes the same for all.
    """

    gpu: Gpu
    verdict: Verdict
    shares: tuple[Share, ...] = ()
    api: Api = Api.DEVICE_PLUGIN
    leases: MappingProxyType[ShareId, Lease] = MappingProxyType({})
    allocated: Mapping[ShareId, frozenset[tuple[str, str]]] = MappingProxyType({})
    can_conflict: bool = False
    hidden: HiddenShares | None = None
    suspended: Mapping[str, Pause] = msgspec.field(default_factory=dict)
    cordons: Mapping[CordonSource, Pause] = msgspec.field(default_factory=dict)
    unheard: Pause | None = None
    cleanup: Cleanup = NO_CLEANUP
    provisioned: Mapping[str, ProvisionedState] = msgspec.field(default_factory=dict)
    turn: OfferTurn | None = None
    mig_faults: Mapping[str, Verdict] = msgspec.field(default_factory=dict)
    kubelet: KubeletWord = NO_WORD

    @property
    def cordon(self) -> Pause | None:
        """The cordon in force, an operator's before others; `None` without one."""
        if not self.cordons:  # every list asks for this
            return None
        return next(self.cordons[source] for source in CordonSource if source in self.cordons)

    @property
    def owner(self) -> str | None:
        """The backend that owns this GPU, `None` for a GPU that is idle and clean."""
        holders = (lease.share.backend for lease in self.leases.values())
        return next(holders, next(iter(self.cleanup.since), None))

    def used_by(self, backend: str) -> bool:
        """Return whether a backend has leases of this GPU, or cleans it up after them."""
        return backend in self.cleanup.since or any(
            lease.share.backend == backend for lease in self.leases.values()
        )

    @cached_property
    def backends(self) -> tuple[str, ...]:
        """The backends with shares on this GPU, in the pool's order."""
        return tuple(dict.fromkeys(share.backend for share in self.shares))

    @property
    def present_turn(self) -> OfferTurn | None:
        """The turn that decides who offers this GPU, `None` while a backend has it."""
        return self.turn if self.turn is not None and self.owner is None else None

    @cached_property
    def shares_by_holder(self) -> Mapping[Holder, tuple[Share, ...]]:
        """The leased shares of each container; the same mapping while nothing changes."""
        found: dict[Holder, list[Share]] = {}
        for lease in self.leases.values():
            for holder in holders_of(lease):
                found.setdefault(holder, []).append(lease.share)
        return {holder: tuple(shares) for holder, shares in found.items()}

    @cached_property
    def paused_shares(self) -> Mapping[ShareId, str]:
        """The shares that their backend does not grant for now, and why."""
        return {i: why for state in self.provisioned.values() for i, why in state.paused.items()}

    def device_fault(self, share: ShareId) -> Verdict | None:
        """Return the fault of the MIG device of a share, `None` for a healthy one."""
        if not self.mig_faults:
            return None
        devices = (
            provisioned.devices[share].device
            for provisioned in self.provisioned.values()
            if share in provisioned.devices
        )
        return next(
            (self.mig_faults[device] for device in devices if device in self.mig_faults), None
        )


class Offer(msgspec.Struct, frozen=True):
    """All shares under one resource name, in order, grouped by GPU.

    Attributes:
        ids: the ids of the shares on each GPU.
        rule: the rule by which free shares are held back.
        api: the API by which pods get the shares.
    """

    resource: ResourceName
    by_gpu: Mapping[GpuId, tuple[Share, ...]]
    shares: Mapping[ShareId, Share]
    ids: Mapping[GpuId, frozenset[ShareId]]
    rule: OfferRule = OfferRule()
    api: Api = Api.DEVICE_PLUGIN


class Versions(msgspec.Struct, frozen=True):
    """The versions of the driver and of CUDA; empty and `None` while unknown."""

    driver: str = ""
    cuda: tuple[int, int] | None = None


class Snapshot(msgspec.Struct, frozen=True, dict=True):
    """Everything known at one moment. GPUs are in the order of their index.

    Attributes:
        unreadable_gpus: the GPUs that NVML counts and nobody has read yet, by index.
        competing_plugins: the resources that another device plugin serves, and which plugin.
        registration_problems: why the kubelet does not have these resources as metagpu lists them.
        unknown_leases: as of each GPU; `None` where nobody asks a kubelet.
        pods: the pods of this node, where the API server lists them.
        kubelet: the identity of the present kubelet's socket, `None` before the first one.
        readmitted: namespace and name of the pods that were about to end when this kubelet started.
            It admits them again, and fails those whose shares are not healthy.
        vanished: what the kubelet lists as held of GPUs that the node does not have, and what
            prepared ResourceClaims hold of them.
        withdrawn: whether this daemon is about to give the node up.
        hands_over: whether another daemon waits for the node, which stays as it is then.
    """

    gpus: MappingProxyType[GpuId, GpuState] = MappingProxyType({})
    unreadable_gpus: Mapping[int, Verdict] = msgspec.field(default_factory=dict)
    offers: Mapping[ResourceName, Offer] = msgspec.field(default_factory=dict)
    topology: Topology = msgspec.field(default_factory=Topology)
    versions: Versions = msgspec.field(default_factory=Versions)
    competing_plugins: Mapping[ResourceName, str] = msgspec.field(default_factory=dict)
    registration_problems: Mapping[ResourceName, str] = msgspec.field(default_factory=dict)
    unknown_leases: str | None = None
    pods: PodIndex = msgspec.field(default_factory=PodIndex)
    kubelet: tuple[int, int, int] | None = None
    readmitted: frozenset[tuple[str, str]] = frozenset()
    vanished: Mapping[ShareId, Lease] = MappingProxyType({})
    withdrawn: bool = False
    hands_over: bool = False

    @property
    def claim_leases(self) -> Iterator[tuple[ResourceClaimRef, Lease]]:
        """The leases of ResourceClaims, also of GPUs that the node does not have."""
        of_gpus = (state.leases.values() for state in self.gpus.values())
        for lease in chain(self.vanished.values(), *of_gpus):
            if lease.resource_claim is not None:
                yield lease.resource_claim, lease

    def lacks(self, gpu: GpuId) -> bool:
        """Return whether the node has a GPU no more: all of its GPUs are read."""
        return bool(self.gpus) and not self.unreadable_gpus and gpu not in self.gpus

    def offers_of(self, api: Api) -> Mapping[ResourceName, Offer]:
        """Return the offers by one API."""
        return {name: offer for name, offer in self.offers.items() if offer.api is api}

    def plugin_offer(self, resource: ResourceName) -> Offer | None:
        """Return the offer of a resource by the device plugin API, `None` without one."""
        offer = self.offers.get(resource)
        return offer if offer is not None and offer.api is Api.DEVICE_PLUGIN else None


def with_states(snapshot: Snapshot, states: Iterable[GpuState]) -> Snapshot:
    """Return the snapshot with new states of some GPUs."""
    gpus = snapshot.gpus.copy()
    for state in states:
        gpus[state.gpu.id] = state
    return replace(snapshot, gpus=MappingProxyType(gpus))


def once(make: Callable[[Snapshot], ResultT]) -> Callable[[Snapshot], ResultT]:
    """Keep the result of a function with the snapshot that it was made of.

    Snapshots are replaced, never edited. So what happens by the clock walks no leases that have not
    changed; and nothing outlives its snapshot, whose shares may be thousands.
    """
    name = f"{make.__module__}.{make.__qualname__}"

    @wraps(make)
    def keep(snapshot: Snapshot) -> ResultT:
        known = snapshot.__dict__
        if name not in known:
            known[name] = make(snapshot)
        result: ResultT = known[name]
        return result

    return keep
