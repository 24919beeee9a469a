"""The backend `mig`: instances created on demand, or a fixed layout."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import ClassVar, Final

import structlog
from msgspec.structs import replace

from metagpu.backends.common.mps_daemon.decisions import PRIVILEGES, MpsDaemonTiming
from metagpu.backends.mig.capacity import KINDS, capacity_metrics, free_capacity, instance_metrics
from metagpu.backends.mig.inventory import InstanceSettings, MigTiming, find_instances
from metagpu.backends.mig.options import (
    CreateAt,
    MigOptions,
    layout_problem,
    misfit_reason,
    no_shares_reason,
    placed_profiles,
    possible_shares,
)
from metagpu.backends.mig.placement import (
    PlacementCandidate,
    UnplaceableLayout,
    choose_placements,
    choose_replicas,
)
from metagpu.backends.mig.profiles import (
    PlacedProfile,
    geometry_of,
    profile_resource,
    slot_of_instance,
)
from metagpu.backends.mig.provisioner import (
    MigModeDisabler,
    MigModeEnabler,
    MigModePolicy,
    expected_problem,
)
from metagpu.backends.mig.reconciler import MigReconciler
from metagpu.backends.mig.sharing import MigMpsOptions, check_units, choose_units, grant_units
from metagpu.core.availability.conflict import conflicts
from metagpu.core.availability.reasons import open_to
from metagpu.core.contracts.backend import GpuContext, Options
from metagpu.core.contracts.capabilities import (
    DeclaresSharing,
    DiagnosesGpu,
    HasMetrics,
    LeavesOnNode,
    MemoryGuard,
    NeedsPrivileges,
    OffersExisting,
    Provisions,
    ReportsCapacity,
)
from metagpu.core.contracts.leftovers import AbandonedNode, Leftover
from metagpu.core.grants.grant import Grant
from metagpu.core.grants.injection import CDI_STRATEGIES, Injection
from metagpu.core.model.backend_reports import BackendMetric, FreeCapacity, MetricKind
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.mig import MigInstance, is_mps_share, profile_of
from metagpu.core.model.privileges import Privilege
from metagpu.core.model.request_errors import SharesOverlap, TooManyReplicas
from metagpu.core.model.shares import ProvisionedState, ResourceName, Share, by_gpu
from metagpu.core.model.snapshot import GpuState, Snapshot

log = structlog.get_logger()

_ANSWER_MARGIN: Final = 3.0
"""Seconds that Allocate waits beyond the deadline of an instance, for the reason of a failure."""


class MigBackend(
    Provisions,
    OffersExisting,
    NeedsPrivileges,
    DeclaresSharing,
    DiagnosesGpu,
    HasMetrics,
    ReportsCapacity,
    LeavesOnNode,
):
    """The backend of GPUs in MIG mode.

    Share ids are `GPU-<uuid>::2g.10gb@4`: profile and first slice. The id of a share of an instance
    that serves several containers ends in the number of its replica, `...@4-t1`, or of its unit
    under MPS, `...@4-p1`.

    Attributes:
        timing: how often GPUs are scanned, and when failures are tried again.
        mps_timing: the same for MPS control daemons. Their ends are reported at once, and a GPU
            may have seven: 30 s between probes are enough.
    """

    name: ClassVar[str] = "mig"
    options_type: ClassVar[type[Options]] = MigOptions
    needs_setup: ClassVar[bool] = True
    needs_cleanup: ClassVar[bool] = True
    guard: ClassVar[MemoryGuard] = MemoryGuard.MIG
    metric_kinds: ClassVar[tuple[MetricKind, ...]] = KINDS
    timing: ClassVar[MigTiming] = MigTiming()
    mps_timing: ClassVar[MpsDaemonTiming] = MpsDaemonTiming(period=30.0)

    def __init__(
        self, options: MigOptions, injection: Injection, sizes: Sequence[str] = ()
    ) -> None:
        self._sizes = sizes
        self._options = options
        self._injection = injection

    @classmethod
    def configured(cls, options: Options, injection: Injection) -> "MigBackend":
        """Create the backend from a pool's options.

        Raises:
            TypeError: if the options are those of another backend.
            ValueError: if containers would get names that no instance of metagpu can have.
        """
        if not isinstance(options, MigOptions):
            raise TypeError(f"mig cannot read {type(options).__name__}")
        if injection.strategies & CDI_STRATEGIES and not injection.uses_own_cdi:
            raise ValueError(
                "cdiKind names a CDI specification without the MIG instances that metagpu "
                "creates; leave cdiKind out, or use deviceListStrategy envvar or volume-mounts"
            )
        if options.create is CreateAt.START and not injection.uses_only_own_cdi:
            raise ValueError(
                "create: start gives a container the name of an instance before it exists, which "
                "only CDI can; set deviceListStrategy to cdi-cri or cdi-annotations alone, or "
                "leave create out"
            )
        return cls(options, injection)

    @property
    def resources(self) -> tuple[ResourceName, ...]:
        """One resource for each profile, or the one that the pool names.

        The resource of a size follows from the GPU, where the pool does not name it.
        """
        unknown = {ResourceName(profile_resource(size)) for size in self._options.sizes}
        names = map(self._options.resource_of, self._options.profile_names)
        return tuple(dict.fromkeys(name for name in names if name not in unknown))

    @property
    def offers_existing(self) -> bool:
        """True if the pool has `existing: true`."""
        return self._options.existing is True

    def with_existing(
        self, gpu: Gpu, instances: Mapping[Gpu, Sequence[MigInstance]]
    ) -> tuple[Options, "MigBackend"]:
        """Return the backend for the finished instances of one GPU of its pool.

        One resource name is for instances of one size: with several in the pool, none is offered.
        """
        slots = tuple(_finished_slots(gpu, instances.get(gpu, ())))
        if isinstance(self._options.resource, str):
            every = (slot for pair in instances.items() for slot in _finished_slots(*pair))
            sizes = sorted({slot.partition("@")[0] for slot in every})
            if len(sizes) > 1:
                options = replace(self._options, existing=())
                return options, MigBackend(options, self._injection, sizes)
        options = replace(self._options, existing=slots)
        return options, MigBackend(options, self._injection)

    def existing_resources(
        self, instances: Mapping[Gpu, Sequence[MigInstance]]
    ) -> Sequence[ResourceName]:
        """Return the one name of all instances, where there are some."""
        name = self._options.resource
        finished = any(_finished_slots(*pair) for pair in instances.items())
        return (ResourceName(name),) if isinstance(name, str) and finished else ()

    @property
    def provision_timeout(self) -> float:
        """The seconds that the instances of a container may take."""
        return self._options.deadline + _ANSWER_MARGIN

    @property
    def provisions_at_start(self) -> bool:
        """True if the start of a container, and not Allocate, waits for its instances."""
        options = self._options
        if options.fixed_layout is not None or options.create is CreateAt.ALLOCATE:
            return False
        return self._injection.uses_only_own_cdi

    def privileges(self) -> Mapping[Privilege, str]:
        """Return what the driver wants of a caller who changes a GPU, and what MPS does."""
        if not self._options.mps:
            return {Privilege.SYS_ADMIN: "MIG instances"}
        return {Privilege.SYS_ADMIN: "MIG instances, and MPS on them", **PRIVILEGES}

    def misfit_reason(self, gpu: Gpu) -> str:
        """Return why a GPU can have none of the instances, in MIG mode or not."""
        return misfit_reason(self._options.on(gpu), gpu)

    def no_shares_reason(self, gpu: Gpu) -> str:
        """Return why a GPU has no instances."""
        if self._sizes and gpu.mig_enabled:
            name = self._options.resource
            return f"{name} is for instances of one size, and its pool has {', '.join(self._sizes)}"
        return no_shares_reason(self._options.on(gpu), gpu)

    def expected_problem(self, gpu: Gpu) -> str:
        """Return why a GPU will give no instances, such as MIG mode that stays off."""
        options = self._options
        if options.existing is not False:
            return ""
        return expected_problem(gpu, enable=options.enable_mig, disable=options.disable_mig)

    def free_capacity(self, states: Sequence[GpuState]) -> Sequence[FreeCapacity]:
        """Return the free capacity of GPUs with instances on demand, and helpful moves."""
        if self._options.fixed_layout is not None:
            return ()
        mig_states = [state for state in states if state.gpu.mig_profiles]
        return free_capacity(mig_states, self._names(mig_states), self.name)

    def metrics(self, states: Sequence[GpuState]) -> Iterable[BackendMetric]:
        """Return metrics of the instances and, on demand, of the free capacity."""
        for state in states:
            if state.gpu.mig_profiles:
                yield from instance_metrics(state, self.name)
                if self._options.fixed_layout is None:
                    yield from capacity_metrics(state, self._names((state,)), self.name)

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Return one share per placement of the allowed profiles, or those of the layout.

        The shares are the same whether MIG mode is on or off. A layout that does not fit has none.
        """
        return possible_shares(self._options.on(gpu), gpu, self.name)

    def prefer(
        self,
        available: Sequence[Share],
        required: Sequence[Share],
        size: int,
        snapshot: Snapshot,
    ) -> Sequence[Share]:
        """Choose the placements that leave most future capacity; closed GPUs come last.

        Of a layout, choose instances by the allocation policy, or units of one instance under MPS.
        The snapshot, not the kubelet, decides which shares are free: the kubelet may not have the
        newest list yet.
        """
        if self._options.fixed_layout is not None:
            if any(is_mps_share(share.id) for share in (*required, *available)):
                return choose_units(size, available, required, snapshot, self._mps)
            policy = self._options.allocation_policy
            return choose_replicas(size, available, required, snapshot, policy)

        required_by_gpu = by_gpu(required)
        candidates = [
            _candidate(snapshot.gpus[gpu], shares, required_by_gpu.get(gpu, ()))
            for gpu, shares in by_gpu([*required, *available]).items()
        ]
        open_candidates = [
            candidate
            for candidate in candidates
            if candidate.required or open_to(snapshot.gpus[candidate.gpu.id], self.name)
        ]
        chosen = (
            choose_placements(size, open_candidates) or choose_placements(size, candidates) or []
        )

        return list(dict.fromkeys([*chosen, *required, *available]))[:size]

    def check(self, shares: Sequence[Share], snapshot: Snapshot) -> None:
        """Refuse instances that exclude each other, such as two with the one media engine.

        Refuse several replicas for one container where the pool forbids them; under MPS, refuse
        units of several instances, and one container more than an instance serves.

        Raises:
            SharesOverlap: with the two instances.
            TooManyReplicas: in the words of NVIDIA's device plugin.
            MultipleDevices: with the free units of each instance.
            TooManyClients: with the number of clients that the instance serves.
        """
        if any(is_mps_share(share.id) for share in shares):
            check_units(shares, snapshot, self._mps)
        if self._options.fail_requests_greater_than_one and len(shares) > 1:
            for share in shares:
                if self._options.replicas_of(profile_of(share.id)) > 1:
                    raise TooManyReplicas(share.resource, len(shares))
        for one, other in combinations(shares, 2):
            if one is not other and conflicts(one, other):
                names = f"{one.id.partition('::')[2]}, {other.id.partition('::')[2]}"
                raise SharesOverlap(one.resource, str(snapshot.gpus[one.gpu].gpu), names)

    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Grant the MIG devices of the shares, by CDI name if created at the start.

        Under MPS, grant a part of one device.
        """
        if self.provisions_at_start:
            return self._injection.grant_cdi_names(shares, snapshot)
        grant = self._injection.grant_devices(shares, snapshot)
        if not any(is_mps_share(share.id) for share in shares):
            return grant
        return grant_units(grant, shares, snapshot, self._injection.run_dir)

    async def serve(self, context: GpuContext) -> None:
        """Create instances for leases and remove idle ones, or keep the layout on the GPU."""
        options = self._options.on(context.gpu)
        placed = placed_profiles(options, context.gpu)
        if options.existing is not False and not placed:
            await _stay_idle(context)
            return
        if isinstance(placed, UnplaceableLayout):
            await _stay_suspended(context, layout_problem(options, placed))
            return

        self._log_limited_replicas(context.gpu)
        settings = self._instance_settings(context.gpu, placed)
        mode: MigModePolicy = MigModeEnabler(context, enable=options.enable_mig)
        if options.disable_mig:
            mode = MigModeDisabler(context)
        run_dir = self._injection.run_dir
        await MigReconciler(context, settings, mode, run_dir, self.mps_timing).run()

    @classmethod
    async def find_leftovers(cls, node: AbandonedNode) -> Sequence[Leftover]:
        """Find the instances that metagpu made and no container holds, nor a process uses."""
        found: list[Leftover] = []
        for gpu, backend in node.assignments:
            if isinstance(backend, cls) and gpu.mig_enabled:
                # What allows an instance: a layout on this GPU counts as its profiles.
                settings = backend._instance_settings(gpu, ())  # noqa: SLF001 - of this class
                found += await find_instances(node, gpu, settings, backend.name)
        return found

    def _instance_settings(self, gpu: Gpu, placed: Sequence[PlacedProfile]) -> InstanceSettings:
        """Return the settings of a GPU's instances, which has these of a layout."""
        options = self._options.on(gpu)
        sharing = options.sharing_by_profile(gpu)
        return InstanceSettings(
            allowed=frozenset(options.profile_names),
            keep_warm=options.warm_seconds,
            deadline=options.deadline,
            layout=None if options.fixed_layout is None else frozenset(map(str, placed)),
            suffixes={
                name: instance_sharing.suffixes for name, instance_sharing in sharing.items()
            },
            mps_profiles=frozenset(filter(options.uses_mps, options.profile_names)),
            keeps_existing=options.existing is not False,
            shared_memory=self._mps.shared_memory,
            timing=self.timing,
        )

    def _names(self, states: Iterable[GpuState]) -> frozenset[str]:
        """Return the names of the pool's profiles on some GPUs."""
        return frozenset(
            name for state in states for name in self._options.on(state.gpu).profile_names
        )

    def _log_limited_replicas(self, gpu: Gpu) -> None:
        """Log the profiles whose instances serve fewer clients than the pool's replicas."""
        for profile in gpu.mig_profiles:
            uses_mps = self._options.uses_mps(profile.name)
            if uses_mps and self._mps.exceeds_clients(profile, gpu):
                log.warning(
                    "mps replicas limited to the clients of an instance",
                    gpu=str(gpu),
                    profile=profile.name,
                    offered=self._mps.clients_of(profile, gpu),
                )

    @property
    def _mps(self) -> MigMpsOptions:
        """The options of units; another pool may have cut them, under the same name."""
        return self._options.mps or MigMpsOptions()


def _finished_slots(gpu: Gpu, instances: Sequence[MigInstance]) -> Sequence[str]:
    """Return the slots of instances that a container can have."""
    finished = [each for each in instances if len(each.compute_instances) == 1]
    names = {profile.number for profile in gpu.mig_profiles}
    known = (each for each in finished if each.profile in names)
    return sorted(slot_of_instance(gpu.mig_profiles, each) for each in known)


async def _stay_suspended(context: GpuContext, reason: str) -> None:
    """Leave a GPU as it is, and free for other backends, until cancelled."""
    context.suspend(reason)
    await _finish_cleanups(context)


async def _stay_idle(context: GpuContext) -> None:
    """Leave a GPU without instances to other backends, until cancelled."""
    context.resume()
    await _finish_cleanups(context)


async def _finish_cleanups(context: GpuContext) -> None:
    while True:
        await context.wait_until(lambda _: context.cleanup_due_since is not None)
        if (since := context.cleanup_due_since) is not None:
            context.cleanup_done(since)


def _candidate(
    state: GpuState, shares: Sequence[Share], required: Sequence[Share]
) -> PlacementCandidate:
    """Describe one GPU for the choice of placements."""
    mine = [share for share in state.shares if share.backend == MigBackend.name]
    provisioned = state.provisioned.get(MigBackend.name, ProvisionedState())
    unleased = {i for i in provisioned.devices if i not in state.leases}
    warm = {i for i in unleased if provisioned.devices[i].idle}

    occupied = {slot for lease in state.leases.values() for slot in lease.share.footprint}
    occupied.update(provisioned.blocked)
    occupied.update(
        slot for share in mine if share.id in unleased - warm for slot in share.footprint
    )
    return PlacementCandidate(
        state.gpu,
        geometry_of(state.gpu.mig_profiles, frozenset(profile_of(share.id) for share in mine)),
        frozenset(occupied),
        [
            share
            for share in shares
            if share not in required and share.footprint.isdisjoint(occupied)
        ],
        frozenset(required),
        frozenset(share for share in mine if share.id in warm),
    )
