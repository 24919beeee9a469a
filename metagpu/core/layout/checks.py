"""Checks of a layout: what of a configuration a node cannot offer, and why.

The limits of a kubelet's list, the ids of shares, and pools whose GPUs can have nothing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final
from uuid import UUID

import msgspec

from metagpu.core.config.config import Config, Pool
from metagpu.core.config.errors import ConfigReason
from metagpu.core.contracts.backend import Backend, OneResourceBackend
from metagpu.core.contracts.capabilities import misfit_reason
from metagpu.core.grants.injection import Injection
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.shares import ResourceName, Share

ID_LIMIT: Final = 63
"""Characters of a device id, by the comment in the kubelet's API."""
_MAX_SHARES: Final = 70_000
"""Of one resource: more than the kubelet takes in a list, whose bytes are counted later."""
_MAX_NODE_SHARES: Final = 4 * _MAX_SHARES
"""Of all resources. A configuration must not take the memory and the time of a node."""
_MANY: Final = 10_000
"""Of one GPU: so many are made for GPUs that are there alone."""
_MAX_REASONS: Final = 3
"""Reasons that are listed when no GPU is in a pool."""


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
            if isinstance(backend, OneResourceBackend) and backend.count_shares(gpu) > _MANY:
                continue  # likewise
            checked += len(shares := backend.shares(gpu))
            check_ids(config, f"pools[{number}].backends[{place}]", shares, seen)


def check_fit(config: Config, misfits: Iterable[PoolMisfit]) -> None:
    """Check that each pool has a GPU that can have some of its shares, if it has GPUs.

    Raises:
        ConfigError: with the pool, and the reason of its GPUs.
    """
    for misfit in misfits:
        if misfit.complete:
            problem = f"no GPU can have this: {misfit}"
            raise config.error(f"pools[{misfit.pool}]", problem, ConfigReason.NO_GPU)


def check_counts(config: Config, backends_of: Iterable[tuple[Gpu, Iterable[Backend]]]) -> None:
    """Refuse too many shares before they are made, of backends that can count them."""
    counts = Counter[ResourceName]()
    for gpu, backends in backends_of:
        for backend in backends:
            if isinstance(backend, OneResourceBackend):
                counts[backend.resource] += backend.count_shares(gpu)
                _refuse_many(config, counts)


def counted_shares(
    config: Config, gpu: Gpu, backends: Iterable[Backend], counts: Counter[ResourceName]
) -> Iterator[Share]:
    """Yield the shares of a GPU, and refuse the configuration once they are too many."""
    for backend in backends:
        shares = backend.shares(gpu)
        counts.update(share.resource for share in shares)
        _refuse_many(config, counts)
        yield from shares


def _refuse_many(config: Config, counts: Counter[ResourceName]) -> None:
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


def check_ids(config: Config, path: str, shares: Iterable[Share], seen: set[str]) -> None:
    """Refuse an id that is too long, or that is in `seen`, which gets all ids."""
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


def unused_pools(pools: Iterable[Pool], pool_by_gpu: Mapping[Gpu, str | None]) -> Mapping[str, str]:
    """Return the pools without a GPU, each with the reason."""
    used = set(pool_by_gpu.values())
    unused = {}

    for pool in pools:
        if pool_by_gpu and pool.name not in used:
            exclusions = dict.fromkeys(map(pool.exclusion_reason, pool_by_gpu))
            taken = "a pool before it has the GPUs that it selects"
            unused[pool.name] = taken if None in exclusions else _first_few(exclusions)
    return unused


def misfits(
    pools: Sequence[tuple[Pool, list[Backend]]], pool_by_gpu: Mapping[Gpu, str | None]
) -> Iterator[PoolMisfit]:
    """Yield the pools with GPUs of which no backend can have a share."""
    for number, (pool, backends) in enumerate(pools):
        gpus = [gpu for gpu, name in pool_by_gpu.items() if name == pool.name]
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
