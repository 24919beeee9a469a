"""Turns of backends, applied to the registry as GPUs and the clock change."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import anyio

from metagpu.core.availability.reasons import open_to
from metagpu.core.layout.offer_turns import TurnCandidate, TurnSchedule, TurnTiming
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import OfferTurn
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.events import LayoutApplied
from metagpu.core.state.facts import TurnsChanged
from metagpu.core.state.registry import Registry


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
            gpus = self._registry.snapshot.gpus.values()
            self._registry.apply(TurnsChanged({it.gpu.id: None for it in gpus}))

    def update(self) -> float:
        """Apply the turns of now; return the seconds until the next change of a turn."""
        now = self._clock()
        self._registry.apply(TurnsChanged(self._turns(now)))
        waits = (it.seconds_to_next(now) for it in self._schedules.values())
        return min(waits, default=float("inf"))

    def _turns(self, now: float) -> Mapping[GpuId, OfferTurn | None]:
        """Return the turn of each GPU, `None` where no backends take turns."""
        snapshot, known = self._registry.snapshot, self._schedules
        turns = dict.fromkeys(snapshot.gpus, None)
        self._schedules = {}
        for pool in self._pools():
            states = [snapshot.gpus[gpu] for gpu in pool if gpu in snapshot.gpus]
            shared = [candidate_of(it) for it in states if len(it.backends) > 1]
            if shared:
                key = tuple(it.gpu for it in shared)
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
    reserved = [backend for backend, it in state.provisioned.items() if it.exclusive]
    owner = state.owner or next(iter(reserved), None)
    backends = tuple(backend for backend in state.backends if open_to(state, backend))
    return TurnCandidate(state.gpu.id, backends, owner)


def _watched_state(snapshot: Snapshot) -> object:
    return snapshot.offers, [
        candidate_of(state) for state in snapshot.gpus.values() if len(state.backends) > 1
    ]
