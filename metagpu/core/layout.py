"""The configuration laid over the GPUs: which GPU is in which pool, and what is offered of it."""

from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

import msgspec
from msgspec.structs import replace

from metagpu.core.backend import Backend, Options
from metagpu.core.config import Config, Pool
from metagpu.core.facts import SharesOffered
from metagpu.core.figures import Figure
from metagpu.core.gpu import Gpu, GpuId
from metagpu.core.injection import Injection
from metagpu.core.model import ResourceName, Share
from metagpu.core.room import Room
from metagpu.core.snapshot import GpuState, Snapshot

ID_LIMIT = 63
"""Characters of a device id, by the comment in the kubelet's API."""
_MOST_REASONS = 3
"""Of those for which GPUs are not in a pool."""


class Assignment(msgspec.Struct, frozen=True):
    """The pool a GPU is in, and why; `pool` is `None` when no pool selects it."""

    gpu: Gpu
    pool: str | None
    why: str


class Cut(msgspec.Struct, frozen=True):
    """One GPU in the hands of one backend, as its pool configured it."""

    gpu: Gpu
    options: Options
    backend: Backend


class Layout(msgspec.Struct, frozen=True):
    """What the node offers: the result of one configuration and one set of GPUs.

    Attributes:
        unused: the pools that have no GPU here, and why.
    """

    assignments: tuple[Assignment, ...]
    backends: Mapping[ResourceName, Backend]
    shares: tuple[Share, ...]
    cuts: tuple[Cut, ...] = ()
    unused: Mapping[str, str] = {}

    @property
    def offered(self) -> SharesOffered:
        """The fact that tells the registry."""
        return SharesOffered(tuple(self.backends), self.shares)

    def rooms(self, snapshot: Snapshot) -> list[Room]:
        """Collect what is left of GPUs that are cut as pods ask, each backend's together. Pure."""
        states = self._by_backend(snapshot)
        return [room for backend, its in states.items() for room in backend.rooms(its)]

    def figures(self, snapshot: Snapshot) -> list[Figure]:
        """Collect the numbers that backends tell, each of its GPUs that are known."""
        states = self._by_backend(snapshot)
        return [figure for backend, its in states.items() for figure in backend.figures(its)]

    def _by_backend(self, snapshot: Snapshot) -> Mapping[Backend, Sequence[GpuState]]:
        states: dict[Backend, list[GpuState]] = {}
        for cut in self.cuts:
            if (state := snapshot.gpus.get(cut.gpu.id)) is not None:
                states.setdefault(cut.backend, []).append(state)
        return states


def lay_out(config: Config, gpus: Iterable[Gpu], injection: Injection) -> Layout:
    """Give every GPU to the first pool that selects it, and let the pool's backends cut it.

    Where several pools offer one resource, the first of them says how requests are placed.

    Raises:
        ConfigError: if an id is not legal or would be offered twice.
    """
    pools = config.pools(config.envelope.injection(injection))
    backends: dict[ResourceName, Backend] = {}

    for _, cutters in pools:
        for backend in cutters:
            for resource in backend.resources:
                backends.setdefault(resource, backend)

    assignments = []
    cuts: list[Cut] = []
    shares: list[Share] = []
    for gpu in gpus:
        assignment, cutters, reason = _assign(gpu, pools)
        cut = [share for backend in cutters for share in backend.shares(gpu)]
        if assignment.pool is not None:
            options = config.options[assignment.pool]
            cuts += [Cut(gpu, said, cutter) for said, cutter in zip(options, cutters, strict=True)]
            if not cut:
                why = _uncut(gpu, cutters, reason)
                assignment = replace(assignment, why=f"{assignment.why}, but nothing is cut: {why}")
        assignments.append(assignment)
        shares += cut

    _check_ids(config, "", shares, set())
    unused = _unused([pool for pool, _ in pools], assignments)
    return Layout(tuple(assignments), backends, tuple(shares), tuple(cuts), unused)


def rehearse(config: Config) -> None:
    """Lay a configuration over one invented GPU in each pool: what is wrong on any node is told.

    Raises:
        ConfigError: as `lay_out`.
    """
    for number, (_, cutters) in enumerate(config.pools(config.envelope.injection(Injection()))):
        gpu = Gpu(GpuId(f"GPU-{UUID(int=number)}"), number, "any", memory=80 * 2**30)
        seen: set[str] = set()
        for place, backend in enumerate(cutters):
            _check_ids(config, f"pools[{number}].backends[{place}]", backend.shares(gpu), seen)


def _assign(
    gpu: Gpu, pools: list[tuple[Pool, list[Backend]]]
) -> tuple[Assignment, list[Backend], str]:
    """Find the pool of a GPU: with its backends, and why it has none if it says so."""
    refusals = []

    for pool, cutters in pools:
        refusal = pool.refusal(gpu)
        if refusal is None:
            why = "all GPUs" if pool.gpus == "all" else f"matches {pool.gpus}"
            return Assignment(gpu, pool.name, why), cutters, pool.reason
        refusals.append(f"{pool.name}: {refusal}")

    return Assignment(gpu, None, f"no pool selects it ({'; '.join(refusals)})"), [], ""


def _unused(pools: Iterable[Pool], assignments: Sequence[Assignment]) -> Mapping[str, str]:
    """Find the pools without a GPU, and say of each why that is so."""
    used = {assignment.pool for assignment in assignments}
    found = {}

    for pool in pools:
        if assignments and pool.name not in used:
            refusals = dict.fromkeys(pool.refusal(each.gpu) for each in assignments)
            taken = "a pool before it has the GPUs that it selects"
            found[pool.name] = taken if None in refusals else _some(list(map(str, refusals)))
    return found


def _some(reasons: Sequence[str]) -> str:
    more = len(reasons) - _MOST_REASONS
    return "; ".join([*reasons[:_MOST_REASONS], *([f"and {more} more"] if more > 0 else [])])


def _uncut(gpu: Gpu, cutters: list[Backend], reason: str) -> str:
    if not cutters:
        return reason or "the pool has no backends"
    return "; ".join(dict.fromkeys(cutter.why_none(gpu) for cutter in cutters))


def _check_ids(config: Config, path: str, shares: Iterable[Share], seen: set[str]) -> None:
    for share in shares:
        if len(share.id) > ID_LIMIT:
            problem = f"the share id {share.id} has more than {ID_LIMIT} characters"
            raise config.error(path, problem)
        if share.id in seen:
            name = share.id.replace(share.gpu, "GPU-UUID")
            problem = f"each {name} would be offered twice, again as {share.resource}"
            raise config.error(path, f"{problem}; use each backend once in a pool")
        seen.add(share.id)
