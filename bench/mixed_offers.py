"""Rules by which the idle GPUs of a pool are offered to its backends, on modelled GPUs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from bench.cluster_model import RELEASE_S, Pod
from metagpu.core.layout.turns import TurnCandidate, TurnSchedule, TurnTiming
from metagpu.core.model.gpu import GpuId

EACH: Final[Mapping[str, int]] = {"timeslice": 4, "mps": 100, "whole": 1}
"""Shares of a GPU, by backend."""
REQUESTS: Final[Mapping[str, int]] = {"timeslice": 1, "mps": 25, "whole": 1}
CLEANUP_S: Final[Mapping[str, float]] = {"mps": 1.0}


@dataclass(eq=False)
class Gpu:
    """A GPU, idle without an owner."""

    index: int
    owner: str | None = None
    last: str | None = None
    free: int = 0
    idle_at: float = 0.0


class Offers(NamedTuple):
    """The backends that offer each idle GPU.

    Attributes:
        listed: those whose shares the kubelet has as Healthy.
        counted: those that the Node counts.
        next_at: when the rule has something new.
    """

    listed: Mapping[int, frozenset[str]]
    counted: Mapping[int, frozenset[str]]
    next_at: float = float("inf")


Rule = Callable[["Mixed", float], Offers]


@dataclass(eq=False)
class Mixed:
    """A pool of three backends.

    Attributes:
        by_kubelet: whether the Node counts what is listed: the kubelet alone writes it.
    """

    gpus: list[Gpu]
    rule: Rule
    by_kubelet: bool = False
    offers: Offers = field(default_factory=lambda: Offers({}, {}))
    _held: dict[Pod, list[Gpu]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Offer idle GPUs."""
        self.advance(0.0)

    @property
    def idle(self) -> list[Gpu]:
        """The idle GPUs."""
        return [gpu for gpu in self.gpus if gpu.owner is None]

    def amounts(self) -> Mapping[str, int]:
        """Return the shares of owners, held or free, and those of idle GPUs that count."""
        return self.listed() if self.by_kubelet else self._count(self.offers.counted)

    def listed(self) -> Mapping[str, int]:
        """Return the shares of owners, held or free, and those of idle GPUs that are listed."""
        return self._count(self.offers.listed)

    def _count(self, shown: Mapping[int, frozenset[str]]) -> Mapping[str, int]:
        return {
            name: each * sum(name in (shown[gpu.index] if gpu.owner is None else (gpu.owner,))
                             for gpu in self.gpus)
            for name, each in EACH.items()
        }  # fmt: skip

    def admit(self, pod: Pod) -> bool:
        """Place a pod: on the owner's fullest GPU, else on an idle one that is listed."""
        name, listed = pod.resource, self.offers.listed
        if name == "whole":
            chosen = [other for other in self.gpus if other.owner == name and other.free]
            chosen += [other for other in self.idle if name in listed[other.index]]
            chosen, size = chosen[: pod.size], 1
            if len(chosen) < pod.size:
                return False
        else:
            own = [other for other in self.gpus if other.owner == name and other.free >= pod.size]
            new = [other for other in self.idle if name in listed[other.index]]
            chosen, size = [*sorted(own, key=lambda own_gpu: own_gpu.free), *new][:1], pod.size
            if not chosen:
                return False
        for gpu in chosen:
            if gpu.owner is None:
                gpu.owner, gpu.free = name, EACH[name]
            gpu.free -= size
        self._held[pod] = chosen
        return True

    def announce(self, pod: Pod) -> None:
        """Change nothing: the owner offers a freed GPU first."""

    def release(self, pod: Pod, now: float) -> None:
        """Free a pod's shares; a GPU is idle when the plugin knows, and has cleaned it up."""
        for gpu in self._held.pop(pod):
            gpu.free += 1 if pod.resource == "whole" else pod.size
            gpu.idle_at = now + RELEASE_S + CLEANUP_S.get(pod.resource, 0.0)

    def advance(self, now: float) -> float:
        """End owners of idle GPUs, and apply the rule."""
        leaving = [
            other
            for other in self.gpus
            if other.owner is not None and other.free == EACH[other.owner]
        ]
        for gpu in leaving:
            if now >= gpu.idle_at - 1e-9:
                gpu.last, gpu.owner, gpu.idle_at = gpu.owner, None, now
        self.offers = self.rule(self, now)
        return min(
            [self.offers.next_at, *(other.idle_at for other in leaving if other.owner is not None)]
        )

    def use(self) -> float:
        """Return the held part of all GPUs."""
        held = (1 - gpu.free / EACH[gpu.owner] for gpu in self.gpus if gpu.owner is not None)
        return sum(held) / len(self.gpus)


def everything(node: Mixed, now: float) -> Offers:  # noqa: ARG001 - a rule
    """Offer every idle GPU by every backend."""
    offered = {gpu.index: frozenset(EACH) for gpu in node.idle}
    return Offers(offered, offered)


def one_more(node: Mixed, now: float) -> Offers:
    """Offer a freed GPU by its last owner, and by one backend more every 1.5 s."""
    offered, next_at = {}, float("inf")
    for gpu in node.idle:
        order = sorted(EACH, key=lambda name: (name != gpu.last, name))
        turns = 1 + int((now - gpu.idle_at + 1e-6) / 1.5) if gpu.last else len(EACH)
        offered[gpu.index] = frozenset(order[:turns])
        if turns < len(EACH):
            next_at = min(next_at, gpu.idle_at + turns * 1.5)
    return Offers(offered, offered, next_at)


def in_turns(timing: TurnTiming) -> Rule:
    """Return the rule of `core/layout/turns.py`."""
    schedule = TurnSchedule(timing)

    def rule(node: Mixed, now: float) -> Offers:
        names = tuple(EACH)
        turns = schedule.apply(
            [TurnCandidate(GpuId(str(gpu.index)), names, gpu.owner) for gpu in node.gpus], now
        )
        of_idle = {gpu.index: turns[GpuId(str(gpu.index))] for gpu in node.idle}
        listed = {index: frozenset({turn.backend}) for index, turn in of_idle.items()}
        counted = {
            index: frozenset[str]() if turn.withdrawn else listed[index]
            for index, turn in of_idle.items()
        }
        return Offers(listed, counted, max(schedule.next_at, now + 1e-6))

    return rule


RULES: Final[Mapping[str, Callable[[], Rule]]] = {
    "all": lambda: everything,
    "one more each 1.5 s": lambda: one_more,
    "turns": lambda: in_turns(TurnTiming()),
    "turns, no grace": lambda: in_turns(TurnTiming(grace=0.0)),
    "turns of 20 s": lambda: in_turns(TurnTiming(20.0, 20.0, grace=0.0)),
}
