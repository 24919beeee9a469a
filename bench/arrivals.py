"""Pods that come and go, and rules for the placement of their MIG instances."""

import heapq
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias
from uuid import UUID

from metagpu.backends.mig.placement import PlacementCandidate, choose_placements
from metagpu.backends.mig.profiles import MigGeometry
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.shares import ResourceName, Share, ShareId

_GIB: Final = 2**30


class Pod(NamedTuple):
    """One request: its time, its profile, and how long the pod stays."""

    at: float
    profile: str
    stays: float


@dataclass(frozen=True)
class Node:
    """GPUs of one model, with all shares and the occupied slices of each GPU."""

    geometry: MigGeometry
    gpus: Sequence[Gpu]
    shares: Mapping[str, Sequence[Share]]
    starts: Mapping[ShareId, int]
    taken: dict[GpuId, set[str]] = field(default_factory=dict)

    def free(self, profile: str) -> list[Share]:
        """Return a profile's shares that conflict with no occupied one: by GPU, by start."""
        return [
            share
            for share in self.shares[profile]
            if share.footprint.isdisjoint(self.taken[share.gpu])
        ]

    def take(self, share: Share) -> None:
        """Assign a share to a pod."""
        assert share.footprint.isdisjoint(self.taken[share.gpu]), "taken twice"
        self.taken[share.gpu] |= share.footprint

    def give_back(self, share: Share) -> None:
        """Release a pod's share."""
        self.taken[share.gpu] -= share.footprint


Rule: TypeAlias = Callable[[Node, str], Share | None]
"""Chooses a share of a profile that is free, or none when there is none."""
Mix: TypeAlias = Callable[[MigGeometry], Mapping[str, float]]
"""Returns the weight of each profile of a geometry in the requests."""


def node(geometry: MigGeometry, count: int) -> Node:
    """Return a node of idle GPUs."""
    gpus = [Gpu(GpuId(f"GPU-{UUID(int=index)}"), index, "", 40 * _GIB) for index in range(count)]
    shares: dict[str, list[Share]] = {profile.name: [] for profile in geometry.profiles}
    starts = {}

    for gpu in gpus:
        for profile in geometry.profiles:
            for number, placed_profile in enumerate(profile.placed_profiles):
                share = Share(
                    id=ShareId(f"{gpu.id}::{placed_profile}"),
                    gpu=gpu.id,
                    resource=ResourceName(f"nvidia.com/mig-{profile.name}"),
                    backend="mig",
                    number=number,
                    footprint=placed_profile.footprint,
                    memory=profile.memory_slices * _GIB,
                )
                shares[profile.name].append(share)
                starts[share.id] = placed_profile.placement.start
    return Node(geometry, gpus, shares, starts, {gpu.id: set() for gpu in gpus})


def planned(on: Node, profile: str) -> Share | None:
    """Choose a share as metagpu does."""
    chosen = choose_placements(1, candidates(on, profile))
    return chosen[0] if chosen else None


def candidates(on: Node, profile: str) -> list[PlacementCandidate]:
    """Return the GPUs as the planner sees them."""
    by_gpu: dict[GpuId, list[Share]] = {gpu.id: [] for gpu in on.gpus}
    for share in on.free(profile):
        by_gpu[share.gpu].append(share)

    return [
        PlacementCandidate(gpu, on.geometry, frozenset(on.taken[gpu.id]), by_gpu[gpu.id])
        for gpu in on.gpus
        if by_gpu[gpu.id]
    ]


def first_fit(on: Node, profile: str) -> Share | None:
    """Choose the first free share: the first GPU with free capacity, the lowest start on it."""
    return next(iter(on.free(profile)), None)


def lowest_start(on: Node, profile: str) -> Share | None:
    """Choose the lowest start on any GPU."""
    return min(on.free(profile), default=None, key=lambda share: on.starts[share.id])


def by_chance(seed: int) -> Rule:
    """Choose any free share, as a kubelet does without a preference."""
    chance = random.Random(seed)  # noqa: S311 - a simulation

    def rule(on: Node, profile: str) -> Share | None:
        free = on.free(profile)
        return chance.choice(free) if free else None

    return rule


def even(geometry: MigGeometry) -> dict[str, float]:
    """Return equal weights for all profiles."""
    return {profile.name: 1.0 for profile in geometry.profiles}


def inverse(geometry: MigGeometry) -> dict[str, float]:
    """Return weights for which all profiles have the same memory in total."""
    return {profile.name: 1 / profile.memory_slices for profile in geometry.profiles}


def trace(
    geometry: MigGeometry,
    *,
    gpus: int,
    mix: Mapping[str, float],
    load: float,
    count: int,
    seed: int,
) -> list[Pod]:
    """Return `count` random pods (Poisson), the same for the same seed.

    Args:
        geometry: the MIG geometry of the GPUs.
        gpus: number of GPUs.
        mix: the weight of each profile.
        load: mean requested memory, if all pods were placed, as a part of all memory.
        count: number of pods.
        seed: of the random numbers.
    """
    chance = random.Random(seed)  # noqa: S311 - a simulation
    sizes = {profile.name: profile.memory_slices for profile in geometry.profiles}
    total = sum(mix.values())
    each = sum(sizes[name] * weight / total for name, weight in mix.items())
    rate = load * gpus * geometry.free_slices(0) / each

    pods, now = [], 0.0
    for _ in range(count):
        now += chance.expovariate(rate)
        profile = chance.choices(list(mix), list(mix.values()))[0]
        pods.append(Pod(now, profile, chance.expovariate(1.0)))
    return pods


def placed(on: Node, pods: Sequence[Pod], rule: Rule) -> Iterator[bool]:
    """Run the pods; return whether each was placed. A refused pod does not wait."""
    ends: list[tuple[float, int, Share]] = []

    for number, pod in enumerate(pods):
        while ends and ends[0][0] <= pod.at:
            on.give_back(heapq.heappop(ends)[2])
        share = rule(on, pod.profile)
        if share is not None:
            on.take(share)
            heapq.heappush(ends, (pod.at + pod.stays, number, share))
        yield share is not None
