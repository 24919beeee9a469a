"""Turns of a pool's backends in offering its idle GPUs: schedule and runner.

The scheduler counts each resource by itself. An idle GPU that several backends offer counts several
times, and of the pods that are bound for it in the same moment all but one fail.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio
import msgspec

from metagpu.core.availability.reasons import open_to
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import OfferTurn
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.events import LayoutApplied
from metagpu.core.state.facts import TurnsChanged
from metagpu.core.state.registry import Registry

_PHASES: Final = 4
"""Of a round. In the last one a single backend has all idle GPUs, for requests of several."""


class TurnTiming(msgspec.Struct, frozen=True):
    """Times of the turns, in seconds.

    Attributes:
        turn: the shortest turn, after each change of which GPUs are idle. A number of the Node
            rises 0.3 s late, and a waiting pod is bound within milliseconds of that.
        longest_turn: the longest turn. While nothing changes turns grow to it: each turn writes
            the Node.
        grace: the end of a turn, in which bound pods are still admitted and no others are bound:
            the Node's number is lower already, the kubelet's list is not.
    """

    turn: float = 2.0
    longest_turn: float = 6.0
    grace: float = 0.5


class TurnCandidate(msgspec.Struct, frozen=True):
    """One GPU of a pool as the turns see it.

    Attributes:
        backends: those that could grant its shares now, in the pool's order.
        owner: the backend that has the GPU, `None` while it is idle.
    """

    gpu: GpuId
    backends: tuple[str, ...]
    owner: str | None = None


@dataclass(slots=True)
class TurnSchedule:
    """The turns of one pool. Times are those of the event loop.

    While there are as many idle GPUs as backends, each backend has one: backend `i + phase` offers
    the idle GPU number `i`. In every fourth phase one backend has them all. A GPU that has just
    become idle is first offered by its last owner: the scheduler counts it there already.

    Attributes:
        turns: the present turn of each GPU.
        phase: counts the turns of the pool.
        phase_ends: when the next phase begins.
        next_at: when `apply` has something new.
    """

    timing: TurnTiming = field(default_factory=TurnTiming)
    turns: Mapping[GpuId, OfferTurn] = field(default_factory=dict)
    phase: int = 0
    phase_ends: float = float("-inf")
    next_at: float = float("inf")
    _quiet_phases: int = 0
    _idle: tuple[GpuId, ...] = ()

    def apply(self, gpus: Sequence[TurnCandidate], now: float) -> Mapping[GpuId, OfferTurn]:
        """Return the turn of each GPU; of one in use its owner's.

        A GPU that no pod can have keeps its turn.
        """
        idle = [gpu for gpu in gpus if gpu.owner is None and gpu.backends]
        self._advance(idle, now)
        self.next_at = self.phase_ends if idle else float("inf")
        wanted, following = _offering(idle, self.phase), _offering(idle, self.phase + 1)

        turns = {}
        for candidate in gpus:
            known = self.turns.get(candidate.gpu)
            if candidate.owner is not None:
                began = known.since if known and known.backend == candidate.owner else now
                turns[candidate.gpu] = OfferTurn(candidate.owner, began)
            elif candidate.gpu in wanted:
                known = _started(candidate, known, wanted[candidate.gpu], now)
                turns[candidate.gpu] = self._turn(
                    known, wanted[candidate.gpu], following[candidate.gpu], now
                )
            elif known is not None:
                turns[candidate.gpu] = known
        self.turns = turns
        return turns

    def seconds_to_next(self, now: float) -> float:
        """Return the seconds until `apply` has something new, infinite if never."""
        return max(0.0, self.next_at - now)

    def _advance(self, idle: Sequence[TurnCandidate], now: float) -> None:
        """Begin the next phase when its time has come, sooner after a change."""
        timing, present = self.timing, tuple(candidate.gpu for candidate in idle)
        if present != self._idle:
            self._idle, self._quiet_phases = present, 0
            self.phase_ends = min(self.phase_ends, now + timing.turn)
        if now < self.phase_ends:
            return
        self.phase += 1
        self._quiet_phases += 1
        round_of_all = max((len(candidate.backends) for candidate in idle), default=1) * _PHASES
        doubled = (self._quiet_phases - 1) // round_of_all
        self.phase_ends = now + min(timing.longest_turn, timing.turn * 2.0 ** min(doubled, 10))

    def _turn(self, known: OfferTurn, wanted: str, following: str, now: float) -> OfferTurn:
        """Return the turn of an idle GPU: as it is, at its end, or the next one."""
        timing = self.timing
        if known.withdrawn:
            self.next_at = min(self.next_at, known.until)
            return known
        if known.backend == wanted:
            return OfferTurn(
                wanted, known.since, next=following, until=self.phase_ends + timing.grace
            )

        due = known.since + timing.turn - timing.grace
        if now < due:
            self.next_at = min(self.next_at, due)
            return OfferTurn(known.backend, known.since, next=wanted, until=due + timing.grace)
        until = now + timing.grace
        self.next_at = min(self.next_at, until)
        return OfferTurn(known.backend, known.since, withdrawn=True, next=wanted, until=until)


def _offering(idle: Sequence[TurnCandidate], phase: int) -> Mapping[GpuId, str]:
    """Return the backend that a phase has for each idle GPU."""
    rounds, place = divmod(phase, _PHASES)
    if place == _PHASES - 1:
        return {
            candidate.gpu: candidate.backends[rounds % len(candidate.backends)]
            for candidate in idle
        }
    step = phase - rounds
    return {
        candidate.gpu: candidate.backends[(i + step) % len(candidate.backends)]
        for i, candidate in enumerate(idle)
    }


def _started(
    candidate: TurnCandidate, known: OfferTurn | None, wanted: str, now: float
) -> OfferTurn:
    """Return the turn that an idle GPU has now; a new one where the last has ended."""
    if known is not None and known.withdrawn and now >= known.until:
        return OfferTurn(known.next if known.next in candidate.backends else wanted, now)
    if known is None or known.backend not in candidate.backends:
        return OfferTurn(wanted, now)
    return known


class TurnRunner:
    """Applies the turns of each pool when GPUs become idle or used, and by the clock.

    Args:
        registry: has the GPUs, and receives the turns.
        pools: returns the GPUs of each pool whose backends take turns.
        clock: returns the event loop's time.
        timing: the lengths of turns.
    """

    def __init__(
        self,
        registry: Registry,
        pools: Callable[[], Iterable[Sequence[GpuId]]],
        clock: Callable[[], float] = anyio.current_time,
        timing: TurnTiming | None = None,
    ) -> None:
        self._registry = registry
        self._pools = pools
        self._clock = clock
        self._timing = timing or TurnTiming()
        self._schedules: dict[tuple[GpuId, ...], TurnSchedule] = {}
        self._changed = anyio.Event()

    async def run(self) -> None:
        """Follow GPUs and clock until cancelled; afterwards no backend takes turns."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch)
                group.start_soon(self._follow_layout)
                while True:
                    self._changed = anyio.Event()
                    with anyio.move_on_after(self.update()):
                        await self._changed.wait()
        finally:
            gpus = self._registry.snapshot.gpus
            self._registry.apply(TurnsChanged(dict.fromkeys(gpus)))

    def update(self) -> float:
        """Apply the present turns; return the seconds until the next change of a turn."""
        now = self._clock()
        self._registry.apply(TurnsChanged(self._turns(now)))
        waits = (schedule.seconds_to_next(now) for schedule in self._schedules.values())
        return min(waits, default=float("inf"))

    def _turns(self, now: float) -> Mapping[GpuId, OfferTurn | None]:
        """Return the turn of each GPU, `None` where no backends take turns."""
        snapshot, known = self._registry.snapshot, self._schedules
        turns = dict.fromkeys(snapshot.gpus, None)
        self._schedules = {}
        for pool in self._pools():
            states = [snapshot.gpus[gpu] for gpu in pool if gpu in snapshot.gpus]
            shared = [candidate_of(state) for state in states if len(state.backends) > 1]
            if shared:
                key = tuple(candidate.gpu for candidate in shared)
                self._schedules[key] = known.get(key) or TurnSchedule(self._timing)
                turns |= self._schedules[key].apply(shared, now)
        return turns

    async def _watch(self) -> None:
        async for _ in self._registry.watch(_watched_state):
            self._changed.set()

    async def _follow_layout(self) -> None:
        """Update at each configuration: it may begin or end turns with the same shares."""
        with self._registry.events.subscribe(LayoutApplied) as events:
            async for _ in events:
                self._changed.set()


def candidate_of(state: GpuState) -> TurnCandidate:
    """Return a GPU as the turns see it; without backends while no pod can have it."""
    reserved = [
        backend
        for backend, provisioned_state in state.provisioned.items()
        if provisioned_state.exclusive
    ]
    owner = state.owner or next(iter(reserved), None)
    backends = tuple(backend for backend in state.backends if open_to(state, backend))
    return TurnCandidate(state.gpu.id, backends, owner)


def _watched_state(snapshot: Snapshot) -> object:
    return snapshot.offers, [
        candidate_of(state) for state in snapshot.gpus.values() if len(state.backends) > 1
    ]
