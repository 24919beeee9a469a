"""The layout: the pool of each GPU, and the shares that the pool's backends offer."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final
from uuid import UUID

import msgspec
from msgspec.structs import replace

from metagpu.core.availability.conflict import conflicting_shares
from metagpu.core.config.config import Config, Pool
from metagpu.core.config.errors import ConfigReason
from metagpu.core.contracts.backend import Backend, Options
from metagpu.core.contracts.capabilities import (
    HasMetrics,
    OffersExisting,
    ReportsCapacity,
    misfit_reason,
    no_shares_reason,
    offer_rule,
)
from metagpu.core.grants.injection import Injection
from metagpu.core.model.backend_reports import BackendMetric, FreeCapacity
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.mig import MigInstance, is_mig, profile_of, share_suffix
from metagpu.core.model.offers import Api, RequestRule
from metagpu.core.model.shares import ResourceName, Share
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.facts import GpusFound, SharesClaimed, SharesOffered
from metagpu.core.state.reduce import reduce

ID_LIMIT: Final = 63
"""Characters of a device id, by the comment in the kubelet's API."""
_MAX_SHARES: Final = 70_000
"""Of one resource: more than the kubelet takes in a list, whose bytes are counted later."""
_MAX_NODE_SHARES: Final = 4 * _MAX_SHARES
"""Of all resources. A configuration must not take the memory and the time of a node."""
_OTHER_KIND: Final = (
    "other devices of this node have the name of its resource; a resource is of one kind"
)
_MAX_REASONS: Final = 3
"""Reasons that are listed when no GPU is in a pool."""


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


class PoolMisfit(msgspec.Struct, frozen=True):
    """GPUs of a pool that can have none of its shares, in any state or mode.

    Attributes:
        pool: the pool's position in the configuration.
        complete: whether these are all GPUs of the pool.
    """

    pool: int
    gpus: tuple[Gpu, ...]
    reason: str
    complete: bool

    def __str__(self) -> str:
        """Return the GPUs and the reason, for people."""
        plural = "s" if len(self.gpus) > 1 else ""
        return f"GPU{plural} {', '.join(str(gpu.index) for gpu in self.gpus)}: {self.reason}"


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
    """

    pool_assignments: tuple[PoolAssignment, ...]
    backends: Mapping[ResourceName, Backend]
    shares: tuple[Share, ...]
    backend_assignments: tuple[BackendAssignment, ...] = ()
    unused_pools: Mapping[str, str] = {}
    misfits: tuple[PoolMisfit, ...] = ()
    apis: Mapping[ResourceName, Api] = {}

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
            than a kubelet takes; the rest of them is not made then.
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
        made = list(_counted_shares(config, gpu, backends, counts))
        of_gpu = [share for share in made if _answers(backends, share, answering)]
        if assignment.pool is not None and not of_gpu:
            missing = _OTHER_KIND if made else _no_shares_reason(gpu, backends, pool_reason)
            reason = f"{assignment.reason}, but no shares: {missing}"
            assignment = replace(assignment, reason=reason, missing=missing)
        pool_assignments.append(assignment)
        if assignment.pool is not None:
            pool = by_name[assignment.pool]
            shares += _with_allocation_order(pool, gpu, backends, of_gpu)

    _check_ids(config, "", shares, set())
    return Layout(
        tuple(pool_assignments),
        _answering_backends(pools, pool_assignments, answering),
        tuple(shares),
        tuple(backend_assignments),
        _unused_pools([pool for pool, _ in pools], pool_assignments),
        tuple(_misfits(pools, pool_assignments)),
        _apis_by_resource(config, pools, pool_assignments, shares),
    )


def check_fit(config: Config, layout: Layout) -> None:
    """Check that each pool has a GPU that can have some of its shares, if it has GPUs.

    Raises:
        ConfigError: with the pool, and the reason of its GPUs.
    """
    for misfit in layout.misfits:
        if misfit.complete:
            problem = f"no GPU can have this: {misfit}"
            raise config.error(f"pools[{misfit.pool}]", problem, ConfigReason.NO_GPU)


def check_layout(config: Config) -> None:
    """Check the share ids of each pool with one invented GPU.

    The check finds what is wrong with a configuration on every node.

    Raises:
        ConfigError: as `build_layout`.
    """
    pools = config.build_backends(config.root.injection(Injection()))
    checked = 0
    for number, (_, backends) in enumerate(pools):
        gpu = Gpu(GpuId(f"GPU-{UUID(int=number)}"), number, "any", memory=80 * 2**30)
        seen: set[str] = set()
        for place, backend in enumerate(backends):
            if checked > _MAX_NODE_SHARES:
                return  # `build_layout` checks the pools that this node has GPUs for
            checked += len(shares := backend.shares(gpu))
            _check_ids(config, f"pools[{number}].backends[{place}]", shares, seen)


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


def _counted_shares(
    config: Config, gpu: Gpu, backends: Iterable[Backend], counts: Counter[ResourceName]
) -> Iterator[Share]:
    """Yield the shares of a GPU, and refuse the configuration once they are too many."""
    for backend in backends:
        shares = backend.shares(gpu)
        counts.update(share.resource for share in shares)
        for resource, count in counts.items():
            if count > _MAX_SHARES:
                problem = (
                    f"{resource} would have {count} shares or more; the kubelet takes a list of "
                    f"less than {_MAX_SHARES}. Configure fewer shares of each GPU, or several "
                    "resources"
                )
                raise config.error("", problem, ConfigReason.TOO_LARGE)
        if counts.total() > _MAX_NODE_SHARES:
            problem = f"the node would have more than {_MAX_NODE_SHARES} shares; configure fewer"
            raise config.error("", problem, ConfigReason.TOO_LARGE)
        yield from shares


def _unused_pools(
    pools: Iterable[Pool], assignments: Sequence[PoolAssignment]
) -> Mapping[str, str]:
    """Return the pools without a GPU, each with the reason."""
    used = {assignment.pool for assignment in assignments}
    unused = {}

    for pool in pools:
        if assignments and pool.name not in used:
            exclusions = dict.fromkeys(pool.exclusion_reason(each.gpu) for each in assignments)
            taken = "a pool before it has the GPUs that it selects"
            unused[pool.name] = taken if None in exclusions else _first_few(exclusions)
    return unused


def _misfits(
    pools: Sequence[tuple[Pool, list[Backend]]], assignments: Sequence[PoolAssignment]
) -> Iterator[PoolMisfit]:
    """Yield the pools with GPUs of which no backend can have a share."""
    for number, (pool, backends) in enumerate(pools):
        gpus = [each.gpu for each in assignments if each.pool == pool.name]
        reasons: dict[Gpu, str] = {}
        for gpu in gpus:
            of_gpu = [misfit_reason(backend, gpu) for backend in backends]
            if of_gpu and all(of_gpu):
                reasons[gpu] = "; ".join(dict.fromkeys(of_gpu))
        if reasons:
            reason = _first_few(dict.fromkeys(reasons.values()))
            yield PoolMisfit(number, tuple(reasons), reason, len(reasons) == len(gpus))


def _first_few(reasons: Iterable[object]) -> str:
    texts = list(map(str, reasons))
    more = len(texts) - _MAX_REASONS
    return "; ".join([*texts[:_MAX_REASONS], *([f"and {more} more"] if more > 0 else [])])


def _no_shares_reason(gpu: Gpu, backends: list[Backend], pool_reason: str) -> str:
    if pool_reason or not backends:
        return pool_reason or "the pool has no backends"
    return "; ".join(dict.fromkeys(no_shares_reason(backend, gpu) for backend in backends))


def _check_ids(config: Config, path: str, shares: Iterable[Share], seen: set[str]) -> None:
    for share in shares:
        if len(share.id) > ID_LIMIT:
            problem = f"the share id {share.id} has more than {ID_LIMIT} characters"
            raise config.error(path, problem, ConfigReason.TOO_LARGE)
        if share.id in seen:
            name = share.id.replace(share.gpu, "GPU-UUID")
            problem = (
                f"each {name} would be offered twice, again as {share.resource}; use each backend "
                "once in a pool"
            )
            raise config.error(path, problem, ConfigReason.GIVEN_TWICE)
        seen.add(share.id)


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
