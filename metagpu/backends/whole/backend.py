"""The backend `whole`: GPUs in one piece, the best connected ones for each pod.

A set of GPUs is better with more NVLinks between its members; then, with members that are nearer
to each other on the PCI bus; then, with better connections among the GPUs that stay behind.
NVSwitches connect all their GPUs alike. The order of the GPUs decides between equal sets: the same
question has the same answer.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from typing import ClassVar, Final, TypeAlias

from metagpu.core.availability.reasons import open_to
from metagpu.core.contracts.backend import OneResourceBackend, OneResourceOptions, Options
from metagpu.core.contracts.capabilities import DeclaresSharing, MemoryGuard
from metagpu.core.model.gpu import (
    Connection,
    Gpu,
    GpuId,
    PciPath,
    Topology,
)
from metagpu.core.model.shares import Share, ShareId
from metagpu.core.model.snapshot import Snapshot

_PATHS: Final = {
    PciPath.BOARD: 60,
    PciPath.SWITCH: 50,
    PciPath.SWITCHES: 40,
    PciPath.HOST_BRIDGE: 30,
    PciPath.NUMA_NODE: 20,
    PciPath.SYSTEM: 10,
}
"""The value of a PCI path, in the proportions of NVIDIA's device plugin."""
_NVLINK: Final = 1_000_000
"""The value of an NVLink: more than the PCI paths between all GPUs of a node together."""
_IMPROVED: Final = 4
"""Sets that are improved by exchanges, the best ones."""
_MAX_FOR_PAIRS: Final = 24
"""GPUs up to which exchanges of two are tried: the largest machines have 16, and take 2 ms."""


def best_connected(
    size: int, gpus: Sequence[Gpu], required: Collection[GpuId], topology: Topology
) -> list[Gpu]:
    """Choose `size` of the GPUs, the required ones among them.

    All are chosen if there are fewer than `size`.

    From every GPU a set grows by the GPU that connects best to it. Exchanges of one or two GPUs
    improve the best few sets, while an exchange helps. For n GPUs the choice takes O(n^3) steps,
    up to `_MAX_FOR_PAIRS` GPUs O(n^5).
    """
    wanted = min(size, len(gpus))
    kept = [place for place, gpu in enumerate(gpus) if gpu.id in required][:wanted]
    together, alone = _merits(gpus, topology)
    grown = {}

    for seed in range(len(gpus)):
        choice = _GpuSet(together, alone, kept)
        if len(kept) < wanted and seed not in kept:
            choice.add(seed)
        choice.grow(wanted)
        grown[choice.merit] = choice  # equal merit is the same set

    best = [grown[merit] for merit in sorted(grown, reverse=True)[:_IMPROVED]]
    for choice in best:
        choice.improve()
    chosen = max(best, key=lambda choice: choice.merit).members if best else ()
    return [gpus[place] for place in sorted(chosen)]


def worth(a: Gpu, b: Gpu, connection: Connection) -> int:
    """Return the value of a connection; NUMA nodes stand in for an unknown PCI path."""
    path = connection.pci
    if path is None and a.numa_node is not None and b.numa_node is not None:
        path = PciPath.NUMA_NODE if a.numa_node == b.numa_node else PciPath.SYSTEM

    return _NVLINK * (connection.nvlinks or 0) + (0 if path is None else _PATHS[path])


def _merits(gpus: Sequence[Gpu], topology: Topology) -> tuple[list[list[int]], list[int]]:
    """Return the value that each pair adds to a set, and the value that each GPU adds."""
    count = len(gpus)
    worths = [[0] * count for _ in gpus]
    for a, b in combinations(range(count), 2):
        connection = topology.between(gpus[a].id, gpus[b].id)
        worths[a][b] = worths[b][a] = worth(gpus[a], gpus[b], connection)

    # Of sets of equal value, the one with the fewest ties in all leaves the most behind.
    ties = [sum(row) for row in worths]
    above = sum(ties) + 1

    # The lowest bits name the set itself, so that no two are equal.
    together = [[value * above << count for value in row] for row in worths]
    alone = [(-tie << count) + (1 << count - 1 - place) for place, tie in enumerate(ties)]
    return together, alone


_Exchange: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The gain of an exchange, the GPUs that leave the set, the GPUs that enter it."""
_NOTHING: Final[_Exchange] = (0, (), ())


class _GpuSet:
    """A set of GPUs that grows and improves.

    Attributes:
        merit: the value of the set; it is largest for the best one.
        gains: the value that each GPU adds to the set, or would add.
    """

    def __init__(
        self, together: Sequence[Sequence[int]], alone: Sequence[int], kept: Sequence[int]
    ) -> None:
        self.members: set[int] = set()
        self.merit = 0
        self.gains = list(alone)
        self._together = together
        self._kept = frozenset(kept)
        for place in kept:
            self.add(place)

    def add(self, place: int) -> None:
        """Add a GPU."""
        self.merit += self.gains[place]
        self.members.add(place)
        self.gains = [g + t for g, t in zip(self.gains, self._together[place], strict=True)]

    def grow(self, size: int) -> None:
        """Add GPUs one by one, each the one that adds most, up to `size`."""
        while len(self.members) < size:
            self.add(max(self._others(), key=self.gains.__getitem__))

    def improve(self) -> None:
        """Exchange one or two GPUs for others while the set gets better."""
        for _ in self.gains:
            won, out, into = max(
                max(self._exchanges_of_one(), default=_NOTHING),
                max(self._exchanges_of_two(), default=_NOTHING),
            )
            if won <= 0:
                return
            for place in out:
                self._drop(place)
            for place in into:
                self.add(place)

    def _exchanges_of_one(self) -> Iterator[_Exchange]:
        gains, others = self.gains, self._others()

        for out in self.members - self._kept:
            row = self._together[out]
            for into in others:
                yield gains[into] - row[into] - gains[out], (out,), (into,)

    def _exchanges_of_two(self) -> Iterator[_Exchange]:
        gains, others, together = self.gains, self._others(), self._together
        if len(gains) > _MAX_FOR_PAIRS:
            return

        for a, b in combinations(sorted(self.members - self._kept), 2):
            lost = gains[a] + gains[b] - together[a][b]
            without = {c: gains[c] - together[a][c] - together[b][c] for c in others}
            for c, d in combinations(others, 2):
                yield without[c] + without[d] + together[c][d] - lost, (a, b), (c, d)

    def _others(self) -> list[int]:
        return [place for place in range(len(self.gains)) if place not in self.members]

    def _drop(self, place: int) -> None:
        self.gains = [g - t for g, t in zip(self.gains, self._together[place], strict=True)]
        self.members.discard(place)
        self.merit -= self.gains[place]


_SLOT = "whole"


class WholeOptions(
    OneResourceOptions, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """The options of whole GPUs, with the resource name of NVIDIA's device plugin."""

    resource: str = "nvidia.com/gpu"


class WholeBackend(OneResourceBackend[WholeOptions], DeclaresSharing):
    """A backend of whole GPUs. A share's id is the GPU's: `GPU-<uuid>`."""

    name: ClassVar[str] = "whole"
    options_type: ClassVar[type[Options]] = WholeOptions
    guard: ClassVar[MemoryGuard] = MemoryGuard.EXCLUSIVE

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Return the one share of a GPU; none in MIG mode, where CUDA sees instances only."""
        if gpu.mig_enabled:
            return ()

        return [
            Share(
                id=ShareId(gpu.id),
                gpu=gpu.id,
                resource=self.resource,
                backend=self.name,
                number=0,
                footprint=frozenset((_SLOT,)),
                memory=gpu.memory or 0,
            )
        ]

    def prefer(
        self,
        available: Sequence[Share],
        required: Sequence[Share],
        size: int,
        snapshot: Snapshot,
    ) -> Sequence[Share]:
        """Choose the best connected GPUs; for one GPU, the worst connected one.

        GPUs that are faulty or owned by another backend come last.
        """
        shares = {share.gpu: share for share in (*available, *required)}
        must = {share.gpu for share in required}
        candidates = [
            state.gpu
            for gpu, state in snapshot.gpus.items()
            # The kubelet may not have received yet that another backend owns the GPU.
            if gpu in shares and (gpu in must or open_to(state, self.name))
        ]
        gpus = best_connected(size, candidates, must, snapshot.topology)
        chosen = [shares[gpu.id] for gpu in gpus]

        return list(dict.fromkeys([*chosen, *required, *available]))[:size]
