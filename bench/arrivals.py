"""Pods that come and go, and rules for where their MIG instances are put."""

import heapq
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias
from uuid import UUID

from metagpu.backends.mig.placement import Seat, choose
from metagpu.backends.mig.profiles import Board
from metagpu.core.gpu import Gpu, GpuId
from metagpu.core.model import ResourceName, Share, ShareId

_GIB: Final = 2**30


class Pod(NamedTuple):
    """One request: when it comes, what it asks for one of, how long it stays."""

    at: float
    profile: str
    stays: float


@dataclass(frozen=True)
class Node:
    """GPUs of one kind, with all shares of all profiles, and what is taken of each."""

    board: Board
    gpus: Sequence[Gpu]
    shares: Mapping[str, Sequence[Share]]
    starts: Mapping[ShareId, int]
    taken: dict[GpuId, set[str]] = field(default_factory=dict)

    def free(self, profile: str) -> list[Share]:
        """List the shares of a profile that conflict with none taken: GPU by GPU, by start."""
        return [
            share
            for share in self.shares[profile]
            if share.footprint.isdisjoint(self.taken[share.gpu])
        ]

    def take(self, share: Share) -> None:
        """Give a share to a pod."""
        assert share.footprint.isdisjoint(self.taken[share.gpu]), "taken twice"
        self.taken[share.gpu] |= share.footprint

    def give_back(self, share: Share) -> None:
        """Take a pod's share back."""
        self.taken[share.gpu] -= share.footprint


Rule: TypeAlias = Callable[[Node, str], Share | None]
"""Chooses a share of a profile that is free, or none when there is none."""
Mix: TypeAlias = Callable[[Board], Mapping[str, float]]
"""Says how often each profile of a board is asked for, in proportion."""


def node(board: Board, count: int) -> Node:
    """Make a node of so many idle GPUs."""
    gpus = [Gpu(GpuId(f"GPU-{UUID(int=index)}"), index, "", 40 * _GIB) for index in range(count)]
    shares: dict[str, list[Share]] = {profile.name: [] for profile in board.profiles}
    starts = {}

    for gpu in gpus:
        for profile in board.profiles:
            for number, spot in enumerate(profile.spots):
                share = Share(
                    id=ShareId(f"{gpu.id}::{spot}"),
                    gpu=gpu.id,
                    resource=ResourceName(f"nvidia.com/mig-{profile.name}"),
                    backend="mig",
                    number=number,
                    footprint=spot.footprint,
                    memory=profile.memory_slices * _GIB,
                )
                shares[profile.name].append(share)
                starts[share.id] = spot.placement.start
    return Node(board, gpus, shares, starts, {gpu.id: set() for gpu in gpus})


def planned(on: Node, profile: str) -> Share | None:
    """Choose as metagpu does."""
    chosen = choose(1, seats(on, profile))
    return chosen[0] if chosen else None


def seats(on: Node, profile: str) -> list[Seat]:
    """Give the GPUs as the planner sees them."""
    by_gpu: dict[GpuId, list[Share]] = {gpu.id: [] for gpu in on.gpus}
    for share in on.free(profile):
        by_gpu[share.gpu].append(share)

    return [
        Seat(gpu, on.board, frozenset(on.taken[gpu.id]), by_gpu[gpu.id])
        for gpu in on.gpus
        if by_gpu[gpu.id]
    ]


def first_fit(on: Node, profile: str) -> Share | None:
    """Take the first that is free: the first GPU with room, the lowest start on it."""
    return next(iter(on.free(profile)), None)


def lowest_start(on: Node, profile: str) -> Share | None:
    """Take the lowest start on any GPU."""
    return min(on.free(profile), default=None, key=lambda share: on.starts[share.id])


def by_chance(seed: int) -> Rule:
    """Take any, as a kubelet does that is told no preference."""
    chance = random.Random(seed)  # noqa: S311 - a simulation

    def rule(on: Node, profile: str) -> Share | None:
        free = on.free(profile)
        return chance.choice(free) if free else None

    return rule


def even(board: Board) -> dict[str, float]:
    """Ask for every profile equally often."""
    return {profile.name: 1.0 for profile in board.profiles}


def inverse(board: Board) -> dict[str, float]:
    """Ask for a profile the less often, the larger it is: all have the same memory in the end."""
    return {profile.name: 1 / profile.memory_slices for profile in board.profiles}


def trace(
    board: Board, *, gpus: int, mix: Mapping[str, float], load: float, count: int, seed: int
) -> list[Pod]:
    """Make `count` pods that come and go by chance (Poisson), the same for the same seed.

    Args:
        board: what the GPUs can be cut into.
        gpus: how many there are.
        mix: how often each profile is asked for, in proportion.
        load: memory asked for at a time, if all were placed, as a part of all there is.
        count: how many pods come.
        seed: says which.
    """
    chance = random.Random(seed)  # noqa: S311 - a simulation
    sizes = {profile.name: profile.memory_slices for profile in board.profiles}
    total = sum(mix.values())
    each = sum(sizes[name] * weight / total for name, weight in mix.items())
    rate = load * gpus * board.free_slices(0) / each

    pods, now = [], 0.0
    for _ in range(count):
        now += chance.expovariate(rate)
        profile = chance.choices(list(mix), list(mix.values()))[0]
        pods.append(Pod(now, profile, chance.expovariate(1.0)))
    return pods


def placed(on: Node, pods: Sequence[Pod], rule: Rule) -> Iterator[bool]:
    """Let pods come and go; say of each whether it was placed. Who is refused does not wait."""
    ends: list[tuple[float, int, Share]] = []

    for number, pod in enumerate(pods):
        while ends and ends[0][0] <= pod.at:
            on.give_back(heapq.heappop(ends)[2])
        share = rule(on, pod.profile)
        if share is not None:
            on.take(share)
            heapq.heappush(ends, (pod.at + pod.stays, number, share))
        yield share is not None
