"""Snapshots: everything known at one moment, immutable."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from metagpu.core.model.gpu import Gpu, GpuId, Topology
from metagpu.core.model.offers import Api, FreePart, OfferRule
from metagpu.core.model.pods import PodIndex
from metagpu.core.model.shares import (
    CordonSource,
    Lease,
    OfferTurn,
    Pause,
    ProvisionedState,
    ResourceName,
    Share,
    ShareId,
    Verdict,
    count_containers,
)
from metagpu.core.model.sharing import orphaned_leases, shares_to_wait


class GpuState(msgspec.Struct, frozen=True, dict=True):
    """One GPU with everything that changes about it.

    What follows from it is computed once for each state: every resource's list asks at every fact.

    Attributes:
        shares: all shares on offer from the GPU, of every resource.
        api: the API by which pods get them.
        leases: all leases on the GPU, also on shares that are no longer on offer.
        allocated: the ids that the kubelet's checkpoint names for pods that have not ended. The
            kubelet gives them to no other pod, and fails the pod at its own next start unless they
            are healthy. Some are without a lease: the shares of init containers.
        unavailable_shares: shares that conflict with a lease or a cleanup.
        can_conflict: whether any two shares of the GPU could conflict.
        ending_shares: the leased shares of pods that may end in the next moment, or have ended
            (`core/model/held_back.py`). They are listed Unhealthy until they are free.
        held_back: the resources whose free shares of the GPU are not offered for now, although they
            could be granted (`core/model/offers.py`), each with the ids of its shares.
        suspended: the backends that grant no shares of the GPU for now, and why.
        cordons: the reasons to grant no shares of the GPU, by who has them.
        unheard: why NVML does not deliver the GPU's XIDs, `None` while it does.
        needs_cleanup: the backends that clean the GPU up when their last lease has ended.
        cleaning: the backends that clean it up now, and since when.
        provisioned: by backend, all that backends have created on the GPU.
        turn: the backend that offers the GPU while it is idle, `None` where all do.
        mig_faults: the MIG devices that are out of service; `faulty_shares` are their shares.
        mig_devices_of_other_plugins: the MIG devices that containers hold through another plugin;
            the same for every GPU, `None` until the kubelet has reported.
    """

    gpu: Gpu
    verdict: Verdict
    shares: tuple[Share, ...] = ()
    api: Api = Api.DEVICE_PLUGIN
    leases: MappingProxyType[ShareId, Lease] = MappingProxyType({})
    allocated: frozenset[ShareId] = frozenset()
    unavailable_shares: frozenset[ShareId] = frozenset()
    can_conflict: bool = False
    held_back: Mapping[ResourceName, frozenset[ShareId]] = msgspec.field(default_factory=dict)
    ending_shares: frozenset[ShareId] = frozenset()
    suspended: Mapping[str, Pause] = msgspec.field(default_factory=dict)
    cordons: Mapping[CordonSource, Pause] = msgspec.field(default_factory=dict)
    unheard: Pause | None = None
    needs_cleanup: frozenset[str] = frozenset()
    cleaning: Mapping[str, float] = msgspec.field(default_factory=dict)
    provisioned: Mapping[str, ProvisionedState] = msgspec.field(default_factory=dict)
    turn: OfferTurn | None = None
    mig_faults: Mapping[str, Verdict] = msgspec.field(default_factory=dict)
    faulty_shares: frozenset[ShareId] = frozenset()
    mig_devices_of_other_plugins: frozenset[str] | None = None

    @property
    def cordon(self) -> Pause | None:
        """The cordon in force, an operator's before others; `None` without one."""
        if not self.cordons:  # every list asks for this
            return None
        return next(self.cordons[it] for it in CordonSource if it in self.cordons)

    @property
    def owner(self) -> str | None:
        """The backend that owns this GPU, `None` for a GPU that is idle and clean."""
        holders = (lease.share.backend for lease in self.leases.values())
        return next(holders, next(iter(self.cleaning), None))

    def used_by(self, backend: str) -> bool:
        """Return whether a backend has leases of this GPU, or cleans it up after them."""
        return backend in self.cleaning or any(
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

    @property
    def orphaned_leases(self) -> tuple[Lease, ...]:
        """The leases that end before the configuration applies to all of the GPU."""
        return orphaned_leases(self.shares, self.leases)

    @cached_property
    def waiting_shares(self) -> frozenset[ShareId] | None:
        """The free shares that wait for orphaned leases, `None` for all of them."""
        return shares_to_wait(self.shares, self.leases)

    @cached_property
    def paused_shares(self) -> Mapping[ShareId, str]:
        """The shares that their backend does not grant for now, and why."""
        return {i: why for it in self.provisioned.values() for i, why in it.paused.items()}

    @cached_property
    def unhealthy_shares(self) -> frozenset[ShareId]:
        """The shares that are listed Unhealthy although the GPU is healthy."""
        unhealthy = self.refused_shares | self.shares_out_of_turn | self.held_back_shares
        return unhealthy | self.ending_shares if self.ending_shares else unhealthy

    @cached_property
    def held_back_shares(self) -> frozenset[ShareId]:
        """The shares that are not offered although they could be granted.

        A share that was offered a moment ago may still be asked for: it is granted.
        """
        if not self.held_back:
            return frozenset()
        shares = frozenset[ShareId]().union(*self.held_back.values())
        return shares.difference(self.leases, self.allocated, self.refused_shares)

    @cached_property
    def refused_shares(self) -> frozenset[ShareId]:
        """The shares that would not be granted although the GPU is healthy.

        Under a cordon a leased share stays listed as it was: a kubelet that restarts fails pods
        whose devices are not healthy.
        """
        refused = self.unavailable_shares
        if self.provisioned:  # only created devices are faulty or paused; every list asks for this
            refused = refused | self.faulty_shares | self.paused_shares.keys()
        if self.api is Api.DEVICE_PLUGIN and (claimed := self.shares_of_resource_claims):
            refused = refused | claimed
        if not self.suspended and self.cordon is None:
            return refused

        return refused | {
            share.id
            for share in self.shares
            if share.backend in self.suspended
            or (self.cordon is not None and share.id not in self.leases)
        }

    @cached_property
    def shares_of_resource_claims(self) -> frozenset[ShareId]:
        """The shares that ResourceClaims hold, unknown to the kubelet's device manager.

        Some are left where a reload gave the GPU's pool to the device plugin API.
        """
        return frozenset(i for i, it in self.leases.items() if it.resource_claim is not None)

    @cached_property
    def shares_out_of_turn(self) -> frozenset[ShareId]:
        """The shares of this idle GPU that other backends offer at their turn.

        A share that was offered a moment ago may still be asked for: it is granted.
        """
        if (turn := self.present_turn) is None:
            return frozenset()
        others = (share.id for share in self.shares if share.backend != turn.backend)
        return frozenset(others).difference(self.allocated)

    @cached_property
    def withdrawn_shares(self) -> frozenset[ShareId]:
        """The shares that are listed Healthy and counted no more: their turn ends."""
        if (turn := self.present_turn) is None or not turn.withdrawn:
            return frozenset()
        return frozenset(share.id for share in self.shares if share.backend == turn.backend)

    def device_fault(self, share: ShareId) -> Verdict | None:
        """Return the fault of the MIG device of a share, `None` for a healthy one."""
        if share not in self.faulty_shares:
            return None
        devices = (
            provisioned.devices[share].device
            for provisioned in self.provisioned.values()
            if share in provisioned.devices
        )
        return next((self.mig_faults[it] for it in devices if it in self.mig_faults), None)

    def open_to(self, backend: str) -> bool:
        """Return whether a backend may grant any share of this GPU now."""
        return (
            self.verdict.healthy
            and self.cordon is None
            and backend not in self.suspended
            and self.owner in (None, backend)
        )

    def count_free(self, resource: ResourceName) -> int:
        """Count the shares of a resource that are free in their turn, held back or not."""
        return self._count_free(frozenset(it.id for it in self.shares if it.resource == resource))

    def _count_free(self, shares: frozenset[ShareId]) -> int:
        if not self.verdict.healthy:
            return 0
        taken = self.leases, self.allocated, self.refused_shares, self.shares_out_of_turn
        return len(shares.difference(*taken))

    def free_part(self, offer: "Offer") -> FreePart:
        """Return the part of this GPU that is free, of one resource.

        The kubelet waits while the parts of all GPUs are compared: those of before are kept.
        """
        known = self._free_parts.get(offer.resource)
        if known is None or known[0] is not offer:
            known = self._free_parts[offer.resource] = offer, self._new_free_part(offer)
        return known[1]

    @cached_property
    def _free_parts(self) -> dict[ResourceName, tuple["Offer", FreePart]]:
        return {}

    def _new_free_part(self, offer: "Offer") -> FreePart:
        gpu, shares, full = self.gpu.id, offer.ids[self.gpu.id], False
        if (most := offer.rule.max_containers.get(gpu)) is not None:
            backend = offer.by_gpu[gpu][0].backend
            leases = (it for it in self.leases.values() if it.share.backend == backend)
            full = count_containers(leases) >= most
        return FreePart(gpu, len(shares), self._count_free(shares), full)


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


class Snapshot(msgspec.Struct, frozen=True):
    """Everything known at one moment. GPUs are in the order of their index.

    Attributes:
        unreadable_gpus: the GPUs that NVML counts and nobody has read yet, by index.
        competing_plugins: the resources that another device plugin serves, and which plugin.
        registration_problems: why the kubelet does not have these resources as metagpu lists them.
        pods: the pods of this node, where the API server lists them.
        kubelet: the identity of the present kubelet's socket, `None` before the first one.
        readmitted: namespace and name of the pods that were about to end when this kubelet started.
            It admits them again, and fails those whose shares are not healthy.
    """

    gpus: MappingProxyType[GpuId, GpuState] = MappingProxyType({})
    unreadable_gpus: Mapping[int, Verdict] = msgspec.field(default_factory=dict)
    offers: Mapping[ResourceName, Offer] = msgspec.field(default_factory=dict)
    topology: Topology = msgspec.field(default_factory=Topology)
    versions: Versions = msgspec.field(default_factory=Versions)
    competing_plugins: Mapping[ResourceName, str] = msgspec.field(default_factory=dict)
    registration_problems: Mapping[ResourceName, str] = msgspec.field(default_factory=dict)
    pods: PodIndex = msgspec.field(default_factory=PodIndex)
    kubelet: tuple[int, int, int] | None = None
    readmitted: frozenset[tuple[str, str]] = frozenset()

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
    gpus.update((state.gpu.id, state) for state in states)
    return replace(snapshot, gpus=MappingProxyType(gpus))


def free_parts(snapshot: Snapshot, offer: Offer) -> list[FreePart]:
    """Return the free part of each GPU of a resource, by index."""
    return [snapshot.gpus[gpu].free_part(offer) for gpu in offer.by_gpu]


def counted_parts(snapshot: Snapshot, offer: Offer) -> list[FreePart]:
    """Return the free parts that pods are bound for: of no GPU whose turn ends."""
    return [
        part
        for part in free_parts(snapshot, offer)
        if not (turn := snapshot.gpus[part.gpu].present_turn)
        or not turn.withdrawn
        or turn.backend != offer.by_gpu[part.gpu][0].backend
    ]
