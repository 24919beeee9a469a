"""The layout: the pool of each GPU, and the shares that the pool's backends offer."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec.structs import replace

from metagpu.core.availability.conflict import conflicting_shares
from metagpu.core.config.config import Config, Pool
from metagpu.core.config.errors import ConfigReason
from metagpu.core.contracts.backend import Backend, Options
from metagpu.core.contracts.capabilities import (
    HasMetrics,
    MemoryGuard,
    OffersExisting,
    ReportsCapacity,
    guard_of,
    no_shares_reason,
    offer_rule,
)
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.checks import (
    PoolMisfit,
    check_counts,
    check_ids,
    counted_shares,
    misfits,
    unused_pools,
)
from metagpu.core.model.backend_reports import BackendMetric, FreeCapacity
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.mig import MigInstance, is_mig, profile_of, share_suffix
from metagpu.core.model.offers import Api, RequestRule
from metagpu.core.model.shares import ResourceName, Share
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.facts import GpusFound, SharesClaimed, SharesOffered
from metagpu.core.state.reduce import reduce

_OTHER_KIND: Final = (
    "other devices of this node have the name of its resource; a resource is of one kind"
)


class PoolAssignment(msgspec.Struct, frozen=True):
    """The pool of a GPU, with the reason; `pool` is `None` without one.

    `missing` says why the GPU has no share in its pool, empty where it has one.
    """

    gpu: Gpu
    pool: str | None
    reason: str
    missing: str = ""


class BackendAssignment(msgspec.Struct, frozen=True):
    """One GPU with one backend of its pool, and the options of that backend."""

    gpu: Gpu
    options: Options
    backend: Backend


class Layout(msgspec.Struct, frozen=True):
    """The offer of the node: the result of one configuration and one set of GPUs.

    Attributes:
        pool_assignments: the pool of each GPU.
        backends: the backend that answers for each resource name.
        shares: all shares, of all GPUs.
        backend_assignments: each GPU with each backend of its pool.
        unused_pools: the pools without a GPU, each with the reason.
        misfits: the pools with GPUs that can have none of their shares.
        apis: the API of each resource.
        memory_policies: the policies of pools with shares whose memory the enforcer guards.
    """

    pool_assignments: tuple[PoolAssignment, ...]
    backends: Mapping[ResourceName, Backend]
    shares: tuple[Share, ...]
    backend_assignments: tuple[BackendAssignment, ...] = ()
    unused_pools: Mapping[str, str] = {}
    misfits: tuple[PoolMisfit, ...] = ()
    apis: Mapping[ResourceName, Api] = {}
    memory_policies: Mapping[str, str] = {}

    @property
    def offer_fact(self) -> SharesOffered:
        """The fact that puts the shares on offer."""
        gpus: dict[ResourceName, dict[GpuId, Gpu]] = {}
        known = {each.gpu.id: each.gpu for each in self.pool_assignments}
        for share in self.shares:
            gpus.setdefault(share.resource, {})[share.gpu] = known[share.gpu]
        rules = {
            resource: offer_rule(backend, gpus.get(resource, {}).values())
            for resource, backend in self.backends.items()
        }
        # By DRA the scheduler itself counts by GPU: nothing is held back.
        rules.update(
            (name, replace(rules[name], requests=RequestRule.ANY))
            for name, api in self.apis.items()
            if name in rules and api is Api.DRA
        )
        return SharesOffered(tuple(self.backends), self.shares, rules, self.apis)

    def gpus_in_turns(self, config: Config) -> Sequence[Sequence[GpuId]]:
        """Return the GPUs of each pool whose backends take turns with idle GPUs."""
        pools = [pool.name for pool in config.root.pools if pool.takes_turns]
        return [
            [each.gpu.id for each in self.pool_assignments if each.pool == name] for name in pools
        ]

    def free_capacity(self, snapshot: Snapshot) -> list[FreeCapacity]:
        """Return the free capacity of the backends that report it. Pure."""
        states = self._states_by_backend(snapshot)
        return [
            capacity
            for backend, gpus in states.items()
            if isinstance(backend, ReportsCapacity)
            for capacity in backend.free_capacity(gpus)
        ]

    def metrics(self, snapshot: Snapshot) -> list[BackendMetric]:
        """Return the metrics of all backends that have some. Pure."""
        states = self._states_by_backend(snapshot)
        return [
            metric
            for backend, gpus in states.items()
            if isinstance(backend, HasMetrics)
            for metric in backend.metrics(gpus)
        ]

    def _states_by_backend(self, snapshot: Snapshot) -> Mapping[Backend, Sequence[GpuState]]:
        states: dict[Backend, list[GpuState]] = {}
        for each in self.backend_assignments:
            if (state := snapshot.gpus.get(each.gpu.id)) is not None:
                states.setdefault(each.backend, []).append(state)
        return states


def pool_of(config: Config, layout: Layout, gpu: GpuId) -> Pool | None:
    """Return the pool of a GPU with all of its settings, `None` for a GPU in no pool."""
    names = (each.pool for each in layout.pool_assignments if each.gpu.id == gpu)
    name = next(names, None)
    return next((pool for pool in config.root.pools if pool.name == name), None)


def build_layout(
    config: Config,
    gpus: Iterable[Gpu],
    injection: Injection,
    existing: Mapping[GpuId, Sequence[MigInstance]] = MappingProxyType({}),
) -> Layout:
    """Assign each GPU to the first pool that selects it, and collect the shares. Pure.

    Where several pools offer one resource, the backend of the first pool answers for it. The
    resources of a pool without a GPU are not on offer, unless no GPU is known at all. `existing`
    are MIG instances, for backends that offer those that are there.

    Raises:
        ConfigError: if a share id is not legal or would be offered twice, or if the shares are more
            than a kubelet takes; none of equal ones is made then.
    """
    pools = config.build_backends(config.root.injection(injection))
    pool_assignments = []
    backend_assignments: list[BackendAssignment] = []
    shares: list[Share] = []
    counts = Counter[ResourceName]()
    by_name = {pool.name: pool for pool, _ in pools}
    assigned = [(gpu, *_assign_pool(gpu, pools)) for gpu in gpus]
    instances: dict[str | None, dict[Gpu, Sequence[MigInstance]]] = {}
    for gpu, assignment, *_ in assigned:
        instances.setdefault(assignment.pool, {})[gpu] = existing.get(gpu.id, ())
    answering = _answering_instances(pools, instances)
    check_counts(config, ((gpu, backends) for gpu, _, backends, _ in assigned))
    for gpu, assigned_pool, pool_backends, pool_reason in assigned:
        assignment, backends = assigned_pool, pool_backends
        if assignment.pool is not None:
            options = config.options[assignment.pool]
            found = [
                _with_existing(gpu, *pair, instances[assignment.pool])
                for pair in zip(options, backends, strict=True)
            ]
            backend_assignments += found
            backends = [backend_assignment.backend for backend_assignment in found]
        made = list(counted_shares(config, gpu, backends, counts))
        of_gpu = [share for share in made if _answers(backends, share, answering)]
        if assignment.pool is not None and not of_gpu:
            missing = _OTHER_KIND if made else _no_shares_reason(gpu, backends, pool_reason)
            reason = f"{assignment.reason}, but no shares: {missing}"
            assignment = replace(assignment, reason=reason, missing=missing)
        pool_assignments.append(assignment)
        if assignment.pool is not None:
            pool = by_name[assignment.pool]
            shares += _with_allocation_order(pool, gpu, backends, of_gpu)

    check_ids(config, "", shares, set())
    pool_by_gpu = {each.gpu: each.pool for each in pool_assignments}
    return Layout(
        tuple(pool_assignments),
        _answering_backends(pools, pool_assignments, answering),
        tuple(shares),
        tuple(backend_assignments),
        unused_pools([pool for pool, _ in pools], pool_by_gpu),
        tuple(misfits(pools, pool_by_gpu)),
        _apis_by_resource(config, pools, pool_assignments, shares),
        {
            pool.name: pool.memory_enforcement.in_force
            for pool, backends in pools
            if pool.name in pool_by_gpu.values()
            and MemoryGuard.ENFORCER in {guard_of(type(backend)) for backend in backends}
        },
    )


def _assign_pool(
    gpu: Gpu, pools: list[tuple[Pool, list[Backend]]]
) -> tuple[PoolAssignment, list[Backend], str]:
    """Return the pool of a GPU, the pool's backends, and its reason for having none."""
    exclusions = []

    for pool, backends in pools:
        exclusion = pool.exclusion_reason(gpu)
        if exclusion is None:
            reason = "all GPUs" if pool.gpus == "all" else f"matches {pool.gpus}"
            return PoolAssignment(gpu, pool.name, reason), backends, pool.reason
        exclusions.append(f"{pool.name}: {exclusion}")

    return PoolAssignment(gpu, None, f"no pool selects it ({'; '.join(exclusions)})"), [], ""


def _with_existing(
    gpu: Gpu, options: Options, backend: Backend, instances: Mapping[Gpu, Sequence[MigInstance]]
) -> BackendAssignment:
    if isinstance(backend, OffersExisting) and backend.offers_existing:
        options, backend = backend.with_existing(gpu, instances)
    return BackendAssignment(gpu, options, backend)


def _answering_instances(
    pools: Iterable[tuple[Pool, list[Backend]]],
    instances: Mapping[str | None, Mapping[Gpu, Sequence[MigInstance]]],
) -> dict[ResourceName, Backend]:
    """Return the backends of existing instances that have one name in a pool."""
    found: dict[ResourceName, Backend] = {}
    for pool, backends in pools:
        for backend in backends:
            if isinstance(backend, OffersExisting) and backend.offers_existing:
                for resource in backend.existing_resources(instances.get(pool.name, {})):
                    found.setdefault(resource, backend)
    return found


def _answering_backends(
    pools: Iterable[tuple[Pool, list[Backend]]],
    assignments: Iterable[PoolAssignment],
    of_shares: Mapping[ResourceName, Backend],
) -> dict[ResourceName, Backend]:
    """Return the backend of each resource: the first pool's, if of the right kind."""
    used = {assignment.pool for assignment in assignments}
    found: dict[ResourceName, Backend] = {}
    for pool, backends in pools:
        if not used or pool.name in used:
            for backend in backends:
                for resource in backend.resources:
                    found.setdefault(resource, backend)
    for resource, backend in of_shares.items():
        if resource not in found or found[resource].name != backend.name:
            found[resource] = backend
    return found


def _apis_by_resource(
    config: Config,
    pools: Iterable[tuple[Pool, list[Backend]]],
    assignments: Iterable[PoolAssignment],
    shares: Iterable[Share],
) -> Mapping[ResourceName, Api]:
    """Return the API of each resource, by the pools of its name and of its shares."""
    apis = {pool.name: pool.api for pool, _ in pools}
    named = {
        resource: pool.api
        for pool, backends in pools
        for backend in backends
        for resource in backend.resources
    }
    of_gpu = {each.gpu.id: apis[each.pool] for each in assignments if each.pool is not None}
    for share in shares:
        its = of_gpu[share.gpu]
        if named.setdefault(share.resource, its) is not its:
            problem = f"{share.resource} would have both APIs; give it another `resource` in a pool"
            raise config.error("", problem, ConfigReason.NAME_TAKEN)
    return named


def _with_allocation_order(
    pool: Pool, gpu: Gpu, backends: Iterable[Backend], shares: Sequence[Share]
) -> Sequence[Share]:
    """Return a GPU's shares, for DRA in the order of their allocation.

    The scheduler allocates the first device that fits, so the places of each MIG profile come in
    the order in which the backend would fill an idle GPU.
    """
    if pool.api is not Api.DRA:
        return shares
    by_name = {backend.name: backend for backend in backends}
    idle, _ = reduce(Snapshot(), GpusFound((gpu,), at=0))
    resources = tuple(dict.fromkeys(share.resource for share in shares))
    idle, _ = reduce(idle, SharesOffered(resources, tuple(shares)))
    groups: dict[tuple[str, str], list[Share]] = {}
    for share in shares:
        has_places = is_mig(share.id) and not share_suffix(share.id)
        profile = profile_of(share.id) if has_places else ""
        groups.setdefault((share.backend, profile), []).append(share)
    return [
        share
        for (backend, profile), those in groups.items()
        for share in (_filled(by_name[backend], those, idle) if profile else those)
    ]


def _answers(
    backends: Iterable[Backend], share: Share, answering: dict[ResourceName, Backend]
) -> bool:
    """Return whether a share is of the kind that answers for its resource.

    Existing instances come first, then the first share. Only where resources follow from what
    exists may a second backend have one: NVIDIA's strategy `single` on a node with whole GPUs and
    instances.
    """
    for backend in backends:
        if backend.name == share.backend:
            return answering.setdefault(share.resource, backend).name == share.backend
    return False


def _no_shares_reason(gpu: Gpu, backends: list[Backend], pool_reason: str) -> str:
    if pool_reason or not backends:
        return pool_reason or "the pool has no backends"
    return "; ".join(dict.fromkeys(no_shares_reason(backend, gpu) for backend in backends))


def _filled(backend: Backend, places: Sequence[Share], snapshot: Snapshot) -> Iterator[Share]:
    """Yield the places that fit together in the backend's order, then the others."""
    rest = list(places)
    while True:
        unavailable = conflicting_shares(snapshot.gpus[places[0].gpu])
        free = [share for share in rest if share.id not in unavailable]
        if not free:
            break
        [best] = backend.prefer(free, (), 1, snapshot)
        rest.remove(best)
        yield best
        snapshot, _ = reduce(snapshot, SharesClaimed((best,), at=0))
    yield from rest
