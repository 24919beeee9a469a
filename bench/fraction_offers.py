"""Rules by which the free shares of fractions are offered, on modelled GPUs."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from bench.cluster_model import Pod

WHOLE: Final = 100
RESOURCE: Final = "fraction"

Rule = Callable[["Fractions", float], Collection[int]]
"""Returns the GPUs whose free shares are on offer at a time."""


@dataclass(eq=False)
class Fractions:
    """GPUs of 100 shares. A pod gets the fullest GPU on offer that has room, as by `binpack`.

    Attributes:
        free: the free shares of each GPU.
        offered: those that are listed Healthy.
        withheld: the pods about to end whose shares are Unhealthy before it.
        changed: when the last pod was admitted.
    """

    gpus: int
    rule: Rule
    free: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    withheld: set[Pod] = field(default_factory=set)
    changed: float = float("-inf")
    _held: dict[Pod, Mapping[int, int]] = field(default_factory=dict)
    _ending: set[Pod] = field(default_factory=set)
    _admitted: bool = False

    def __post_init__(self) -> None:
        """Offer idle GPUs."""
        self.free = [WHOLE] * self.gpus
        self.advance(0.0)

    def idle(self) -> list[int]:
        """Return the idle GPUs."""
        return [gpu for gpu, free in enumerate(self.free) if free == WHOLE]

    def partial(self) -> list[int]:
        """Return the GPUs with free and held shares, the one with most free shares first."""
        gpus = [gpu for gpu, free in enumerate(self.free) if 0 < free < WHOLE]
        return sorted(gpus, key=lambda gpu: -self.free[gpu])

    def amounts(self) -> Mapping[str, int]:
        """Return what is listed; where the number alone falls for ends, no more than after them.

        The scheduler frees a pod's shares before it hears of another number.
        """
        now = self.listed()[RESOURCE]
        if self.rule is exact:
            return {RESOURCE: now}
        ends = [self._ending, *({pod} for pod in self._ending)]
        return {RESOURCE: min([now, *(self._after(pods) for pods in ends)])}

    def listed(self) -> Mapping[str, int]:
        """Return the held shares and those on offer."""
        held = self.gpus * WHOLE - sum(self.free) - sum(pod.size for pod in self.withheld)
        return {RESOURCE: held + sum(self.offered)}

    def withhold(self) -> None:
        """Take the shares of pods about to end out of the list."""
        self.withheld = set(self._ending)

    def _after(self, ended: Collection[Pod]) -> int:
        after = Fractions(self.gpus, self.rule)
        after.changed = self.changed
        after.free = list(self.offered)
        held = self.gpus * WHOLE - sum(self.free)
        for pod in ended:
            held -= pod.size
            for gpu, size in self._held[pod].items():
                after.free[gpu] += size
        after.advance(self.changed + STAGE_S)
        return held + sum(after.offered)

    def admit(self, pod: Pod) -> bool:
        """Place a pod on one GPU, or on whole GPUs and a part of one more."""
        parts = self._place(pod.size)
        if parts is None:
            return False
        for gpu, size in parts.items():
            self.free[gpu] -= size
        self._held[pod] = parts
        self._admitted = True
        return True

    def _place(self, size: int) -> Mapping[int, int] | None:
        whole, rest = divmod(size, WHOLE) if size > WHOLE else (0, size)
        idle = [gpu for gpu, free in enumerate(self.offered) if free == WHOLE]
        parts = dict.fromkeys(idle[:whole], WHOLE)
        fitting = [
            (free, gpu)
            for gpu, free in enumerate(self.offered)
            if free >= rest > 0 and gpu not in parts
        ]
        if fitting:
            parts[min(fitting)[1]] = rest
        return parts if sum(parts.values()) == size else None

    def announce(self, pod: Pod) -> None:
        """Note that a pod is about to end."""
        self._ending.add(pod)

    def release(self, pod: Pod, now: float) -> None:  # noqa: ARG002 - the model's protocol
        """Free a pod's shares: their ids stay listed until the rule decides."""
        self._ending.discard(pod)
        for gpu, size in self._held.pop(pod).items():
            self.free[gpu] += size
            if pod not in self.withheld:
                self.offered[gpu] += size
        self.withheld.discard(pod)

    def advance(self, now: float) -> float:
        """Apply the rule."""
        if self._admitted:
            self.changed, self._admitted = now, False
        chosen = self.rule(self, now)
        self.offered = [free if gpu in chosen else 0 for gpu, free in enumerate(self.free)]
        wakes = self.changed + STAGE_S
        return wakes if wakes > now else float("inf")

    def use(self) -> float:
        """Return the held part of all shares."""
        return 1 - sum(self.free) / (self.gpus * WHOLE)


STAGE_S: Final = 1.0
"""The quiet after an admission that `staged` waits for."""


def everything(node: Fractions, now: float) -> Collection[int]:  # noqa: ARG001 - a rule
    """Offer every free share, which is what counting does."""
    return range(node.gpus)


def largest(node: Fractions, now: float) -> Collection[int]:  # noqa: ARG001 - a rule
    """Offer idle GPUs and the largest part: each request that counts as free fits."""
    return [*node.idle(), *node.partial()[:1]]


def exact(node: Fractions, now: float) -> Collection[int]:
    """Offer the same; the shares of pods about to end leave the list, as metagpu does it."""
    node.withhold()
    return largest(node, now)


def smallest(node: Fractions, now: float) -> Collection[int]:  # noqa: ARG001 - a rule
    """Offer idle GPUs and the smallest part beside them, the largest where none is idle."""
    idle = node.idle()
    return [*idle, *(node.partial()[-1:] if idle else node.partial()[:1])]


def staged(node: Fractions, now: float) -> Collection[int]:
    """Offer idle GPUs or the largest part, and both after a second without a pod."""
    if now >= node.changed + STAGE_S:
        return largest(node, now)
    return node.idle() or node.partial()[:1]


def freest(node: Fractions, now: float) -> Collection[int]:  # noqa: ARG001 - a rule
    """Offer one GPU alone, so that no burst can fail."""
    return node.idle()[:1] or node.partial()[:1]


RULES: Final[Mapping[str, Rule]] = {
    "all": everything,
    "exact": exact,
    "100 k + largest": largest,
    "100 k + smallest": smallest,
    "staged": staged,
    "freest GPU": freest,
}
