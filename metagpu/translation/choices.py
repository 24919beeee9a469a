"""The choice of shares for one request on one node."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import ceil, inf, prod
from typing import Final, TypeAlias

import msgspec

from metagpu.translation.node_offers import MIG, MPS, WHOLE, OfferedPart
from metagpu.translation.requests import GpuRequest

_Served: TypeAlias = "tuple[GpuRequest, Choice]"
_USABLE: Final = 0.95
"""Part of its percents of a GPU that an instance has: MIG keeps the rest of the memory."""

_COMBINATIONS: Final = 4096


class Choice(msgspec.Struct, frozen=True):
    """Shares that serve one request.

    Attributes:
        count: of all GPUs together.
        waste: MiB that the container gets beyond its request.
    """

    part: OfferedPart
    count: int
    waste: int

    @property
    def resource(self) -> str:
        """The resource name that the container asks for."""
        return self.part.resource


def choose(request: GpuRequest, technique: str, parts: Iterable[OfferedPart]) -> Choice | None:
    """Return the smallest shares of a node that serve a request by one technique."""
    found = [
        choice
        for part in parts
        if part.technique == technique and (choice := serve(request, part)) is not None
    ]
    return min(found, key=_size, default=None)


def serve(request: GpuRequest, part: OfferedPart) -> Choice | None:
    """Return the shares of one resource that serve a request, `None` where none do."""
    each = shares_on_gpu(request, part)
    if not each:
        return None
    if request.count > most_gpus(part, each):
        return None
    wanted = needed_memory(request, part)
    return Choice(part, each * request.count, max(0, each * part.memory - wanted) * request.count)


def most_gpus(part: OfferedPart, each: int) -> int:
    """Return how many GPUs one request may have, by so many shares of each."""
    if part.technique == MPS:
        return 1  # a container is a client of one control daemon
    by_shares = part.most // each
    return by_shares if part.technique == MIG else min(part.gpus, by_shares)


def shares_on_gpu(request: GpuRequest, part: OfferedPart) -> int:
    """Return the shares of one GPU that a request needs, 0 where no GPU has enough."""
    if request.least > part.room:
        return 0
    if part.technique in (MIG, WHOLE):
        nominal = not request.memory
        if nominal and part.technique == WHOLE:
            return 1
        if nominal and not part.gpu_memory:
            return 0
        wanted = needed_memory(request, part) * (_USABLE if nominal else 1)
        return int(part.memory >= wanted)
    if request.whole:
        return part.per_gpu
    if request.percentage:
        shares = -(-request.percentage * part.per_gpu // 100)
    else:
        shares = -(-request.memory // part.memory)
        if shares > part.per_gpu and request.memory <= part.room:
            shares = part.per_gpu
    if part.technique == MPS:
        shares = max(shares, -(-request.cores * part.per_gpu // 100))
    return shares if shares <= part.per_gpu else 0


def needed_memory(request: GpuRequest, part: OfferedPart) -> int:
    """Return the MiB of each GPU that a request asks for."""
    if request.whole:
        return part.gpu_memory
    return request.memory or -(-request.percentage * part.gpu_memory // 100)


def _size(choice: Choice) -> tuple[int, int, str]:
    return choice.waste, choice.part.slices, choice.resource


def fits_together(requests: Sequence[GpuRequest], choices: Sequence[Choice]) -> bool:
    """Return whether a node could have all containers at once, if it had nothing else."""
    if len(requests) == 1:
        return True  # or it would not have been served
    parts = {choice.resource: choice.part for choice in choices}
    return all(
        _packs(part, [each for each in group if each[1].resource == resource])
        for group in _at_once(requests, choices)
        for resource, part in parts.items()
    )


def held_together(
    requests: Sequence[GpuRequest], ways: Sequence[Sequence[Choice]], gpus: int
) -> bool:
    """Return whether idle GPUs could serve requests of which none ends before another.

    A GPU has shares of one resource at a time, or MIG instances. Where choices have more than a
    few thousand combinations, they count as served.

    Args:
        requests: those of a pod.
        ways: for each, the choices that a node has.
        gpus: the number of the node's GPUs.
    """
    return prod(map(len, ways)) > _COMBINATIONS or any(
        _least_gpus(list(zip(requests, choices, strict=True))) <= gpus for choices in product(*ways)
    )


def _least_gpus(served: Sequence[_Served]) -> float:
    """Return how many idle GPUs are needed at least, infinity if a node's are too few."""
    by_part: dict[OfferedPart, list[_Served]] = {}
    for each in served:
        by_part.setdefault(each[1].part, []).append(each)
    found, instances, of_gpu = 0, 0, 0
    for part, those in by_part.items():
        if not _packs(part, those):
            return inf
        if part.technique == MIG:
            instances += part.memory * sum(choice.count for _, choice in those)
            of_gpu = max(of_gpu, part.gpu_memory and max(part.gpu_memory, part.memory))
        else:
            few = (msgspec.structs.replace(part, gpus=number + 1) for number in range(part.gpus))
            found += next(offered_part.gpus for offered_part in few if _packs(offered_part, those))
    return found + (ceil(instances / of_gpu) if of_gpu else min(instances, 1))


def demand_of(requests: Sequence[GpuRequest], choices: Sequence[Choice]) -> Mapping[str, int]:
    """Return the shares that all containers need at once, by resource."""
    if len(choices) == 1:
        return {choices[0].resource: choices[0].count}
    demand: Counter[str] = Counter()
    for group in _at_once(requests, choices):
        total: Counter[str] = Counter()
        for _, choice in group:
            total[choice.resource] += choice.count
        demand |= total
    return demand


def _at_once(
    requests: Sequence[GpuRequest], choices: Sequence[Choice]
) -> Iterator[Sequence[_Served]]:
    """Yield what runs at once: an init container does beside the sidecars before it."""
    running: list[_Served] = []
    for each in zip(requests, choices, strict=True):  # init containers first, as they start
        if each[0].alone:
            yield [*running, each]
        else:
            running.append(each)
    yield running


def _packs(part: OfferedPart, served: Sequence[_Served]) -> bool:
    """Return whether idle GPUs have room, for equal parts and the largest first."""
    if part.technique == MIG:
        return sum(choice.count for _, choice in served) <= part.most
    free = [part.per_gpu] * part.gpus
    wanted = [(choice.count // request.count, request.count) for request, choice in served]
    for each, gpus in sorted(wanted, reverse=True):
        free.sort()
        fullest = [place for place, room in enumerate(free) if room >= each][:gpus]
        if len(fullest) < gpus:
            return False
        for place in fullest:
            free[place] -= each
    return True
